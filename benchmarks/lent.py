"""All that is to be tried on one GPU which is at hand for minutes: one command after another, each for so many seconds.

    python3 benchmarks/lent.py --seconds 560 --only 1 2 3

Needs nothing but a Python with torch, pytest and pytest-xdist. What a command prints is shown at once, and kept in a
file of its own in --out, which results are written to as well. A command that fails or takes too long stops none of the
others. One of which less than half would fit into the time of all is left out. Ends with a table, also when stopped.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = Path(__file__).parent / "out" / "lent"
GRACE = 8  # seconds in which a command that took too long may say what it has found
PYTEST = "ZERO_TEST_DEVICE=cuda PYTHON -m pytest -q -n 6 --dist worksteal"
WIRES = "PYTHON benchmarks/wires.py --only zero3 fsdp2"
OFFLOAD = "PYTHON benchmarks/peers.py --world 1 --model gpt-1b --bf16 --offload --rounds 1 --threads 14"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
KILLS = "tests/faults/test_faults.py tests/comm/test_watchdog.py"
ON_GPU = "tests/parity/test_gradient_rows.py tests/fsdp/test_{reentry,prefetch,mixed_precision}.py"

HOSTS = "PYTHON benchmarks/graphs.py --hosts 2 --layers 4"

ITEMS = f"""\
90  memory of NCCL, as a model is made, trains and is saved: PYTHON benchmarks/nccl_memory.py --out OUT
90  trains on another stream: {PYTEST} tests/fsdp/test_other_stream.py
90  stage 2, and NO_SHARD: {PYTEST} tests/sdp tests/parity/test_parity.py -k "sdp or NO_SHARD"
150 steps as CUDA graphs: PYTHON benchmarks/graphs.py --tokens 2048 --out OUT
60  memory in expandable segments: {EXPANDABLE} {WIRES} --rounds 1 --steps 4 --out OUT/expandable
150 offload beside FSDP2: {OFFLOAD} --contestants zero1 zero2 zero3 fsdp2 --out OUT/offload
40  comparisons of ranks, by hops: PYTHON benchmarks/hops.py --rounds 1 --out OUT
50  two hosts, one communicator: {HOSTS} --only zero3 fsdp2 --out OUT/one
50  two hosts, two communicators: ZERO_SECOND_COMMUNICATOR=1 {HOSTS} --only zero3 --out OUT/two
75  transfers of 24 CTAs, two communicators: {WIRES} --ctas 24 --rounds 2 --out OUT/ctas
75  transfers of 24 CTAs, one communicator: {WIRES} --ctas 24 --one --rounds 2 --out OUT/ctas_one
60  stages 1 and 2, reserved over 4 and 60 steps: {WIRES} zero1 zero2 --rounds 1 --steps 60 --out OUT/long
120 kills in backward: ZERO_FAULTS=1 {PYTEST} {KILLS} -k "backward or gpu"
120 graphs over NCCL: {HOSTS} --width 1024 --out OUT/nccl
120 a part of make gpu: {PYTEST} {ON_GPU}
120 transfers that sleep, as on docs/measurements.md: {WIRES} zero2 alone --rounds 2 --out OUT
75  64 ranks, one NIC a host: {WIRES} zero2 --world 64 --bandwidth 45 --tokens 2048 --rounds 1 --out OUT/one_nic
60  the CPU's step on 14 threads: PYTHON benchmarks/offload.py --threads 14 --turns 4 --out OUT
90  memory of saving: {PYTEST} tests/parity/test_memory_of_saving.py""".splitlines()
"""Seconds that it may take, title, command with PYTHON and OUT in it. First what has changed since it last ran so, next
what a GPU alone decides, then the rest."""


def run(command: str, seconds: float, out: Path, log: Path) -> str:
    """How it ended, in words. timeout(1) ends all processes of the command."""
    places = {"PYTHON": shlex.quote(sys.executable), "OUT": shlex.quote(str(out))}
    command = re.sub(r"\b(PYTHON|OUT)(?=[ /]|$)", lambda found: places[found.group()], command)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    limited = (
        f"timeout --signal INT --kill-after {GRACE} {seconds:.0f} env {command} 2>&1 | tee {shlex.quote(str(log))}"
    )
    code = subprocess.run(["bash", "-o", "pipefail", "-c", limited], cwd=ROOT, env=environment).returncode
    if code in (124, 137):
        return f"stopped after {seconds:.0f} s"
    return f"failed ({code})" if code else "passed"


def main() -> int:
    listed = "\n".join(f"{number:3} {item}" for number, item in enumerate(ITEMS, 1))
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=listed, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    numbers = range(1, len(ITEMS) + 1)
    parser.add_argument("--seconds", type=float, metavar="N", default=float("inf"), help="that all may take")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", choices=numbers, default=[*numbers])
    parser.add_argument("--out", type=Path, metavar="DIR", default=OUT, help="(default: %(default)s)")
    given = parser.parse_args()
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    until, ends = time.monotonic() + given.seconds, {}
    try:
        for number in given.only:
            title, _, command = ITEMS[number - 1].partition(": ")
            allowed, began = float(title.split()[0]), time.monotonic()
            left = until - began
            if left < allowed / 2:
                ends[title] = f"left out: {max(left, 0):.0f} s were left"
                continue
            ends[title] = "under way"
            print(f"\n--- {title}: {command}", flush=True)
            ended = run(command, min(allowed, left), out, out / f"{number:02}.txt")
            ends[title] = f"{ended}, {time.monotonic() - began:.0f} s"
    finally:
        print("\n" + "\n".join(f"{title:44}  {ended}" for title, ended in ends.items()), flush=True)
    return int(any(not ended.startswith("passed") for ended in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
