"""ShardedDDP beside DistributedDataParallel, with plain Adam and with ZeroRedundancyOptimizer: the time of a step."""

from typing import Any

import pytest

from steps import build_ddp, build_sharded_ddp, build_zero_redundancy, compare_steps
from turns import Clock, Turn, report

BUILDS = {"ddp": build_ddp, "zero_redundancy": build_zero_redundancy, "sharded_ddp": build_sharded_ddp}
clock = Clock()

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Turn]]:
    return compare_steps(BUILDS)


@pytest.mark.benchmark(group="a step with ShardedDDP", timer=clock)
@pytest.mark.parametrize("name", BUILDS)
def test_step(benchmark: Any, steps: dict[str, list[Turn]], name: str) -> None:
    report(benchmark, clock, steps, name)
