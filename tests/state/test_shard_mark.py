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


def plain(value: Any) -> Any:
    """With lists for marks, which a file has as sets."""
    if isinstance(value, dict):
        return {key: plain(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [plain(inside) for inside in value]
    return sorted(value) if isinstance(value, (set, frozenset)) else value


@pytest.mark.parametrize("dump", [saved, pickle.dumps])
@pytest.mark.parametrize("stage", SHARDED)
@ranks.on(2)
def test_a_shard_that_is_saved_warns_of_what_it_is(rank, world, stage, dump):
    state = trained(stage, rank)[1].state_dict()
    state["param_groups"] = [*state["param_groups"], *copy.deepcopy(state["param_groups"])]  # says it once all the same
    with pytest.warns(UserWarning, match=TOLD) as told:
        dump({"epoch": 1, "optimizer": state})
    assert len(told) == 1
    assert f"rank {rank} of 2" in str(told[0].message)
    if dump is saved:
        assert told[0].filename == __file__


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", SHARDED)
@ranks.on("world")
def test_copies_loads_and_full_states_do_not_warn(rank, world, stage):
    """Whatever does not save a shard; warnings are errors here."""
    model, optimizer = trained(stage, rank)
    shard = optimizer.state_dict()
    assert copy.copy(shard) == shard
    same(copy.deepcopy(shard), shard, "the copy")
    optimizer.load_state_dict(copy.deepcopy(shard))
    if stage == 3:
        full = model.optim_state_dict(optimizer, to=None)
    else:
        optimizer.consolidate_state_dict(to=None)
        full = optimizer.state_dict()
    saved(full)
    if world == 1:
        saved(shard)


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
    same(plain(found), plain(shard), "the loaded shard")
    assert found["param_groups"] == shard["param_groups"]
    assert found.get("zero_shard") == shard.get("zero_shard")
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


@pytest.mark.parametrize("stage", SHARDED)
@ranks.on(2)
def test_shards_that_earlier_versions_saved_load(rank, world, stage):
    """The mark was a text, in the groups of stage 3 a list of texts."""
    _, optimizer = trained(stage, rank)
    shard = optimizer.state_dict()
    for holder in [shard, *shard["param_groups"]]:
        if "zero_shard" in holder:
            [text] = holder["zero_shard"]
            holder["zero_shard"] = [text] if stage == 3 else text
    optimizer.load_state_dict(shard)
