"""Penalties on parameters that the training loop adds to the loss, beside DistributedDataParallel with the same.

Of a sharded parameter the penalty sees this rank's shard. Losses so differ between ranks; weights do not.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import ranks
import zero
from sidebyside import data, on_mesh

WIDTH = 7
sgd = partial(SGD, lr=0.05, momentum=0.9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, one of which runs twice, between layers of one weight."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def l2(model: nn.Module) -> Tensor:
    return sum((param.square().sum() for param in model.parameters()), torch.zeros(()))


def elastic(model: nn.Module) -> Tensor:
    of_weights = (param for name, param in model.named_parameters() if "weight" in name)
    return sum((param.abs().sum() + (param - 1).square().sum() for param in of_weights), torch.zeros(()))


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small units, memory first": {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "prefetch": zero.MEMORY_FIRST},
    "whole, speed first": {"partition": "whole", "prefetch": zero.SPEED_FIRST},
    "kept": {"reshard_after_forward": False},
}


def train(model, optimizer, rank, *, micro, penalty, forwards=1):
    for step in range(4):
        optimizer.zero_grad()
        for number in range(1, micro + 1):
            with model.no_sync() if number < micro else nullcontext():
                loss = torch.zeros(())
                for seed in range(forwards):
                    x = data(5, WIDTH, rank=rank, step=10 * step + number, seed=seed)
                    loss = loss + model(x).square().mean()
                (loss + 0.1 * penalty(model)).backward()
        optimizer.step()


def _trains(rank, world, options, reentrant, how):
    plain, net = Net(), Net(reentrant)
    train(DistributedDataParallel(plain), sgd(plain.parameters()), rank, **how)
    model = zero.FSDP(net, **on_mesh(world, options))
    train(model, sgd(net.parameters()), rank, **how)
    for name, value in model.state_dict().items():
        expected = plain.state_dict()[name]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


CASES: dict[str, tuple[int, dict[str, Any], bool | None, dict[str, Any]]] = {
    # ranks, options, re-entrant checkpointing, and how it is trained
    **{name: (2, options, None, {"micro": 1, "penalty": l2}) for name, options in OPTIONS.items()},
    **{
        f"{name}, under no_sync": (2, OPTIONS[name], None, {"micro": 3, "penalty": elastic})
        for name in ("default", "whole, speed first")
    },
    "replicas, under no_sync": (4, {"replicas": 2}, None, {"micro": 2, "penalty": elastic}),
    "checkpointed": (2, {}, False, {"micro": 1, "penalty": l2}),
    "checkpointed, re-entrant": (2, {}, True, {"micro": 1, "penalty": l2}),
    "after several forwards": (2, {}, None, {"micro": 2, "penalty": l2, "forwards": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_penalty_adds_its_gradient_to_each_part(name):
    world, *args = CASES[name]
    ranks.run(_trains, world, args=tuple(args), timeout=30)


def _asked_for(rank, world, early):
    """Parameters that are only looked at do no harm; those that a backward is asked for are the ones before forward."""
    model, plain = zero.FSDP(Net()), Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    x = data(5, WIDTH, rank=0)
    for one in (model, plain):
        loss = one(x).square().mean()
        assert all(param.requires_grad for param in one.parameters())
        torch.autograd.grad(loss, one.first.bias, retain_graph=True)
        loss.backward()
    optimizer.step()
    SGD(plain.parameters(), lr=0.1).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    optimizer.zero_grad()
    params = [*model.parameters()] if early else None
    model(x).square().mean().backward(inputs=params or [*model.parameters()])
    optimizer.step()


def test_a_backward_asked_for_parameters_that_are_parts_by_then_is_not_stepped():
    ranks.run(_asked_for, 2, args=(True,), timeout=20)
    ranks.expect_error(_asked_for, 2, RuntimeError, r"unit 'blocks.*has no gradients", args=(False,), timeout=20)


@ranks.on(4, timeout=20)
def test_parameters_listed_after_a_forward_without_backward_say_nothing_of_the_next_backward(rank, world):
    """The gradients of what has few elements are with the first rank alone; the others have none to show."""
    model = zero.FSDP(nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = SGD(model.parameters(), lr=0.1)
    x = data(5, 4, rank=rank)
    for step in range(3):
        model(x)
        model.zero_grad()  # which lists the parameters
        model(x).square().mean().backward()
        if step == 2:
            kept = model(x).square().mean()
            model.zero_grad()
            model(x)
            model.zero_grad()
            kept.backward()
        optimizer.step()
