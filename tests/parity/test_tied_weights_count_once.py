"""A tied weight has one gradient: it counts once in norms, at every stage."""

from __future__ import annotations

import pytest
import torch

import ranks
import zero
from rows import adam
from runs import norm_of_gradients
from zoo import WIDTH, Stack


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__(classes=3, blocks=2)
        self.blocks[1].up.weight = self.blocks[0].up.weight


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_the_norm_is_that_of_stage_0(rank, world, stage, norm_type):
    norms = []
    for each in (0, stage):
        torch.manual_seed(0)
        model, _ = zero.setup(Tied(), adam, stage=each)
        model(torch.full((2, WIDTH), rank + 1.0)).sum().backward()
        norms.append(norm_of_gradients(model, norm_type).item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
