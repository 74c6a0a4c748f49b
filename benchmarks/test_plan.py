"""How long it takes to plan: 1,000 parameters in blocks of 12, for 1,024 ranks."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import zero


def many_parameters() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(*(nn.Linear(100, 1000) for _ in range(6))) for _ in range(84)))


@pytest.mark.benchmark(group="a plan", timer=time.process_time)
@pytest.mark.parametrize("partition", ["even", "whole"])
def test_plan(benchmark: Any, partition: Any) -> None:
    model = many_parameters()
    benchmark.pedantic(zero.plan, (model,), {"world_size": 1024, "partition": partition}, rounds=3, warmup_rounds=1)
