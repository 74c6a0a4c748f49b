"""torch's own checkpoint helpers at every stage: they are given full weights and states, and load them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adam, Optimizer

import ranks
import zero
from models import take_step
from reference import at_stage, same

OPTIONS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full on the CPU": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "from rank 0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].weight = model[0].weight
    return model


def build(stage: int, optim: str) -> tuple[nn.Module, Optimizer]:
    kind, options = {"adam": (Adam, {"lr": 0.01}), "sgd": (SGD, {"lr": 0.1, "momentum": 0.9})}[optim]
    if stage < 3:
        return at_stage(stage, net(), kind, **options)
    model = zero.FSDP(net())
    return model, kind(model.parameters(), **options)


def train(model: nn.Module, optimizer: Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + rank)
        losses.append(take_step(optimizer, model(torch.randn(4, 8)).square().mean()))
    return losses


@pytest.mark.parametrize(
    ("at", "to", "optim", "kind"),
    [
        (1, 2, "adam", "sharded"),
        (3, 2, "sgd", "sharded"),
        (2, 3, "adam", "full"),
        (1, 3, "sgd", "from rank 0"),
        (3, 1, "adam", "from rank 0"),
        (2, 0, "adam", "flat"),
        (3, 3, "adam", "flat"),
    ],
)
@ranks.on(2)
def test_states_are_full_and_load_at_any_stage(rank: int, world: int, at: int, to: int, optim: str, kind: str) -> None:
    """Given at one stage as DistributedDataParallel with the plain optimizer gives it, and taken at another."""
    plain, sharded, again = build(0, optim), build(at, optim), build(to, optim)
    train(*plain, rank, range(2))
    train(*sharded, rank, range(2))
    options = OPTIONS[kind]
    expected, found = (copy.deepcopy(get_state_dict(*each, options=options)) for each in (plain, sharded))
    same(found, expected)
    if kind == "from rank 0" and rank > 0:
        found = ({}, {})
    set_model_state_dict(again[0], found[0], options=options)
    set_optimizer_state_dict(*again, found[1], options=options)
    assert train(*again, rank, range(2, 4)) == train(*plain, rank, range(2, 4))


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_a_full_state_on_the_cpu_is_rank_0s(rank: int, world: int, stage: int) -> None:
    plain, sharded = build(0, "adam"), build(stage, "adam")
    train(*plain, rank, range(2))
    train(*sharded, rank, range(2))
    options = OPTIONS["full on the CPU"]
    weights, state = (
        get_model_state_dict(sharded[0], options=options),
        get_optimizer_state_dict(*sharded, options=options),
    )
    if rank == 0:
        same(weights, get_model_state_dict(plain[0], options=StateDictOptions()))
        same(state, get_optimizer_state_dict(*plain, options=StateDictOptions()))
    else:
        assert not weights and not state


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("at", "to"), [(1, 3), (2, 1), (3, 2)])
@ranks.on(2)
def test_what_torchs_distributed_checkpoint_saved_it_loads(
    rank: int, world: int, at: int, to: int, tmp_path: Path
) -> None:
    plain, sharded, again = build(0, "adam"), build(at, "adam"), build(to, "adam")
    train(*plain, rank, range(2))
    train(*sharded, rank, range(2))
    weights, state = get_state_dict(*sharded)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    weights, state = get_state_dict(*again)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=tmp_path)
    set_model_state_dict(again[0], found["model"])
    set_optimizer_state_dict(*again, found["optimizer"])
    assert train(*again, rank, range(2, 4)) == train(*plain, rank, range(2, 4))


def of_another_rank(rank: int, world: int, fresh: bool) -> str:
    """Shards of one shape, so that nothing but the mark tells them apart. What is said as the state is loaded."""
    model = zero.FSDP(nn.Linear(8, 8))
    optimizer = Adam(model.parameters())
    train(model, optimizer, rank, range(1))
    own = optimizer.state_dict()
    optimizer.load_state_dict(own)
    train(model, optimizer, rank, range(1))
    states: list[Any] = [None] * world
    torch.distributed.all_gather_object(states, optimizer.state_dict())
    if fresh:
        optimizer = Adam(model.parameters())
    told = ranks.refusal(lambda: optimizer.load_state_dict(states[0]))
    if fresh:
        train(model, optimizer, rank, range(1))
    return told


shards_travel = pytest.mark.filterwarnings("ignore:this state_dict.. is only one rank's shard:UserWarning")


@shards_travel
def test_another_ranks_state_is_refused_by_a_fresh_optimizer_at_its_step():
    ranks.expect_error(of_another_rank, 2, RuntimeError, "rank 0 of 2", "optim_state_dict", args=(True,), timeout=15)


@shards_travel
def test_another_ranks_state_is_refused_as_it_is_loaded():
    own, other = ranks.run(of_another_rank, 2, args=(False,), timeout=15)
    assert own == "" and "one rank's shard (rank 0 of 2" in other


@ranks.on(2)
def test_a_full_state_is_cut_as_it_is_loaded(rank, world):
    """By load_state_dict() of the optimizer itself, once it has stepped."""
    plain, sharded = build(0, "adam"), build(3, "adam")
    train(*plain, rank, range(2))
    train(*sharded, rank, range(1))
    sharded[0].load_state_dict(plain[0].module.state_dict())
    sharded[1].load_state_dict(plain[1].state_dict())
    assert train(*sharded, rank, range(2, 4)) == train(*plain, rank, range(2, 4))
