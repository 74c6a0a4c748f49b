"""Measures variants of one job in turn, each time in fresh processes, and hands the times to pytest-benchmark.

One variant after another, over and over, they meet the same machine: what else it does slows down all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from launch import Rank, run_ranks
from measure import read_cpu_seconds, wait_for_device

Measure = Callable[[Rank], dict[str, Any]]
"""Called on every rank; returns "seconds" and "cpu_seconds" of one repetition, and whatever else is to be compared."""


@dataclass(frozen=True)
class Turn:
    """One turn of one variant, over all ranks: the slowest rank's seconds, and the mean of the CPU seconds."""

    seconds: float
    cpu_seconds: float
    ranks: list[dict[str, Any]]


def take_turns(variants: Mapping[str, Measure], *, world: int, turns: int) -> dict[str, list[Turn]]:
    """The turns of each variant, in the order in which they were run."""
    taken: dict[str, list[Turn]] = {name: [] for name in variants}
    for _ in range(turns):
        for name, measure in variants.items():
            told = run_ranks(measure, world)
            cpu_seconds = sum(rank["cpu_seconds"] for rank in told) / world
            taken[name].append(Turn(max(rank["seconds"] for rank in told), cpu_seconds, told))
    return taken


def repeat(work: Callable[[], object], rank: Rank, *, times: int) -> dict[str, float]:
    """CPU time and time of one of so many, after one to warm up."""
    work()
    wait_for_device(rank.device)
    dist.barrier()
    cpu_seconds, begin = read_cpu_seconds(), time.perf_counter()
    for _ in range(times):
        work()
    wait_for_device(rank.device)
    return {
        "seconds": (time.perf_counter() - begin) / times,
        "cpu_seconds": (read_cpu_seconds() - cpu_seconds) / times,
    }


class Clock:
    """A timer for pytest-benchmark that advances by the CPU time that ranks have measured."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        self._seconds += seconds


def report(benchmark: Any, clock: Clock, taken: Mapping[str, list[Turn]], name: str) -> None:
    """Gives pytest-benchmark the CPU time of a variant's turns, and in extra_info how it compares with the others.

    CPU time is a rank's own, of all its threads, and the mean over the ranks: it is steady where time is not.
    ms, cpu_ms: medians over the turns. Of every other variant, ratio_to_... and cpu_ratio_to_...: the median of the
    ratios of turns that were run next to one another.
    """
    turns = taken[name]
    remaining = iter(turns)
    benchmark.pedantic(lambda: clock.advance(next(remaining).cpu_seconds), rounds=len(turns), iterations=1)
    benchmark.extra_info["ms"] = round(1000 * statistics.median(turn.seconds for turn in turns), 2)
    benchmark.extra_info["cpu_ms"] = round(1000 * statistics.median(turn.cpu_seconds for turn in turns), 2)
    for other, others in taken.items():
        if other != name:
            pairs = list(zip(turns, others, strict=True))
            ratio = statistics.median(one.seconds / two.seconds for one, two in pairs)
            cpu_ratio = statistics.median(one.cpu_seconds / two.cpu_seconds for one, two in pairs)
            benchmark.extra_info[f"ratio_to_{other}"] = round(ratio, 3)
            benchmark.extra_info[f"cpu_ratio_to_{other}"] = round(cpu_ratio, 3)
