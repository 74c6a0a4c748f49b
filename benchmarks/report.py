"""What the commands have in common around their measurements: options, tables, the files they write."""

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from launch import take_turns

OUT = Path(__file__).parent / "out"
MIB = 2**20


def parser_of(page: str | None, **numbers: tuple[float | list[int], str]) -> argparse.ArgumentParser:
    """page: the docstring of the command. numbers: options by name, with their default and what they are; several are
    given where the default is a list."""
    parser = argparse.ArgumentParser(
        description=page, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, (default, what) in numbers.items():
        option = f"--{name.replace('_', '-')}"
        of = {"type": int, "nargs": "+"} if isinstance(default, list) else {"type": type(default)}
        parser.add_argument(option, metavar="N", default=default, help=f"{what} (default: %(default)s)", **of)
    parser.add_argument("--out", type=Path, metavar="DIR", default=OUT, help="of the results (default: %(default)s)")
    return parser


def add_names(parser: argparse.ArgumentParser, option: str, names: Sequence[str], default: Sequence[str] = ()) -> None:
    """An option that takes some of the names; by default all, or those of `default`."""
    told = f"of {', '.join(names)} (default: {' '.join(default) or 'all'})"
    parser.add_argument(option, nargs="+", choices=names, metavar="NAME", default=list(default or names), help=told)


def align(lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table: the first `left` columns to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [[*map(str.ljust, line[:left], widths), *map(str.rjust, line[left:], widths[left:])] for line in lines]
    return "\n".join("  ".join(line) for line in aligned)


def machine() -> str:
    """What all is computed on, and when."""
    gpus = torch.cuda.device_count()
    where = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{os.cpu_count()} cores of {processor()}"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{where}{load}, torch {torch.__version__}, {time.strftime('%d %B %Y').lstrip('0')}"


def processor() -> str:
    """The processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def write(out: Path, name: str, content: Mapping[str, Any], draw: Callable[[Path], None] | None = None) -> None:
    """A JSON file, and beside it a picture, where matplotlib is there."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"\nwrote {out / name}.json")
    try:
        if draw is not None:
            draw(out / f"{name}.png")
            print(f"wrote {out / name}.png")
    except ImportError as error:
        print(f"no picture: {error}")


Figures = dict[str, Any]
"""By what they are: numbers, words, or None for what is not known."""


def tabulate(
    jobs: Mapping[str, Callable[[], Figures]], rounds: int, out: Path, name: str, subject: str
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Takes turns, prints the medians of each job as a line, and writes all to a file. Returns the medians, and why
    others failed."""
    print(f"{subject}\n", flush=True)
    found, failed = take_turns(jobs, rounds)
    rows = {title: {key: _median([of[key] for of in taken]) for key in taken[0]} for title, taken in found.items()}
    if rows:
        head = ("", *next(iter(rows.values())))
        print(align([head, *((title, *map(_shown, row.values())) for title, row in rows.items())]))
    write(out, name, {"subject": subject, "rounds": found})
    return rows, failed


def _median(values: Sequence[Any]) -> Any:
    return statistics.median(values) if all(isinstance(one, (int, float)) for one in values) else values[-1]


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def failures(failed: Mapping[str, str]) -> str | None:
    """For sys.exit."""
    return "\n".join(f"FAILED: {name}: {told}" for name, told in failed.items()) or None
