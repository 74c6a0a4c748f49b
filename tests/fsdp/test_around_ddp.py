"""DistributedDataParallel around what averages its own gradients, and inside of it: refused before anything is sent."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
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


AROUND = {
    "the module in FSDP": (lambda: zero.FSDP(net()).module, "'0.weight'"),
    "a module that contains FSDP": (lambda: within(zero.FSDP(net())), "'1.trunk.module.0.weight'"),
    "a module that contains ShardedDDP": (lambda: within(sharded_ddp(net())), "'1.trunk.module.0.weight'"),
}


def _refused(rank, world, build, *args):
    try:
        build(*args)
    finally:
        alone = DistributedDataParallel(net())  # nothing was sent that another would take for its own
        alone(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("case", AROUND)
def test_ddp_refuses_what_averages_its_own_gradients(case):
    _, name = AROUND[case]
    kind = "ShardedDDP" if "ShardedDDP" in case else "FSDP"
    ranks.expect_error(_refused, 2, RuntimeError, name, "DistributedDataParallel", kind, args=(around, case))


def around(case):
    DistributedDataParallel(AROUND[case][0]())


def fsdp_of(module):
    zero.FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def inside(wrap):
    wrap(nn.Sequential(DistributedDataParallel(net())))


@pytest.mark.parametrize("wrap", [fsdp_of, sharded_ddp])
def test_ddp_inside_is_refused(wrap):
    ranks.expect_error(_refused, 2, ValueError, "'0' is a DistributedDataParallel", r"\.module", args=(inside, wrap))


@ranks.raises(2, RuntimeError, "was put into torch's Join", r"in zero\.join\(batches, ddp\)", "wrap the module again")
def test_ddp_in_torchs_join_is_refused_on_every_rank(rank, world):
    model = DistributedDataParallel(net())
    optimizer = zero.OSS(model.parameters(), SGD, lr=0.1)
    with model.join():
        take_step(optimizer, model(torch.ones(2, 8)).sum())
