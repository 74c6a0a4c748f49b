"""Penalties on parameters that the training loop adds to the loss, beside DistributedDataParallel with the same.

Of a sharded parameter the penalty sees this rank's part. Losses so differ between ranks; weights do not.
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
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint

import ranks
import zero
from sidebyside import data, on_mesh

WIDTH = 7
OPTIMIZERS = [partial(SGD, lr=0.05, momentum=0.9), partial(Adam, lr=0.01)]


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


def l2(params: list[nn.Parameter]) -> Tensor:
    return sum((param.square().sum() for param in params), torch.zeros(()))


def elastic(params: list[nn.Parameter]) -> Tensor:
    return sum((param.abs().sum() + (param - 1).square().sum() for param in params[::2]), torch.zeros(()))


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small units, memory first": {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "prefetch": zero.MEMORY_FIRST},
    "whole, speed first": {"partition": "whole", "prefetch": zero.SPEED_FIRST},
    "kept": {"reshard_after_forward": False},
}


def train(model, optimizer, rank, *, micro, penalty, forwards=1, apart=False):
    params = [*model.parameters()]  # kept from the start, as scripts do
    for step in range(4):
        optimizer.zero_grad()
        for number in range(1, micro + 1):
            with model.no_sync() if number < micro else nullcontext():
                loss = sum(
                    model(data(5, WIDTH, rank=rank, step=10 * step + number, seed=seed)).square().mean()
                    for seed in range(forwards)
                )
                if apart:
                    loss.backward()
                    (0.1 * penalty(params)).backward()
                else:
                    (loss + 0.1 * penalty(params)).backward()
        optimizer.step()


def _trains(rank, world, options, reentrant, how):
    for optim in OPTIMIZERS:
        plain, net = Net(), Net(reentrant)
        train(DistributedDataParallel(plain), optim(plain.parameters()), rank, **how)
        model = zero.FSDP(net, **on_mesh(world, options))
        train(model, optim(net.parameters()), rank, **how)
        for name, value in model.state_dict().items():
            expected = plain.state_dict()[name]
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_penalty_adds_its_gradient_to_each_part(name):
    ranks.run(_trains, 2, args=(OPTIONS[name], None, {"micro": 1, "penalty": l2}), timeout=20)


def test_on_replicas_and_under_no_sync():
    ranks.run(_trains, 4, args=({"replicas": 2}, None, {"micro": 2, "penalty": elastic}), timeout=30)


@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_activation_checkpointing(reentrant):
    ranks.run(_trains, 2, args=({}, reentrant, {"micro": 1, "penalty": l2}), timeout=20)


@pytest.mark.parametrize("name", ["default", "whole, speed first"])
def test_under_no_sync(name):
    ranks.run(_trains, 2, args=(OPTIONS[name], None, {"micro": 3, "penalty": elastic}), timeout=20)


@pytest.mark.parametrize("how", [{"forwards": 2}, {"apart": True}])
def test_after_several_forwards_and_in_a_backward_of_its_own(how):
    ranks.run(_trains, 2, args=({}, None, {"micro": 1, "penalty": l2, **how}), timeout=20)


def _before(rank, world):
    model = zero.FSDP(Net())
    penalty = sum(param.sum() for param in model.parameters())
    (model(data(5, WIDTH, rank=rank)).square().mean() + penalty).backward()


def test_a_penalty_computed_before_the_forward_is_refused():
    ranks.expect_error(_before, 2, RuntimeError, "computed from it before the forward", r"\+ penalty", timeout=20)
