"""All that is to be tried on one GPU which is at hand for minutes: one command after another, each for so many seconds.

    python3 benchmarks/lent.py --seconds 560 --only 1 2 3

Needs nothing but a Python with torch, pytest and pytest-xdist. What a command prints is shown at once, and kept in a
file of its own in --out, which results are written to as well. A command that fails or takes too long stops none of the
others. One of which less than half would fit into the time of all is left out. Ends with a table, also when stopped.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

ROOT = Path(__file__).parents[1]
OUT = Path(__file__).parent / "out" / "lent"
GRACE = 8.0  # seconds in which a command that took too long may say what it has found


@dataclass(frozen=True)
class Item:
    """command: with PYTHON and OUT in it, and settings of the environment before it. seconds: that it may take."""

    title: str
    command: str
    seconds: float


PYTEST = "ZERO_TEST_DEVICE=cuda PYTHON -m pytest -q -n 6 --dist worksteal"
TWO = '--only "zero stage 3" FSDP2'

ITEMS = [
    Item("trains on another stream", f"{PYTEST} tests/fsdp/test_other_stream.py", 90),
    Item("memory of saving", f"{PYTEST} tests/parity/test_memory_of_saving.py", 90),
    Item("steps as CUDA graphs", "PYTHON benchmarks/graphs.py --world 8 --tokens 2048 --out OUT", 150),
    Item(
        "transfers of 24 CTAs, two communicators",
        f"PYTHON benchmarks/wires.py {TWO} --ctas 24 --rounds 2 --out OUT/ctas",
        75,
    ),
    Item(
        "transfers of 24 CTAs, one communicator",
        f"PYTHON benchmarks/wires.py {TWO} --ctas 24 --one --rounds 2 --out OUT/ctas_one",
        75,
    ),
    Item("memory of NCCL", "PYTHON benchmarks/nccl_memory.py", 90),
    Item(
        "offload on 14 threads",
        "PYTHON benchmarks/offload.py --threads 14 --turns 4 --parameters 4e8 --out OUT",
        150,
    ),
    Item(
        "memory in expandable segments",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        f"PYTHON benchmarks/wires.py {TWO} --rounds 1 --steps 4 --out OUT/expandable",
        60,
    ),
    Item(
        "64 ranks, one NIC a host",
        "PYTHON benchmarks/wires.py --world 64 --bandwidth 45 --tokens 2048 --rounds 1 --out OUT/one_nic "
        '--only "zero stage 2" "zero stage 3" FSDP2',
        75,
    ),
    Item(
        "kills in backward",
        f'ZERO_FAULTS=1 {PYTEST} tests/faults/test_faults.py tests/comm/test_watchdog.py -k "backward or gpu"',
        120,
    ),
    Item(
        "a part of make gpu",
        f"{PYTEST} tests/parity/test_no_sync_rows.py tests/fsdp/test_reentry.py tests/fsdp/test_prefetch.py "
        "tests/fsdp/test_mixed_precision.py tests/fsdp/test_strategies.py",
        120,
    ),
    Item(
        "transfers that sleep, as on docs/gpus.md",
        'PYTHON benchmarks/wires.py --only "nothing sharded" FSDP2 "zero stage 3" "zero stage 2" --rounds 2 --out OUT',
        120,
    ),
    Item("graphs over NCCL", "PYTHON benchmarks/graphs.py --hosts 2 --layers 4 --width 1024 --out OUT/nccl", 120),
]


def parsed(command: str, out: Path) -> tuple[list[str], dict[str, str]]:
    """The words of a command, and its environment."""
    places = {"PYTHON": sys.executable, "OUT": str(out)}
    words = [re.sub(r"^(PYTHON$|OUT\b)", lambda found: places[found.group()], word) for word in shlex.split(command)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return words, environment


def run(item: Item, seconds: float, out: Path, log: Path) -> str:
    """How it ended, in words."""
    words, environment = parsed(item.command, out)
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    reader = Thread(target=show, args=(process.stdout, log), daemon=True)
    reader.start()
    try:
        code = process.wait(seconds)
        return f"failed ({code})" if code else "passed"
    except subprocess.TimeoutExpired:
        send(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return f"stopped after {seconds:.0f} s"
    finally:  # ranks, and the server that forks them, may be left
        send(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(GRACE)


def send(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def show(stream: IO[bytes], log: Path) -> None:
    """Here and in the file."""
    with log.open("wb") as kept:
        while chunk := stream.read1():  # type: ignore[attr-defined]
            for to in (sys.stdout.buffer, kept):
                to.write(chunk)
                to.flush()


def tell(rows: list[tuple[str, str, str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{title:{widths[0]}}  {seconds:>{widths[1]}}  {ended}" for title, seconds, ended in rows]
    print("\n" + "\n".join(lines), flush=True)


def main() -> int:
    numbered = "\n".join(
        f"{number:3} {item.title}, {item.seconds:.0f} s: {item.command}" for number, item in enumerate(ITEMS, 1)
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=numbered,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seconds", type=float, metavar="N", default=float("inf"), help="that all may take")
    numbers = range(1, len(ITEMS) + 1)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", choices=numbers, default=[*numbers])
    parser.add_argument("--out", type=Path, metavar="DIR", default=OUT, help="(default: %(default)s)")
    given = parser.parse_args()
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    until, rows = time.monotonic() + given.seconds, [("", "seconds", "")]
    try:
        for number in given.only:
            item, began = ITEMS[number - 1], time.monotonic()
            title, left = f"{number:2} {item.title}", until - began
            if left < item.seconds / 2:
                rows.append((title, "-", f"left out: {max(left, 0):.0f} s were left"))
                continue
            rows.append((title, "-", "under way"))
            print(f"\n--- {title}: {item.command}", flush=True)
            try:
                ended = run(item, min(item.seconds, left), out, out / f"{number:02}.txt")
            except OSError as error:
                ended = f"failed: {error}"
            rows[-1] = (title, f"{time.monotonic() - began:.0f}", ended)
    finally:
        tell(rows)
    return int(any(ended != "passed" for *_, ended in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
