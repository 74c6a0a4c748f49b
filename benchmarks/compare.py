"""Compares two files that `make bench` wrote: CPU time, benchmark by benchmark.

    python benchmarks/compare.py benchmarks/results/0.1.0.json benchmarks/out/bench.json

Exits with 1 where a benchmark takes over 10% more CPU time than before, or is gone; with 2 where a file cannot be read.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from report import align


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("before", type=Path, help="what is compared with")
    parser.add_argument("after", type=Path)
    parser.add_argument("--over", type=float, default=10.0, metavar="PERCENT", help="allowed (default: %(default)g)")
    given = parser.parse_args()
    try:
        (cpu_before, before), (cpu_after, after) = read(given.before), read(given.after)
    except (OSError, ValueError, KeyError) as error:
        print(f"not a file of make bench: {error!r}", file=sys.stderr)
        sys.exit(2)
    print(table(before, after, over=given.over))
    if cpu_before != cpu_after:
        print(f"\nNot the same machine: {cpu_before} before, {cpu_after} after. Times cannot be compared.")
    slower = regressions(before, after, over=given.over)
    if slower:
        sys.exit(f"\nFAILED: over {given.over:g}% more CPU time, or gone: " + ", ".join(slower))


def read(file: Path) -> tuple[str, dict[str, float]]:
    """The processor, and the median CPU milliseconds of each benchmark."""
    content = json.loads(file.read_text())
    times = {one["fullname"]: 1000 * float(one["stats"]["median"]) for one in content["benchmarks"]}
    return content["machine_info"]["cpu"]["brand_raw"], times


def regressions(before: Mapping[str, float], after: Mapping[str, float], *, over: float) -> list[str]:
    return [name for name in before if name not in after or after[name] > before[name] * (1 + over / 100)]


def table(before: Mapping[str, float], after: Mapping[str, float], *, over: float) -> str:
    slower = regressions(before, after, over=over)
    lines = [("benchmark", "before", "after", "ratio", "")]
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        ratio = f"{new / old:.2f}" if old and new is not None else ""
        verdict = "REGRESSION" if name in slower else "new" if old is None else ""
        lines.append((name, _milliseconds(old), _milliseconds(new), ratio, verdict))
    return "CPU ms, medians\n\n" + align(lines)


def _milliseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.2f}"


if __name__ == "__main__":
    main()
