"""How long it takes to lay a model out: 1,000 parameters for 64 ranks, and what each rank has of them."""

import itertools
import time
from typing import Any

import pytest

from cuts import cut

WORLD = 64
SIZES = [1024 * 1024, 1024, 4 * 1024 * 1024, 4096] * 250
fresh = itertools.count(1)  # a list of sizes that was seen before is not laid out again


def lay_out(partition: str, sizes: list[int]) -> int:
    made = cut(partition, sizes, WORLD)
    return sum(len(made.spans(rank)) for rank in range(WORLD))


@pytest.mark.benchmark(group="a layout", timer=time.process_time)
@pytest.mark.parametrize("partition", ["even", "whole"])
def test_layout(benchmark: Any, partition: str) -> None:
    spans = benchmark.pedantic(lay_out, setup=lambda: ((partition, [*SIZES, next(fresh)]), {}), rounds=20)
    assert len(SIZES) < spans <= len(SIZES) + WORLD
