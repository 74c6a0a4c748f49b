"""Wrappers of containers are indexed, counted and iterated as these are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ranks
import zero


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_a_wrapper_of_a_sequential_is_one(rank, world, stage):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    layers = [*net]
    model, _ = zero.setup(net, torch.optim.SGD, stage=stage, lr=0.1)
    assert len(model) == 3 and [*model] == layers
    assert model[0] is layers[0] and model[-1] is layers[2] and [*model[1:]] == layers[1:]
    with torch.no_grad():
        inputs = torch.ones(2, 3)
        assert torch.equal(model[2](model[1](model[0](inputs))), model(inputs))
    other, _ = zero.setup(nn.Linear(3, 4), torch.optim.SGD, stage=stage, lr=0.1)
    assert other  # which has no length
    for use in (len, iter, lambda model: model[0]):
        with pytest.raises(TypeError, match="Linear"):
            use(other)
