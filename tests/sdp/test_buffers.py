"""Buffers that become others after wrapping, such as caches that grow with the batch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import matrix
import ranks
import zero
from transports import between_hosts

LENGTH = 4


class Cached(nn.Module):
    """Multiplies by a table that is made as long as the longest input yet."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(LENGTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(1.0, len(x) + 1)
        self.steps += 1
        return self.line(x) * self.table[: len(x), None]


def grown(rank: int, world: int, stage: int, lengths: list[int], collectives: bool) -> list[float]:
    with between_hosts() if collectives else nullcontext():
        model, _ = zero.setup(Cached(), partial(SGD, lr=0.1), stage=stage)
        for length in (LENGTH, lengths[rank], 2):
            model(torch.ones(length, 3)).sum().backward()
    return [*model.module.table.tolist(), model.module.steps.item()]


@matrix.combined("stage, lengths, collectives", [2, 3], [[6, 5], [6, 4], [4, 6]], [False, True])
def test_buffers_of_other_sizes_on_other_ranks_are_refused_on_every_rank(stage, lengths, collectives):
    error = "ValueError" if 4 not in lengths else "RuntimeError"
    told = ranks.expect_error(grown, 2, error, args=(stage, lengths, collectives), timeout=20)
    if 4 in lengths:
        changed = told[lengths.index(6)]
        assert "table: [6], torch.float32" in changed
        assert "broadcast_buffers=False" in changed
    else:
        assert all("rank 0 has table: [6], torch.float32, rank 1 has table: [5]" in each for each in told)


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_that_become_the_same_on_every_rank_go_on_being_those_of_the_first(stage):
    expected = [*range(1, 7), 3]
    assert ranks.run(grown, args=(stage, [6, 6], False)) == [expected] * 2


def grown_apart(rank: int, world: int) -> int:
    model = zero.FSDP(Cached(), broadcast_buffers=False)
    for length in (LENGTH, LENGTH + rank, 2):
        model(torch.ones(length, 3)).sum().backward()
    return len(model.module.table)


def test_buffers_that_are_not_broadcast_may_differ():
    assert ranks.run(grown_apart) == [LENGTH, LENGTH + 1]
