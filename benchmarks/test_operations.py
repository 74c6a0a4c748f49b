"""The two operations that carry the stages, by each way that they can go and at each cut: 60 MiB in 25 parameters."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from cuts import cut
from launch import Rank
from turns import Clock, Turn, repeat, report, take_turns
from zero.comm import Comm
from zero.comm.host_memory import attach

WORLD, TURNS, TIMES = 2, 3, 10
SIZES = [1 << 20] * 15 + [1 << 10] * 10
WAYS = ["collectives"] if torch.cuda.is_available() else ["reading", "collectives"]
CUTS = ["even", "whole"]
clock = Clock()

pytestmark = pytest.mark.timeout(600)


def measure_operation(operation: str, way: str, partition: str, rank: Rank) -> dict[str, Any]:
    """CPU time and time of one. Runs in a process of its own."""
    if way == "collectives":
        attach.host = lambda: ""  # a host without a name is nobody's neighbour
    comm, bounds = Comm(), cut(partition, SIZES, WORLD).bounds
    buffer = torch.full((bounds[-1],), float(rank.rank + 1), device=rank.device)
    work = start_gather(comm, buffer, bounds) if operation == "gather" else start_reduce(comm, buffer, bounds)
    told, result = repeat(work, rank, times=TIMES), work()
    firsts = result[:1] if operation == "reduce" else result[[*bounds[:-1]]]  # of the segments
    expected = [sum(range(1, WORLD + 1))] if operation == "reduce" else [*range(1, WORLD + 1)]
    assert firsts.tolist() == expected, f"{operation} by {way} came out wrong: {firsts}"
    return told


def start_gather(comm: Comm, buffer: torch.Tensor, bounds: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    channel = comm.channel("the benchmark's gather")

    def gather() -> torch.Tensor:
        comm.gather(buffer, bounds, channel).wait()
        return buffer

    return gather


def start_reduce(comm: Comm, buffer: torch.Tensor, bounds: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    counts = [high - low for low, high in pairwise(bounds)]
    return lambda: comm.reduce([(buffer, counts)]).wait()


@pytest.fixture(scope="module", params=["gather", "reduce"])
def operations(request: pytest.FixtureRequest) -> dict[str, list[Turn]]:
    variants = {
        f"{request.param} by {way}, {partition} cut": partial(measure_operation, request.param, way, partition)
        for way in WAYS
        for partition in CUTS
    }
    return take_turns(variants, world=WORLD, turns=TURNS)


@pytest.mark.benchmark(group="a gather or a reduce of 60 MiB", timer=clock)
@pytest.mark.parametrize("partition", CUTS)
@pytest.mark.parametrize("way", WAYS)
def test_operation(benchmark: Any, operations: dict[str, list[Turn]], way: str, partition: str) -> None:
    [name] = [name for name in operations if name.endswith(f"by {way}, {partition} cut")]
    report(benchmark, clock, operations, name)
