"""What `param.grad` shows after a backward of ShardedDDP: that there is a gradient, of which each rank has a shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpus
import ranks
from reference import at_stage
from sidebyside import data, sgd

WIDTH = 6


class Net(nn.Module):
    """`spare` is used by rank 1 alone, `unused` by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.spare, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, spare: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.spare(x) if spare else x)


def built() -> Net:
    torch.manual_seed(0)
    return Net()


def backward(model: nn.Module, rank: int, step: int = 0, *, spare: bool = False) -> None:
    model(data(4, WIDTH, rank=rank, step=step), spare=spare).square().mean().backward()


def clip_by_norm(model: nn.Module, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_by_value(model: nn.Module, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)


def norm_by_hand(model: nn.Module, optimizer: Any) -> None:
    sum(param.grad.norm() ** 2 for param in model.parameters() if param.grad is not None)


def norm_of_data(model: nn.Module, optimizer: Any) -> None:
    [param.grad.data.abs().max() for param in model.parameters() if param.grad is not None]


def unscale_by_torch(model: nn.Module, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler(gpus.DEVICE)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def step_by_torch(model: nn.Module, optimizer: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


READERS = [clip_by_norm, clip_by_value, norm_by_hand, norm_of_data, unscale_by_torch, step_by_torch]


@pytest.mark.parametrize("reader", READERS)
@ranks.raises(
    2,
    RuntimeError,
    "has no full gradient after a backward of ShardedDDP",
    r"optimizer\.clip_grad_norm",
    r"zero\.grad_norm",
)
def test_whoever_computes_with_it_is_told_what_to_call(rank, world, reader):
    model, optimizer = at_stage(2, built(), sgd)
    backward(model, rank)
    reader(model, optimizer)


@ranks.on(2)
def test_it_is_there_on_every_rank_if_any_rank_used_the_parameter(rank, world):
    model, _ = at_stage(2, built(), sgd)
    backward(model, rank, spare=rank == 1)
    assert "first.weight" in repr(model.module.first.weight.grad)
    plain = built()
    found = {
        name: None if (grad := param.grad) is None else (grad.shape, grad.dtype, grad.device, grad.is_sparse)
        for name, param in model.named_parameters()
    }
    for name, param in plain.named_parameters():
        expected = None if "unused" in name else (param.shape, param.dtype, param.device, False)
        assert found[name] == expected, name
