"""What FSDP says of the sizes of its units: in the log, and in a warning if one holds most of a large model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from logs import Heard
from models import FeedForward
from zero.features.blocks.sizes import LARGE_MODEL

WIDTH = 64


class Net(nn.Module):
    """Blocks that no container repeats, so that without a policy they are in the root unit."""

    def __init__(self, inner: int = 256) -> None:
        super().__init__()
        self.first, self.second = FeedForward(WIDTH, inner), FeedForward(WIDTH, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Recommender(nn.Module):
    """More than half of the parameters are in one layer, which no choice of units divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(5000, WIDTH), FeedForward(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.long().abs()[:, 0]))


def warned(rank: int, world: int, make: Callable[[], nn.Module], large: int = 1000) -> list[str]:
    """The warnings of three forwards."""
    with mock.patch("zero.features.blocks.sizes.LARGE_MODEL", large), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = make()
        for _ in range(3):
            model(torch.ones(2, WIDTH))
    return [str(one.message) for one in told]


def one_unit() -> nn.Module:
    return zero.FSDP(Net())


def test_a_unit_with_most_of_a_large_model_is_warned_of_once_on_the_first_rank():
    (told,), others = ranks.run(warned, 2, args=(one_unit,))
    assert others == []
    for words in ("the root unit of FSDP(Net)", "100 %", "0.3 MiB", "auto_wrap_policy=ModuleWrapPolicy({Block})"):
        assert words in told


def by_policy() -> nn.Module:
    return zero.FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({FeedForward}))


def by_hand() -> nn.Module:
    net = Net()
    net.first, net.second = zero.FSDP(net.first), zero.FSDP(net.second)
    return zero.FSDP(net)


def unsharded() -> nn.Module:
    return zero.FSDP(Net(), sharding_strategy="NO_SHARD")


def as_one_unit() -> nn.Module:
    return zero.FSDP(Net(), as_one_unit=[Net])


def one_layer() -> nn.Module:
    return zero.FSDP(Recommender())


@pytest.mark.parametrize("make", [by_policy, by_hand, unsharded, as_one_unit, one_layer])
def test_models_that_are_divided_or_need_not_or_cannot_be_are_not_warned_of(make):
    assert ranks.run(warned, 2, args=(make,)) == [[], []]


def test_one_process_is_not_warned():
    assert ranks.run(warned, bare=True, args=(one_unit,)) == [[]]


def test_models_of_up_to_fifty_million_parameters_are_small():
    assert LARGE_MODEL == 50_000_000
    numel = sum(param.numel() for param in Net().parameters())
    assert ranks.run(warned, 2, args=(one_unit, numel)) == [[], []]
    assert [len(told) for told in ranks.run(warned, 2, args=(one_unit, numel - 1))] == [1, 0]


def test_a_plan_warns_of_nothing():
    with torch.device("meta"):
        net = Net(200_000)
    zero.plan(net, world_size=2, stages=["3"])  # pytest raises warnings


def logged(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    with Heard() as heard:
        zero.FSDP(nn.Sequential(nn.Linear(WIDTH, WIDTH), *(FeedForward(WIDTH, 512) for _ in range(3))), **options)
    return heard.messages


def test_the_log_says_how_many_units_there_are_and_how_large_the_largest_is():
    (line,), others = ranks.run(logged, 2, args=({"auto_wrap_policy": ModuleWrapPolicy({FeedForward})},))
    assert others == []
    assert "FULL_SHARD, 4 units, the largest unit '1' with 0.3 MiB, 33 % of all): parameters and gradients of" in line
    (line,), _ = ranks.run(logged, 2, args=({"auto_wrap_policy": ModuleWrapPolicy({nn.Conv2d})},))
    assert "1 unit, the largest the root unit with 0.8 MiB, 100 % of all): parameters and gradients of" in line
