"""DistributedDataParallel around what averages its own gradients, and inside of it: refused before anything is sent."""

from __future__ import annotations

import time

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
    "FSDP": (lambda: zero.FSDP(net()), "'0.weight'"),
    "the module in FSDP": (lambda: zero.FSDP(net()).module, "'0.weight'"),
    "a module that contains FSDP": (lambda: within(zero.FSDP(net())), "'1.trunk.module.0.weight'"),
    "ShardedDDP": (lambda: sharded_ddp(net()), "'0.weight'"),
    "a module that contains ShardedDDP": (lambda: within(sharded_ddp(net())), "'1.trunk.module.0.weight'"),
}


def _refused(rank, world, build, *args):
    began = time.monotonic()
    try:
        build(*args)
    finally:
        assert time.monotonic() - began < 5
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


class Both(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x):
        return self.left(x) + self.right(x)


@ranks.on(2)
def test_ddp_may_train_what_fsdp_does_not(rank, world):
    """Each trains parameters of its own in one model."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))

    def weights(model, optimizer):
        for _ in range(3):
            take_step(optimizer, model(x).square().mean())
        return zero.full_state_dict(model)

    plain = DistributedDataParallel(Both(net(), net()))
    expected = weights(plain, SGD(plain.parameters(), lr=0.1, momentum=0.9))

    model = Both(net(), zero.FSDP(net()))
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_parameters() if name.startswith("right")]
    around = DistributedDataParallel(model)
    found = weights(around, SGD(around.parameters(), lr=0.1, momentum=0.9))
    assert all(torch.equal(found[name], expected[name]) for name in expected if name.startswith("left"))
    whole = model.right.state_dict()
    assert all(torch.equal(value, expected[f"right.{name}"]) for name, value in whole.items())

    inside = DistributedDataParallel(net())
    sharded = zero.FSDP(Both(inside, net()), ignored_modules=[inside])
    found = weights(sharded, SGD(sharded.parameters(), lr=0.1, momentum=0.9))
    assert all(torch.equal(value, expected[name.replace("left.module", "left")]) for name, value in found.items())


@ranks.raises(2, RuntimeError, "was put into torch's Join", r"in zero\.join\(batches, ddp\)", "wrap the module again")
def test_ddp_in_torchs_join_is_refused_on_every_rank(rank, world):
    model = DistributedDataParallel(net())
    optimizer = zero.OSS(model.parameters(), SGD, lr=0.1)
    with model.join():
        take_step(optimizer, model(torch.ones(2, 8)).sum())
