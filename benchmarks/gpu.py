"""One rank of a large world, alone: what each variant holds, and how long the host is busy for a step.

The other ranks are torch's fake process group, so nothing is sent and losses mean nothing; memory is that of a real
rank. Also counts, by the profiler, how often the host waits for the device in a settled step.

    python benchmarks/gpu.py --world 1024 --task gpt-1b

Side by side, with what is sent and with losses that are compared, is peers.py's: `--tasks gpt-1b --world 1` over NCCL,
and with more ranks than GPUs over Gloo. All of it runs on the CPU too.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from launch import Rank, RankFailed, run_one_of
from measure import read_cpu_seconds, wait_for_device
from peers import count_settled, run_step
from report import MIB, align
from rivals import VARIANTS
from tasks import TASKS

# DistributedDataParallel and DeepSpeed do not run without the others.
ALONE = ["zero2", "fsdp1kept", "fsdp2kept", "zero3kept", "fsdp1", "fsdp2", "zero3"]
ON_GPU = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
ON_CPU = ("aten::_local_scalar_dense",)  # a number read off a tensor, which on a GPU would be waited for


def measure_alone(variant: str, task: str, steps: int, rank: Rank) -> dict[str, Any]:
    trained, peak = count_settled(variant, task, rank)
    wait_for_device(rank.device)
    begin_cpu, seconds = read_cpu_seconds(), []
    for step in range(steps):
        begin = time.perf_counter()
        run_step(trained, task, step, rank)
        wait_for_device(rank.device)
        seconds.append(time.perf_counter() - begin)
    cpu_seconds = read_cpu_seconds() - begin_cpu
    return {
        "peak": peak,
        "step_ms": 1000 * statistics.median(seconds),
        "cpu_ms": 1000 * cpu_seconds / steps,
        "waits": count_waits(lambda: run_step(trained, task, steps, rank)),
    }


def count_waits(work: Callable[[], object]) -> dict[str, int]:
    """How often the host waits for the device, by what it waits in."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiled:
        work()
    waits = ON_GPU if on_gpu else ON_CPU
    return {event.key: event.count for event in profiled.key_averages() if event.key in waits}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--world", type=int, metavar="N", default=1024, help="ranks, of which one runs (default: %(default)s)")
    add("--task", choices=TASKS, default="gpt-1b" if torch.cuda.is_available() else "gpt")
    add("--variants", nargs="+", choices=ALONE, default=ALONE, metavar="NAME", help=f"of {', '.join(ALONE)}")
    add("--steps", type=int, metavar="N", default=10, help="timed steps (default: %(default)s)")
    given = parser.parse_args()
    lines, failed = [("variant", "peak MiB", "step ms", "CPU ms", "waits of the host")], []
    for name in given.variants:
        try:
            told = run_one_of(partial(measure_alone, name, given.task, given.steps), given.world)
        except RankFailed as failure:
            failed.append(f"{VARIANTS[name].title}: {str(failure).strip().splitlines()[-1]}")
            continue
        waits = ", ".join(f"{count} {kind}" for kind, count in told["waits"].items()) or "none"
        figures = (f"{told['peak'] / MIB:.1f}", f"{told['step_ms']:.1f}", f"{told['cpu_ms']:.1f}")
        lines.append((VARIANTS[name].title, *figures, waits))
    print(f"one rank of {given.world}, {given.task}\n\n{align(lines)}")
    if failed:
        sys.exit("FAILED: " + "\nFAILED: ".join(failed))


if __name__ == "__main__":
    main()
