"""State in a dtype that is not the parameter's: moments in 16 bits of float32 parameters, and the other way round."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero
from optimizers import Moments
from reference import at_stage, batch, built, same

DTYPES = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
"""Of the parameters, and of the moments."""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 37), nn.Tanh(), nn.Linear(37, 5))


def made(stage: int, dtypes: Any, offload: Any = None) -> tuple[nn.Module, Any]:
    model, optim = built(net).to(dtypes[0]), partial(Moments, dtype=dtypes[1])
    if stage == 3:
        model = zero.FSDP(model, offload=offload)
        return model, optim(model.parameters())
    return at_stage(stage, model, optim, **({"offload": offload} if offload else {}))


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(rank, step).to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


CASES = [(stage, dtypes, None) for stage in (0, 1, 2, 3) for dtypes in DTYPES]
CASES += [(stage, DTYPES[0], zero.CPUOffload()) for stage in (1, 2, 3)]


@pytest.mark.parametrize(("stage", "dtypes", "offload"), CASES)
@ranks.on(2)
def test_moments_keep_their_dtype_and_every_bit(rank, world, stage, dtypes, offload):
    plain = made(0, dtypes)
    expected = train(*plain, rank, range(2))
    expected_state = deepcopy(plain[1].state_dict())
    expected += train(*plain, rank, range(2, 5))
    model, optimizer = made(stage, dtypes, offload)
    losses = train(model, optimizer, rank, range(2))
    weights, full = zero.full_state_dict(model), deepcopy(zero.full_optimizer_state_dict(model, optimizer))
    same(full["state"], expected_state["state"])
    own = deepcopy(optimizer.state_dict())
    assert losses + train(model, optimizer, rank, range(2, 5)) == expected

    def alone(model: nn.Module, optimizer: Any) -> None:
        zero.load_full_optimizer_state_dict(model, optimizer, full if rank == 0 else None)

    loads = [lambda *into: zero.load_full_optimizer_state_dict(*into, deepcopy(full)), alone]
    if stage == 3:
        loads += [lambda model, optimizer: model.load_optim_state_dict(optimizer, deepcopy(own)), registered(own)]
    elif stage:
        loads += [lambda _, optimizer: optimizer.load_state_dict(deepcopy(own))]
    for load in loads:
        again, by = made(stage, dtypes, offload)
        zero.load_full_state_dict(again, weights)
        load(again, by)
        assert train(again, by, rank, range(2, 5)) == expected[2:]
        assert zero.full_optimizer_state_dict(again, by)["state"][0]["mean"].dtype == dtypes[1]


def registered(own: Any) -> Any:
    """Loads by the optimizer's own method, which FSDP follows once it knows the optimizer."""

    def load(model: nn.Module, optimizer: Any) -> None:
        model.register_optimizer(optimizer)
        optimizer.load_state_dict(deepcopy(own))

    return load


def saved(rank: int, world: int, path: str, dtypes: Any) -> list[Any]:
    states = []
    for stage in (1, 2, 3):
        model, optimizer = made(stage, dtypes)
        train(model, optimizer, rank, range(2))
        zero.checkpoint.save(f"{path}/{stage}", model, optimizer)
        states.append(zero.full_optimizer_state_dict(model, optimizer)["state"])
    return states


def loaded(rank: int, world: int, path: str, dtypes: Any) -> list[Any]:
    states = []
    for stage in (1, 2, 3):
        model, optimizer = made(stage % 3 + 1, dtypes)
        zero.checkpoint.load(f"{path}/{stage}", model, optimizer)
        states.append(zero.full_optimizer_state_dict(model, optimizer)["state"])
    return states


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_checkpoint_keeps_them_at_another_stage_on_more_ranks(dtypes, tmp_path):
    expected = ranks.run(saved, 2, (str(tmp_path), dtypes))[0]
    same(ranks.run(loaded, 3, (str(tmp_path), dtypes))[0], expected)
