"""What torch's profiler, and the log at DEBUG, show of a step: the units and buckets by name."""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

import ranks
import zero
from logs import Heard
from runs import at_stage


def built(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if stage == 3:
        model = zero.FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        return model, SGD(model.parameters(), 0.1)
    return at_stage(stage, net, SGD, lr=0.1)


def names(rank: int, world: int, stage: int) -> set[str]:
    model, optimizer = built(stage)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return {event.key for event in profiler.key_averages() if event.key.startswith("zero::")}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_units_and_buckets_are_named_where_they_are_unsharded_resharded_and_reduced():
    for found in ranks.run(names, 2, args=(3,)):
        for unit in ("unit '0'", "unit '1'"):
            for act in ("unshard", "wait_for_unshard", "reshard", "reduce", "wait_for_reduce"):
                assert f"zero::{act} {unit}" in found
    for found in ranks.run(names, 2, args=(2,)):
        assert {name.split()[0] for name in found} >= {"zero::reduce", "zero::unshard", "zero::wait_for_unshard"}


def logged(rank: int, world: int, stage: int, level: int) -> list[str]:
    model, optimizer = built(stage)
    with Heard(level=level) as heard:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return heard.messages


@pytest.mark.parametrize("stage", [2, 3])
def test_every_rank_logs_what_a_step_does_to_each_unit_and_bucket(stage):
    expected = {2: {"reduce", "unshard"}, 3: {"unshard", "reshard", "reduce"}}[stage]
    for rank, lines in enumerate(ranks.run(logged, 2, args=(stage, logging.DEBUG))):
        told = {tuple(line.removeprefix(f"rank {rank}: ").split(" ", 1)) for line in lines}
        assert {act for act, _ in told} >= expected
        assert stage < 3 or {(act, unit) for act in expected for unit in ("unit '0'", "unit '1'")} <= told
    assert ranks.run(logged, 2, args=(stage, logging.INFO)) == [[], []]
