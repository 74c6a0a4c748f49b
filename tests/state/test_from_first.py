"""Weights and optimizer state that rank 0 alone has read: every rank comes to the same as if all had read them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adam

import ranks
import zero
from models import FeedForward, TiedBlocks, take_step, unit_bytes
from sidebyside import data
from zero.plan.meter import Meter

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (Adam, {"lr": 0.01, "betas": (0.8, 0.9)}),
    "sgd": (SGD, {"lr": 0.05, "momentum": 0.9}),
}


def losses(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    return [take_step(optimizer, model(data(8, 7, rank=rank, step=step)).square().mean()) for step in range(2)]


def file(optim: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    """What a plain training has saved."""
    torch.manual_seed(3)
    model = TiedBlocks(7)
    optimizer = optim(model.parameters(), **defaults)
    losses(model, optimizer, 0)
    return {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}


def went_on(how: dict[str, Any], rank: int, saved: dict[str, Any] | None, optim: Any) -> Any:
    """The losses of a training that goes on from what was saved, its weights and its optimizer's state."""
    torch.manual_seed(rank)
    model, optimizer = zero.setup(TiedBlocks(7), optim, lr=1.0, **how)
    missing, unexpected = zero.load_full_state_dict(model, None if saved is None else saved["weights"])
    assert not missing and not unexpected
    zero.load_full_optimizer_state_dict(model, optimizer, saved and saved["optimizer"])
    told = losses(model, optimizer, rank)
    return told, zero.full_state_dict(model), zero.full_optimizer_state_dict(model, optimizer)


def options(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "param_names"} for group in state["param_groups"]]


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks.on(2)
def test_what_rank_0_has_read_is_loaded_as_if_all_had_read_it(rank, world, name):
    saved, (optim, _) = file(*OPTIMIZERS[name]), OPTIMIZERS[name]
    expected, weights, state = went_on({"stage": 0}, rank, copy.deepcopy(saved), optim)
    offloaded = {"stage": 3, "offload": zero.CPUOffload(pin_memory=False)}
    for how in (*({"stage": stage} for stage in range(4)), offloaded):
        found, other, other_state = went_on(how, rank, copy.deepcopy(saved) if rank == 0 else None, optim)
        assert found == expected, how
        torch.testing.assert_close(other, weights, rtol=0, atol=0)
        torch.testing.assert_close(other_state["state"], state["state"], rtol=0, atol=0)
        assert options(other_state) == options(state)


@ranks.on(4)
def test_every_replica_gets_what_rank_0_has_read(rank, world):
    saved = file(*OPTIMIZERS["adam"])
    mesh = init_device_mesh("cpu", (2, 2))
    model = zero.FSDP(TiedBlocks(7), sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    optimizer = Adam(model.parameters())
    zero.load_full_state_dict(model, saved["weights"] if rank == 0 else {})
    zero.load_full_optimizer_state_dict(model, optimizer, saved["optimizer"] if rank == 0 else {})
    torch.testing.assert_close(zero.full_state_dict(model), dict(saved["weights"]), rtol=0, atol=0)
    found = zero.full_optimizer_state_dict(model, optimizer)
    torch.testing.assert_close(found["state"], saved["optimizer"]["state"], rtol=0, atol=0)


BLOCKS = 8


def peaks(rank: int, world: int) -> tuple[int, int, int, int]:
    """Bytes of the model, of a unit, and what loading weights and Adam's state adds at its peak."""
    inner = nn.Sequential(*(FeedForward(64, 512) for _ in range(BLOCKS)))
    size = sum(param.nbytes for param in inner.parameters())
    state: Any = {
        number: {key: torch.ones_like(param) for key in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(3.0)}
        for number, param in enumerate(inner.parameters())
    }
    weights = {name: torch.ones_like(value) for name, value in inner.state_dict().items()}
    saved = {"state": state, "param_groups": Adam(inner.parameters()).state_dict()["param_groups"]}
    with Meter() as meter:
        model = zero.FSDP(inner, auto_wrap_policy=ModuleWrapPolicy({FeedForward}))
        optimizer = Adam(model.parameters())
        meter.reset_peak()
        before = meter.live()
        zero.load_full_state_dict(model, weights if rank == 0 else None)
        of_weights = meter.peak() - before
        meter.reset_peak()
        zero.load_full_optimizer_state_dict(model, optimizer, saved if rank == 0 else None)
        return size, unit_bytes(model), of_weights, meter.peak() - before


def test_ranks_that_read_nothing_hold_one_unit_and_one_parameter_besides_their_shards():
    (size, unit, first, _), (_, _, second, second_state) = ranks.run(peaks)
    assert second <= 2.1 * unit  # full, and the message that it arrives in
    assert first <= 2 * size + 2.1 * unit  # what was given, and a copy
    assert second_state <= size + 2.1 * unit  # two entries of half the model's size each


# --------------------------------------------------------------------------------------- refused on every rank


def load(stage: int, rank: int, weights: Any) -> None:
    model, _ = zero.setup(TiedBlocks(7), Adam, stage=stage)
    before = zero.full_state_dict(model)
    try:
        zero.load_full_state_dict(model, weights if rank == 0 else None)
    finally:
        if stage == 3:
            torch.testing.assert_close(zero.full_state_dict(model), before, rtol=0, atol=0)


CASES: dict[str, tuple[Any, str]] = {
    "another shape": (lambda: TiedBlocks(9).state_dict(), r"(?s)rank 0.*size mismatch for blocks.0.0.weight"),
    "a name is missing": (
        lambda: dict([*TiedBlocks(7).state_dict().items()][1:]),
        r"(?s)rank 0.*Missing key.*blocks.0.0.weight",
    ),
    "extra state": (
        lambda: {**TiedBlocks(7).state_dict(), "head._extra_state": 3},
        r"'head._extra_state' is extra state",
    ),
    "none": (lambda: {}, "weights given to zero.load_full_state_dict: no rank was given any"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_do_not_fit_are_refused_on_every_rank(stage, case):
    ranks.expect_error(of_case, 2, ValueError, CASES[case][1], args=(stage, case))


def of_case(rank: int, world: int, stage: int, case: str) -> None:
    load(stage, rank, CASES[case][0]())


@pytest.mark.parametrize("stage", [0, 3])
@ranks.raises(2, ValueError, "zero.load_full_state_dict: only rank 1 of 2 was given any", "or on rank 0 and None")
def test_weights_of_another_rank_than_0_alone_are_refused_on_every_rank(rank, world, stage):
    model, _ = zero.setup(TiedBlocks(7), Adam, stage=stage)
    zero.load_full_state_dict(model, zero.full_state_dict(model, to=1))


STATES: dict[str, tuple[Any, str]] = {
    "of another model": (lambda: Adam([nn.Parameter(torch.ones(3))]).state_dict(), "parameter groups of"),
    "no state": (lambda: {"epoch": 3}, "rank 0.*param_groups"),
    "of a rank": (None, "one rank's shard"),
}


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("stage", [2, 3])
def test_state_that_does_not_fit_is_refused_on_every_rank(stage, case):
    ranks.expect_error(of_state, 2, ValueError, STATES[case][1], args=(stage, case))


def of_state(rank: int, world: int, stage: int, case: str) -> None:
    model, optimizer = zero.setup(TiedBlocks(7), Adam, stage=stage)
    losses(model, optimizer, rank)
    make = STATES[case][0] or optimizer.state_dict
    zero.load_full_optimizer_state_dict(model, optimizer, make() if rank == 0 else None)
