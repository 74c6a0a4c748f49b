"""Stage 1 by zero.setup, where DistributedDataParallel averages by reading: its numbers are those of the plain one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero
from models import CASES, OPTIMIZERS
from sidebyside import close
from transports import READS
from zero.features.host_memory.peers import Peers


def trained(rank: int, case: str, optim: str, stage: int | None) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    inner = CASES[case].model()
    if stage is None:
        model: Any = DistributedDataParallel(inner, bucket_cap_mb=1)
        optimizer: Any = OPTIMIZERS[optim](inner.parameters())
    else:
        model, optimizer = zero.setup(inner, OPTIMIZERS[optim], stage=stage)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for shard in range(2):
            with model.no_sync() if shard == 0 else nullcontext():
                loss = model(*CASES[case].batch(rank, 2 * step + shard).inputs).square().mean()
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, zero.full_state_dict(model)


def as_ddp(rank: int, world: int, case: str, optim: str) -> None:
    found, weights = trained(rank, case, optim, 1)
    expected, reference = trained(rank, case, optim, None)
    tolerance = 0.0 if world == 2 else 2e-6
    assert found == pytest.approx(expected, rel=tolerance, abs=0)
    assert all(close(weights[name], reference[name], tolerance) for name in reference)


@pytest.mark.parametrize(("optim", "world"), [("sgd", 2), ("adamw", 2), ("sgd", 3)])
@pytest.mark.parametrize("case", ["gpt", "wide"])
def test_training_is_that_of_ddp(case, optim, world):
    ranks.run(as_ddp, world, args=(case, optim))


@pytest.mark.skipif(not READS, reason="ranks are told to read nothing from one another")
@ranks.on(2)
def test_gradients_go_by_reading(rank, world):
    read, total = Peers.read, 0

    def counting(self: Peers, rank: int, address: int, into: torch.Tensor) -> None:
        nonlocal total
        total += into.nbytes
        read(self, rank, address, into)

    model, _ = zero.setup(CASES["wide"].model(), OPTIMIZERS["sgd"], stage=1)
    with mock.patch.object(Peers, "read", counting):
        model(*CASES["wide"].batch(rank, 0).inputs).sum().backward()
    size = sum(param.nbytes for param in model.parameters())
    assert size <= total <= 1.01 * size + 4096  # half of them to add up, half of the averages


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(numbers))


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.raises(2, RuntimeError, "^table.weight has a sparse gradient.*sparse=False.$", timeout=8)
def test_sparse_gradients_are_refused_in_the_same_words_at_every_stage(rank, world, stage, partition):
    model, optimizer = zero.setup(Words(), torch.optim.SGD, stage=stage, partition=partition, lr=0.1)
    model(torch.tensor([rank, 7])).sum().backward()
    optimizer.step()
