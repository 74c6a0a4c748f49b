"""State of every kind that optimizers keep, and that old files hold, at every stage: it comes out and goes in alike."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import matrix
import ranks
import zero
from assertions import same
from optimizers import ByParameter
from ranks import refusal
from runs import train
from zoo import built

STAGES = (0, 1, 2, 3)


class Keeping(ByParameter):
    """SGD with momentum, which keeps it in a dictionary beside what else an optimizer may keep."""

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault(
            "kept", {"mean": torch.zeros_like(param), 3: {"steps": torch.tensor(0.0)}, "pair": (1, [None])}
        )
        state["kept"]["mean"].mul_(0.9).add_(param.grad)
        state["kept"][3]["steps"] += 1
        state.update(
            positive=param > 0, seen=torch.full_like(param, 2**24 + 1, dtype=torch.int64), last=0.5 - 1j, nothing=None,
            steps=torch.tensor(int(state["kept"][3]["steps"])), share=np.float32(0.5), count=np.int64(3),
            flag=np.bool_(True), size=torch.Size([2, 3]), betas=(0.9, 0.99),
        )  # fmt: skip
        param.sub_(state["kept"]["mean"], alpha=group["lr"])


class Complex(nn.Module):
    """Complex and real parameters, of no and of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 5)
        self.phase = nn.Parameter(torch.tensor(1 + 2j))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.phases = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.phase * self.scale * self.phases).abs()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 9), nn.Tanh(), nn.Linear(9, 5))


class Historic(ByParameter):
    """Keeps tensors in lists, as Shampoo does."""

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("history", []).append(param.grad.clone())
        state["pair"] = (1, [2, 0.5], ())
        param.sub_(state["history"][0], alpha=group["lr"])


class OfOtherShapes(ByParameter):
    """Keeps what has neither the parameter's shape nor its dtype; what steps so cannot be cut."""

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.update(infinite=float("inf"), sum=param.grad.sum(), one=torch.ones(1))
        state.update(numbers=torch.arange(3), double=param.double(), empty=torch.zeros(0))
        param.sub_(state["sum"], alpha=group["lr"])


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "containers": (net, Keeping, {}),
    "complex": (Complex, partial(Adam, lr=0.01, betas=(0.8, 0.9)), {}),
    "lists": (net, Historic, {}),
    "other shapes": (net, OfOtherShapes, {"partition": "whole"}),
}


def at(stage: int, kind: str) -> tuple[nn.Module, Any]:
    make, optim, options = KINDS[kind]
    return zero.setup(built(make), optim, stage=stage, **options if stage else {})


def plain(value: Any) -> Any:
    """A nest with Python's numbers in place of numpy's, as they arrive, and tuples in place of sizes."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, torch.Size):
        return tuple(value)
    return value.item() if isinstance(value, np.generic) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_state_of_any_kind_comes_out_as_at_stage_0_and_goes_in_again(rank, world, stage, kind):
    expected, found = at(0, kind), at(stage, kind)
    losses = train(*expected, rank, range(2))
    assert train(*found, rank, range(2)) == losses
    weights, state = deepcopy(zero.full_state_dict(expected[0])), deepcopy(expected[1].state_dict())
    full = deepcopy(zero.full_optimizer_state_dict(*found))
    same(plain(full["state"]), plain(state["state"]))
    losses = train(*expected, rank, range(2, 4))
    for given in (full, full if rank == 0 else None):
        again = at(stage, kind)
        zero.load_full_state_dict(again[0], weights)
        zero.load_full_optimizer_state_dict(*again, deepcopy(given))
        same(plain(zero.full_optimizer_state_dict(*again)["state"]), plain(state["state"]))
        assert train(*again, rank, range(2, 4)) == losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["containers", "complex"])
@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_a_checkpoint_holds_state_of_any_kind(rank, world, tmp_path, stage, kind):
    saved, loaded = at(stage, kind), at(3 - stage, kind)
    train(*saved, rank, range(2))
    zero.checkpoint.save(tmp_path, *saved)
    zero.checkpoint.load(tmp_path, *loaded)
    state = zero.full_optimizer_state_dict(*saved)["state"]
    same(plain(zero.full_optimizer_state_dict(*loaded)["state"]), plain(state))
    assert train(*loaded, rank, range(2, 4)) == train(*saved, rank, range(2, 4))
    saved[1].param_groups[0]["lr"] = np.float32(0.05)
    zero.checkpoint.save(tmp_path, *saved)
    zero.checkpoint.load(tmp_path, *loaded)
    assert loaded[1].param_groups[0]["lr"] == float(np.float32(0.05))


# ----------------------------------------------------------------------------------------- numbers where tensors were


def as_numbers(state: dict[str, Any], kind: Any) -> dict[str, Any]:
    """A state whose counts of steps are numbers, as in files of early versions of torch."""
    states = {
        key: {name: kind(value) if name == "step" else value for name, value in one.items()}
        for key, one in state["state"].items()
    }
    return {**state, "state": states}


def by_script(model: nn.Module, optimizer: Any, full: dict[str, Any], rank: int) -> None:
    zero.load_full_optimizer_state_dict(model, optimizer, full)


def from_rank_0(model: nn.Module, optimizer: Any, full: dict[str, Any], rank: int) -> None:
    zero.load_full_optimizer_state_dict(model, optimizer, full if rank == 0 else None)


def by_itself(model: nn.Module, optimizer: Any, full: dict[str, Any], rank: int) -> None:
    if isinstance(model, zero.FSDP):
        model.register_optimizer(optimizer)
    optimizer.load_state_dict(full)


def by_model(model: nn.Module, optimizer: Any, full: dict[str, Any], rank: int) -> None:
    if isinstance(model, zero.FSDP):
        model.load_optim_state_dict(optimizer, full)
    else:
        optimizer.load_state_dict(full)


@pytest.mark.slow
@matrix.combined("stage, optim", STAGES, ["Adam", "NAdam", "Adagrad", "ASGD"])
@ranks.on(2)
def test_counts_of_steps_may_be_numbers(rank, world, stage, optim):
    build = partial(zero.setup, optim=getattr(torch.optim, optim), lr=0.01)
    plain = build(built(net), stage=0)
    train(*plain, rank, range(2))
    weights, full = deepcopy(zero.full_state_dict(plain[0])), deepcopy(plain[1].state_dict())
    expected = train(*plain, rank, range(2, 4))
    for load in (by_script, from_rank_0, by_itself, by_model):
        for kind in (int, float, Tensor.double, Tensor.long):
            model, optimizer = build(built(net), stage=stage)
            zero.load_full_state_dict(model, weights)
            load(model, optimizer, deepcopy(as_numbers(full, kind)), rank)
            assert train(model, optimizer, rank, range(2, 4)) == expected, (load, kind)


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_a_checkpoint_may_hold_counts_of_steps_as_numbers(rank, world, tmp_path, stage):
    saved, loaded = (zero.setup(built(net), Adam, stage=at, lr=0.01) for at in (stage, 3 - stage))
    train(*saved, rank, range(2))
    for state in getattr(saved[1], "optim", saved[1]).state.values():
        state["step"] = int(state["step"])
    zero.checkpoint.save(tmp_path, *saved)
    zero.checkpoint.load(tmp_path, *saved)
    zero.checkpoint.load(tmp_path, *loaded)
    assert train(*loaded, rank, range(2, 4)) == train(*saved, rank, range(2, 4))


# ------------------------------------------------------------------------------------------------ refused, by its name


class Strange(ByParameter):
    """Keeps what only this process knows. where: of the state, or of a dictionary in it."""

    value: Any = None

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["odd"] = self.value
        param.sub_(param.grad, alpha=group["lr"])


STRANGE = [{1}, torch.bfloat16, OrderedDict(a=1), {(1, 2): 3}, np.ones(2)]


@pytest.mark.parametrize("stage", [1, 3])
@ranks.on(2, timeout=20)
def test_what_cannot_be_sent_is_refused_by_name_on_every_rank(rank, world, stage):
    for value in STRANGE:
        optim = type("Strange", (Strange,), {"value": value})
        model, optimizer = zero.setup(built(net), optim, stage=stage)
        train(model, optimizer, rank, range(1))
        told = refusal(lambda of=(model, optimizer): zero.full_optimizer_state_dict(*of))
        assert told.startswith("ValueError") and "'odd'" in told and type(value).__name__ in told, told
        assert "each rank's own state_dict()" in told
