"""torch's own checkpoint helpers at every stage: they are given full weights and states, and load them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adam, Optimizer

import ranks
from assertions import same
from runs import at_stage, stage_3, take_step
from zoo import data

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


OPTIMIZERS = {"adam": partial(Adam, lr=0.01), "sgd": partial(SGD, lr=0.1, momentum=0.9)}


def trained(stage: int, optim: str, rank: int, steps: int = 2) -> tuple[nn.Module, Optimizer]:
    build = stage_3 if stage == 3 else partial(at_stage, stage)
    model, optimizer = build(net(), OPTIMIZERS[optim])
    train(model, optimizer, rank, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, rank: int, steps: range) -> list[float]:
    return [take_step(optimizer, model(data(4, 8, rank=rank, step=step)).square().mean()) for step in steps]


@pytest.mark.parametrize(
    ("at", "to", "optim", "kind"),
    [
        (3, 2, "sgd", "sharded"),
        (2, 3, "adam", "full"),
        (1, 3, "sgd", "from rank 0"),
        (3, 1, "adam", "flat"),
    ],
)
@ranks.on(2)
def test_states_are_full_and_load_at_any_stage(rank, world, at, to, optim, kind):
    """Given at one stage as DistributedDataParallel with the plain optimizer gives it, and taken at another."""
    plain, sharded, again = trained(0, optim, rank), trained(at, optim, rank), trained(to, optim, rank, 0)
    options = OPTIONS[kind]
    expected, found = (copy.deepcopy(get_state_dict(*each, options=options)) for each in (plain, sharded))
    same(found, expected)
    if kind == "from rank 0" and rank > 0:
        found = ({}, {})
    set_model_state_dict(again[0], found[0], options=options)
    set_optimizer_state_dict(*again, found[1], options=options)
    assert train(*again, rank, range(2, 4)) == train(*plain, rank, range(2, 4))


@ranks.on(2)
def test_a_full_state_on_the_cpu_is_rank_0s(rank, world):
    plain, sharded = trained(0, "adam", rank), trained(3, "adam", rank)
    options = OPTIONS["full on the CPU"]
    found = get_state_dict(*sharded, options=options)
    if rank == 0:
        same(found, get_state_dict(*plain))
    else:
        assert found == ({}, {})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("at", "to"), [(1, 3), (3, 2)])
@ranks.on(2)
def test_what_torchs_distributed_checkpoint_saved_it_loads(rank, world, at, to, tmp_path):
    plain, sharded, again = trained(0, "adam", rank), trained(at, "adam", rank), trained(to, "adam", rank, 0)
    weights, state = get_state_dict(*sharded)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    weights, state = get_state_dict(*again)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=tmp_path)
    set_model_state_dict(again[0], found["model"])
    set_optimizer_state_dict(*again, found["optimizer"])
    assert train(*again, rank, range(2, 4)) == train(*plain, rank, range(2, 4))
