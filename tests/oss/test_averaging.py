"""Stage 1 by zero.setup, which averages by reading on one host; sparse gradients are refused at every stage."""

import pytest
import torch
from torch import nn

import gpus
import ranks
import zero
from inner import bytes_read
from transports import READS
from zoo import CASES, OPTIMIZERS


@pytest.mark.skipif(not READS, reason="ranks are told to read nothing from one another")
@ranks.on(2)
def test_gradients_go_by_reading(rank, world):
    model, _ = zero.setup(CASES["wide"].model(), OPTIMIZERS["sgd"], stage=1)
    with bytes_read() as read:
        model(*CASES["wide"].batch(rank, 0).inputs).sum().backward()
    size = sum(param.nbytes for param in model.parameters())
    assert size <= sum(read) <= 1.01 * size + 4096  # half of them to add up, half of the averages


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(numbers))


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=gpus.cpu_only("NCCL refuses them before")), 2, 3])
@ranks.raises(2, RuntimeError, "table.weight has a sparse gradient", "sparse=False", timeout=8)
def test_sparse_gradients_are_refused_in_the_same_words_at_every_stage(rank, world, stage, partition):
    model, optimizer = zero.setup(Words(), torch.optim.SGD, stage=stage, partition=partition, lr=0.1)
    model(torch.tensor([rank, 7])).sum().backward()
    optimizer.step()
