"""OSS beside plain Adam and torch's ZeroRedundancyOptimizer: the time of a step, and of bringing the state together."""

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam

import zero
from launch import Rank
from measure import read_cpu_seconds
from steps import WORLD, build_ddp, build_oss, build_zero_redundancy, compare_steps
from turns import Clock, Turn, report, take_turns

BUILDS = {"ddp": build_ddp, "zero_redundancy": build_zero_redundancy, "oss": build_oss}
clock = Clock()

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Turn]]:
    return compare_steps(BUILDS)


@pytest.mark.benchmark(group="a step with OSS", timer=clock)
@pytest.mark.parametrize("name", BUILDS)
def test_step(benchmark: Any, steps: dict[str, list[Turn]], name: str) -> None:
    report(benchmark, clock, steps, name)


LAYERS, WIDTH = 16, 1024  # 16.8M parameters


def measure_consolidation(name: str, rank: Rank) -> dict[str, Any]:
    """Of the state of Adam after one step, to rank 0."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(rank.device)
    if name == "oss":
        optimizer: Any = zero.OSS(model.parameters(), optim=Adam)
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    dist.barrier()
    cpu_seconds, begin = read_cpu_seconds(), time.perf_counter()
    optimizer.consolidate_state_dict(to=0)
    if rank.rank == 0:
        state = optimizer.state_dict()["state"]
    dist.barrier()
    seconds, cpu_seconds = time.perf_counter() - begin, read_cpu_seconds() - cpu_seconds
    if rank.rank == 0:
        assert len(state) == LAYERS
        assert all(entry["exp_avg"].shape == (WIDTH, WIDTH) for entry in state.values())
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


@pytest.fixture(scope="module")
def consolidations() -> dict[str, list[Turn]]:
    variants = {name: partial(measure_consolidation, name) for name in ("zero_redundancy", "oss")}
    return take_turns(variants, world=WORLD, turns=3)


@pytest.mark.benchmark(group="consolidation of the state of 16.8M parameters", timer=clock)
@pytest.mark.parametrize("name", ["zero_redundancy", "oss"])
def test_consolidation(benchmark: Any, consolidations: dict[str, list[Turn]], name: str) -> None:
    report(benchmark, clock, consolidations, name)
    if name == "oss":
        assert benchmark.extra_info["ratio_to_zero_redundancy"] <= 0.1
