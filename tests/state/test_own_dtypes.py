"""State in a dtype that is not the parameter's: moments in 16 bits of float32 parameters, and the other way round."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero
from assertions import same
from optimizers import Moments
from zoo import built, odd_batch


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 37), nn.Tanh(), nn.Linear(37, 5))


def made(stage: int, dtypes: Any, offload: Any = None) -> tuple[nn.Module, Any]:
    options = {"offload": offload} if offload else {}
    return zero.setup(built(net).to(dtypes[0]), partial(Moments, dtype=dtypes[1]), stage=stage, **options)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(odd_batch(rank, step).to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


WIDE, NARROW, OFFLOADED = torch.float32, torch.bfloat16, zero.CPUOffload()
CASES = [(1, (WIDE, NARROW), None), (2, (NARROW, WIDE), None), (3, (WIDE, NARROW), None), (3, (NARROW, NARROW), None)]
CASES += [(2, (WIDE, NARROW), OFFLOADED), (3, (WIDE, NARROW), OFFLOADED)]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtypes", "offload"), CASES)
@ranks.on(2)
def test_moments_keep_their_dtype_and_every_bit(rank, world, stage, dtypes, offload):
    """dtypes: of the parameters, and of the moments."""
    plain = made(0, dtypes)
    expected = train(*plain, rank, range(2))
    expected_state = deepcopy(plain[1].state_dict())
    expected += train(*plain, rank, range(2, 5))
    model, optimizer = made(stage, dtypes, offload)
    losses = train(model, optimizer, rank, range(2))
    weights, full = (
        zero.full_state_dict(model, to=None),
        deepcopy(zero.full_optimizer_state_dict(model, optimizer, to=None)),
    )
    same(full["state"], expected_state["state"])
    own = deepcopy(optimizer.state_dict())
    assert losses + train(model, optimizer, rank, range(2, 5)) == expected

    def by_itself(model: nn.Module, optimizer: Any) -> None:
        if stage == 3:
            model.register_optimizer(optimizer)
        optimizer.load_state_dict(own)

    def alone(model: nn.Module, optimizer: Any) -> None:
        zero.load_full_optimizer_state_dict(model, optimizer, full if rank == 0 else None)

    for load in (by_itself, alone):
        again, by = made(stage, dtypes, offload)
        zero.load_full_state_dict(again, weights)
        load(again, by)
        assert train(again, by, rank, range(2, 5)) == expected[2:]
        assert zero.full_optimizer_state_dict(again, by, to=None)["state"][0]["mean"].dtype == dtypes[1]
