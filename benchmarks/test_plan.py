"""How long it takes to plan: 1,000 parameters in blocks of 12, for 1,024 ranks."""

import time
from typing import Any

import pytest

import zero
from zero.plan import Options, Sizes


def many_parameters() -> Sizes:
    block = [(1000, 100), (100,)] * 6
    return Sizes.of_shapes([[], *[block] * 84])


@pytest.mark.benchmark(group="a plan", timer=time.process_time)
@pytest.mark.parametrize("partition", ["even", "whole"])
def test_plan(benchmark: Any, partition: Any) -> None:
    sizes = many_parameters()
    benchmark.pedantic(
        zero.plan, (sizes,), {"world_size": 1024, "options": Options(partition=partition)}, rounds=3, warmup_rounds=1
    )
