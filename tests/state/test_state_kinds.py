"""State of every kind that optimizers keep, and that old files hold, at every stage: it comes out and goes in alike."""

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import gpus
import matrix
import ranks
import zero
from assertions import same
from optimizers import ByParameter, Moments
from ranks import refusal
from runs import train
from zoo import built


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


class Narrow(nn.Sequential):
    """Parameters of 16 bits."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 37), nn.Tanh(), nn.Linear(37, 5))
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


NARROW, WIDE = (partial(Moments, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
OFFLOADED = {"offload": zero.CPUOffload()}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "containers": (net, Keeping, {}),
    "complex": (Complex, partial(Adam, lr=0.01, betas=(0.8, 0.9)), {}),
    "lists": (net, Historic, {}),
    "moments in 16 bits": (net, NARROW, {}),
    "moments in 32 bits of parameters in 16": (Narrow, WIDE, {}),
    "all in 16 bits": (Narrow, NARROW, {}),
    "moments in 16 bits, offloaded": (net, NARROW, OFFLOADED),
}


def at(stage: int, kind: str) -> tuple[nn.Module, Any]:
    make, optim, options = KINDS[kind]
    return zero.setup(built(make), optim, stage=stage, **(options if stage else {}))


def plain(value: Any) -> Any:
    """A nest with Python's numbers in place of numpy's, as a checkpoint has them, and tuples in place of sizes."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, torch.Size):
        return tuple(value)
    return value.item() if isinstance(value, np.generic) else value


def same_numbers(found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    """Of numpy's they have the same types, where this rank has any of the parameter."""
    there = found.keys() & expected.keys()
    assert there or not expected
    for number in there:
        for key, value in expected[number].items():
            if isinstance(value, np.generic):
                assert type(found[number][key]) is type(value), key


@pytest.mark.slow
@matrix.combined("kind, stage", KINDS, [1, 2, 3], each=2)
@ranks.on(2)
def test_state_of_any_kind_comes_out_as_at_stage_0_and_goes_in_again(rank, world, tmp_path, kind, stage):
    """And by a checkpoint into another stage."""
    expected, found = at(0, kind), at(stage, kind)
    losses = train(*expected, rank, range(2))
    assert train(*found, rank, range(2)) == losses
    weights, state = deepcopy(zero.full_state_dict(expected[0], to=None)), deepcopy(expected[1].state_dict())
    full, own = deepcopy(zero.full_optimizer_state_dict(*found, to=None)), deepcopy(found[1].state_dict())
    same(plain(full["state"]), plain(state["state"]))
    same_numbers(full["state"], state["state"])
    losses = train(*expected, rank, range(2, 4))
    for given in (full, full if rank == 0 else None, own):
        again = at(stage, kind)
        zero.load_full_state_dict(again[0], weights)
        if given is own:
            by_itself(*again, own)
        else:
            zero.load_full_optimizer_state_dict(*again, deepcopy(given))
        same(plain(zero.full_optimizer_state_dict(*again, to=None)["state"]), plain(state["state"]))
        same_numbers(again[1].state_dict()["state"], state["state"] if stage == 3 else {})
        assert train(*again, rank, range(2, 4)) == losses
    if kind != "lists":
        again = at(3 - stage, kind)
        found[1].param_groups[0]["lr"] = np.float32(0.05)
        zero.checkpoint.save(tmp_path, *found)
        zero.checkpoint.load(tmp_path, *again)
        same(plain(zero.full_optimizer_state_dict(*again, to=None)["state"]), plain(state["state"]))
        assert again[1].param_groups[0]["lr"] == float(np.float32(0.05))


COUNTS: list[Any] = [int] if gpus.ON else [int, Tensor.long]  # on a GPU torch steps by no count of integers


def as_numbers(state: dict[str, Any], kind: Any) -> dict[str, Any]:
    """A state whose counts of steps are numbers, as in files of early versions of torch."""
    states = {
        key: {name: kind(value) if name == "step" else value for name, value in one.items()}
        for key, one in state["state"].items()
    }
    return {**state, "state": states}


def by_itself(model: nn.Module, optimizer: Any, full: dict[str, Any]) -> None:
    if isinstance(model, zero.FSDP):
        model.register_optimizer(optimizer)
    optimizer.load_state_dict(full)


@matrix.combined("optim, stage", ["Adam", "NAdam", "Adagrad", "ASGD"], [1, 2, 3])
@ranks.on(2)
def test_counts_of_steps_may_be_numbers(rank, world, tmp_path, optim, stage):
    build = partial(zero.setup, optim=getattr(torch.optim, optim), lr=0.01)
    plain = build(built(net), stage=0)
    train(*plain, rank, range(2))
    weights, full = deepcopy(zero.full_state_dict(plain[0], to=None)), deepcopy(plain[1].state_dict())
    for state in plain[1].state.values():
        state["step"] = int(state["step"])
    zero.checkpoint.save(tmp_path, *plain)
    zero.checkpoint.load(tmp_path, *plain)
    expected = train(*plain, rank, range(2, 4))
    loads = [(load, kind) for load in (zero.load_full_optimizer_state_dict, by_itself) for kind in COUNTS]
    for load, kind in [*loads, (zero.checkpoint.load, None)]:
        model, optimizer = build(built(net), stage=stage)
        if kind is None:
            load(tmp_path, model, optimizer)
        else:
            zero.load_full_state_dict(model, weights)
            load(model, optimizer, deepcopy(as_numbers(full, kind)))
        assert train(model, optimizer, rank, range(2, 4)) == expected, (load, kind)


class Strange(ByParameter):
    """Keeps what only this process knows. where: of the state, or of a dictionary in it."""

    value: Any = None

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["odd"] = self.value
        param.sub_(param.grad, alpha=group["lr"])


STRANGE = [{1}, torch.bfloat16, np.ones(2)]


@pytest.mark.parametrize("stage", [1, 3])
@ranks.on(2, timeout=20)
def test_what_cannot_be_sent_is_refused_by_name_on_every_rank(rank, world, stage):
    for value in STRANGE:
        optim = type("Strange", (Strange,), {"value": value})
        model, optimizer = zero.setup(built(net), optim, stage=stage)
        train(model, optimizer, rank, range(1))
        told = refusal(lambda of=(model, optimizer): zero.full_optimizer_state_dict(*of, to=None))
        assert told.startswith("ValueError") and "'odd'" in told and type(value).__name__ in told, told
        assert "each rank's own state_dict()" in told
