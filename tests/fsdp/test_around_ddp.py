"""DistributedDataParallel around what averages its own gradients, and inside of it: refused before anything is sent."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as ddp
from torch.optim import SGD

import ranks
import zero
from runs import take_step


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 7))


def sharded_ddp(module):
    return zero.ShardedDDP(module, zero.OSS(module.parameters(), SGD, lr=0.1))


def within(module):
    return nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"trunk": module}))


def fsdp_of(module):
    return zero.FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


WITHIN = "'1.trunk.module.0.weight'", "DistributedDataParallel"
INSIDE = "'0' is a DistributedDataParallel", r"\.module"
CASES = {
    "around the module in FSDP": (lambda: ddp(zero.FSDP(net()).module), "'0.weight'", WITHIN[1], "FSDP"),
    "around a module that contains FSDP": (lambda: ddp(within(zero.FSDP(net()))), *WITHIN, "FSDP"),
    "around a module that contains ShardedDDP": (lambda: ddp(within(sharded_ddp(net()))), *WITHIN, "ShardedDDP"),
    "inside FSDP": (lambda: fsdp_of(nn.Sequential(ddp(net()))), *INSIDE),
    "inside ShardedDDP": (lambda: sharded_ddp(nn.Sequential(ddp(net()))), *INSIDE),
}


def refused(rank, world, case):
    try:
        CASES[case][0]()
    finally:
        ddp(net())(torch.ones(2, 8)).sum().backward()  # nothing was sent that another would take for its own


@pytest.mark.parametrize("case", CASES)
def test_ddp_around_what_averages_its_own_gradients_or_inside_of_it_is_refused(case):
    error = ValueError if case.startswith("inside") else RuntimeError
    ranks.expect_error(refused, 2, error, *CASES[case][1:], args=(case,))


@ranks.raises(2, RuntimeError, "was put into torch's Join", r"in zero\.join\(batches, ddp\)", "wrap the module again")
def test_ddp_in_torchs_join_is_refused_on_every_rank(rank, world):
    model = ddp(net())
    optimizer = zero.OSS(model.parameters(), SGD, lr=0.1)
    with model.join():
        take_step(optimizer, model(torch.ones(2, 8)).sum())
