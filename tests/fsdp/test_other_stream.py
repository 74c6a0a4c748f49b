"""A model trains on another stream than it was wrapped on, as recipes for CUDA graphs do, and gets the gradients of its
module alone.

Autograd accumulates on the stream on which a parameter's node (AccumulateGrad) was made: what is added to a gradient
under no_sync, and the sum where a parameter is used twice. Here the stream of the wrapping sleeps while the other one
trains, so that what is accumulated there comes too late.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gpus
import ranks
from runs import SideBySide
from zero.shards.shard_group import ShardGroup
from zoo import WIDTH, Stack, loss_on, made

pytestmark = gpus.gpu_only("the CPU has no streams")

ASLEEP = 10**8
"""Cycles of the GPU, some 50 ms: longer than the host takes for a backward of the small model."""


Again = made(nn.Module, lambda self, x: self.inner(self.inner(x).tanh()), inner=lambda: nn.Linear(WIDTH, WIDTH))


class Late:
    """A loss. The stream on which the model was wrapped sleeps meanwhile."""

    def __init__(self, wrapped_on: torch.cuda.Stream, rank: int, number: int) -> None:
        self._wrapped_on, self._loss = wrapped_on, loss_on(rank, number)

    def __call__(self, model: nn.Module) -> Tensor:
        loss = self._loss(model)
        with torch.cuda.stream(self._wrapped_on):
            torch.cuda._sleep(ASLEEP)
        return loss


def train(rank: int, stage: str, blocks: type[nn.Module] | None, backwards: int, unsent: int, steps: int = 2) -> None:
    """Wraps on the current stream, trains on another, and compares all weights after each step. In the first one the
    host may be as slow as the sleep, since it connects the ranks."""
    wrapped_on, other = torch.cuda.current_stream(), torch.cuda.Stream()
    both = SideBySide(Stack() if blocks is None else Stack(blocks), stage, tolerance=1e-5)
    other.wait_stream(wrapped_on)
    with torch.cuda.stream(other):
        for step in range(steps):
            losses = [Late(wrapped_on, rank, backwards * step + number) for number in range(backwards)]
            both.step(*losses, unsent=unsent)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("backwards", "unsent"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("blocks", [None, Again], ids=["once", "twice"])
@pytest.mark.parametrize("stage", ["2", "3", "3 kept"])
@pytest.mark.parametrize("world", [1, 2])
@ranks.on("world")
def test_what_is_accumulated_on_another_stream_is_in_time(rank, world, stage, blocks, backwards, unsent):
    train(rank, stage, blocks, backwards, unsent)


class Kept:
    """In the place of the nodes that a shard group holds until it is unsharded: they are never dropped."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []

    def __set__(self, group: ShardGroup, nodes: list[Any]) -> None:
        self._nodes += nodes


@contextmanager
def nodes_kept() -> Iterator[None]:
    with mock.patch.object(ShardGroup, "_leaves", Kept(), create=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the other stream
        yield


@ranks.raises(2, AssertionError, "other weights than the reference")
def test_nodes_of_the_first_stream_would_be_noticed(rank, world):
    """Or else the test above shows nothing."""
    with nodes_kept():
        train(rank, "3", Again, backwards=2, unsent=1)
