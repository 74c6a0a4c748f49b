"""A rank's shard of the optimizer's state says what it is when it is saved, and not before."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam

import ranks
import zero
from assertions import same
from runs import take_step

SHARDED = [1, 2, 3]
TOLD = r"only one rank.s shard .*\(rank . of 2, .*consolidate_state_dict\(\).* optim_state_dict\(.*checkpoint\.save\("


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def trained(stage: int, rank: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, optimizer = zero.setup(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)), Adam, stage=stage, lr=0.01)
    step(model, optimizer, rank)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, rank: int) -> None:
    take_step(optimizer, model(torch.full((2, 8), 1.0 + rank)).square().sum())


@pytest.mark.parametrize("stage", SHARDED)
@ranks.on(2)
def test_a_shard_warns_of_what_it_is_when_it_is_saved_and_not_before(rank, world, stage):
    """Copies, loads and full states do not warn; warnings are errors here."""
    model, optimizer = trained(stage, rank)
    shard = optimizer.state_dict()
    same(copy.deepcopy(shard), shard, "the copy")
    optimizer.load_state_dict(copy.deepcopy(shard))
    saved(zero.full_optimizer_state_dict(model, optimizer))
    shard["param_groups"] = [*shard["param_groups"], *copy.deepcopy(shard["param_groups"])]  # says it once all the same
    for dump in (saved, pickle.dumps):
        with pytest.warns(UserWarning, match=TOLD) as told:
            dump({"epoch": 1, "optimizer": shard})
        assert len(told) == 1 and f"rank {rank} of 2" in str(told[0].message)


@pytest.mark.parametrize("stage", SHARDED)
@ranks.on(2)
def test_a_shard_loads_from_the_file_of_its_own_rank_only(rank, world, stage):
    """Each rank goes on from its own file, and refuses the other's."""
    model, optimizer = trained(stage, rank)
    shard = optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = saved(shard)
    found = torch.load(io.BytesIO(own), weights_only=True)
    again, other = trained(stage, rank)
    other.load_state_dict(found)
    same(other.state_dict(), shard, "the state after loading")
    for pair in ((model, optimizer), (again, other)):
        step(*pair, rank)
    same(other.state_dict(), optimizer.state_dict(), "the state after a step more")
    files: list[Any] = [None] * world
    dist.all_gather_object(files, own)
    told = ranks.refusal(lambda: other.load_state_dict(torch.load(io.BytesIO(files[1 - rank]), weights_only=True)))
    assert told.startswith(f"ValueError: the state is one rank's shard (rank {1 - rank} of 2, "), told
