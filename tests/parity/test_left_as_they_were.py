"""What wrapping and training leave as it was: torch's random numbers, and, after a forward whose loss was dropped, what
is full."""

from __future__ import annotations

import pytest
import torch

import ranks
import zero
from rows import Net, adam
from zoo import WIDTH


def full(model: zero.FSDP) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("stage", range(4))
@ranks.on(2)
def test_no_random_number_is_drawn(rank, world, stage):
    net = Net()
    before = torch.get_rng_state()
    model, optimizer = zero.setup(net, adam, stage=stage)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


@ranks.on(2)
def test_reshard_releases_what_a_dropped_loss_left_full(rank, world):
    model, _ = zero.setup(Net(), adam, stage=3)
    at_rest = full(model)
    model(torch.ones(2, WIDTH))
    assert full(model) > at_rest
    model.reshard()
    assert full(model) == at_rest
