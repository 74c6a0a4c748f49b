"""ShardedDDP beside DistributedDataParallel, with plain Adam and with ZeroRedundancyOptimizer: the time of a step."""

from functools import partial
from typing import Any

import pytest

from steps import build_ddp, build_sharded_ddp, build_zero_redundancy, default_settings, measure_steps
from turns import Clock, Turn, report, take_turns

WORLD, TURNS = 2, 5
BUILDS = {"ddp": build_ddp, "zero_redundancy": build_zero_redundancy, "sharded_ddp": build_sharded_ddp}
clock = Clock()

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Turn]]:
    settings = default_settings()
    variants = {name: partial(measure_steps, build, settings) for name, build in BUILDS.items()}
    return take_turns(variants, world=WORLD, turns=TURNS)


@pytest.mark.benchmark(group="a step with ShardedDDP", timer=clock)
@pytest.mark.parametrize("name", BUILDS)
def test_step(benchmark: Any, steps: dict[str, list[Turn]], name: str) -> None:
    for turn, plain in zip(steps[name], steps["ddp"], strict=True):
        assert turn.ranks[0]["losses"] == plain.ranks[0]["losses"], "not the same training"
    report(benchmark, clock, steps, name)
