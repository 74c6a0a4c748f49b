"""What torch's profiler shows of a step: the units and buckets by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

import ranks
import zero
from atstage import at_stage


def names(rank: int, world: int, stage: int) -> set[str]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if stage == 3:
        model: nn.Module = zero.FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        optimizer: torch.optim.Optimizer = SGD(model.parameters(), 0.1)
    else:
        model, optimizer = at_stage(stage, net, SGD, lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return {event.key for event in profiler.key_averages() if event.key.startswith("zero::")}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_units_are_named_where_they_are_unsharded_resharded_and_reduced():
    for found in ranks.run(names, 2, args=(3,)):
        for unit in ("unit '0'", "unit '1'"):
            for act in ("unshard", "wait_for_unshard", "reshard", "reduce", "wait_for_reduce"):
                assert f"zero::{act} {unit}" in found


def test_buckets_are_named_where_they_are_reduced_and_gathered():
    for found in ranks.run(names, 2, args=(2,)):
        assert {name.split()[0] for name in found} >= {"zero::reduce", "zero::unshard", "zero::wait_for_unshard"}
