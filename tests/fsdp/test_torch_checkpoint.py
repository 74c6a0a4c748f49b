"""torch's own checkpoint helpers at every stage: they get full weights, and no shard of an optimizer's state as if it
were full. What `zero` gathers goes into torch's checkpoints, and comes from them. And torch's averages of weights."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import ranks
import zero
from assertions import same
from runs import at_stage, stage_3, take_step
from zoo import data

OPTIONS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
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


@pytest.mark.parametrize(("at", "to", "kind"), [(3, 2, "sharded"), (2, 3, "full"), (1, 3, "from rank 0")])
@ranks.on(2)
def test_weights_are_full_and_load_at_any_stage(rank, world, at, to, kind):
    """Given at one stage as DistributedDataParallel gives them, and taken at another."""
    plain, sharded, again = (trained(stage, "adam", rank)[0] for stage in (0, at, to))
    options = OPTIONS[kind]
    expected, found = (copy.deepcopy(get_model_state_dict(each, options=options)) for each in (plain, sharded))
    same(found, expected)
    set_model_state_dict(again, {} if kind == "from rank 0" and rank > 0 else found, options=options)
    weights = zero.full_state_dict(again, to=None)
    same({name: weights[name] for name, _ in plain.module.named_parameters()}, dict(plain.module.named_parameters()))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_a_shard_of_the_state_is_refused_on_every_rank(rank, world, stage, kind):
    model, optimizer = trained(stage, "sgd", rank)
    with pytest.raises(RuntimeError, match=r"shard .* of '\d\.(weight|bias)'.*zero\.full_optimizer_state_dict"):
        get_optimizer_state_dict(model, optimizer, options=OPTIONS[kind])
    same(copy.deepcopy(optimizer.state_dict()), optimizer.state_dict())  # which nothing has changed


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_a_state_that_was_consolidated_is_given(rank, world, stage):
    plain, (model, optimizer) = trained(0, "adam", rank), trained(stage, "adam", rank)
    optimizer.consolidate_state_dict(to=None)
    for _ in range(2):  # torch puts names into what it gets
        same(get_optimizer_state_dict(model, optimizer), get_optimizer_state_dict(*plain))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("to", [1, 2, 3])
@ranks.on(2)
def test_a_checkpoint_of_torch_comes_in_by_its_conversion(rank, world, to, tmp_path):
    plain, again = trained(0, "adam", rank), trained(to, "adam", rank, 0)
    weights, state = get_state_dict(*plain)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path)
    file = tmp_path / f"converted by {rank}.pt"
    dcp_to_torch_save(tmp_path, file)
    saved = torch.load(file, weights_only=True)
    zero.load_full_state_dict(again[0], saved["model"])
    zero.load_full_optimizer_state_dict(*again, saved["optim"])
    assert train(*again, rank, range(2, 4)) == train(*plain, rank, range(2, 4))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("at", [1, 3])
@ranks.on(2)
def test_full_state_goes_into_a_checkpoint_of_torch(rank, world, at, tmp_path):
    sharded, plain, again = trained(at, "sgd", rank), trained(0, "sgd", rank), trained(0, "sgd", rank, 1)
    full = {
        "model": zero.full_state_dict(sharded[0], to=None),
        "optim": zero.full_optimizer_state_dict(*sharded, to=None),
    }
    dcp.save(full, checkpoint_id=tmp_path)
    room = {"model": zero.full_state_dict(again[0], to=None), "optim": again[1].state_dict()}
    dcp.load(room, checkpoint_id=tmp_path)
    set_model_state_dict(again[0], room["model"])
    set_optimizer_state_dict(*again, room["optim"])
    assert train(*again, rank, range(2, 4)) == train(*plain, rank, range(2, 4))


KINDS: dict[str, dict[str, Any]] = {
    "EMA": {"avg_fn": get_ema_avg_fn(0.9)},
    "EMA of many, with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "SWA": {},
}


def averaged(rank: int, stage: int, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """The averaged weights, and what they compute."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))
    average = AveragedModel(net, **KINDS[kind])
    model, optimizer = zero.setup(net, torch.optim.Adam, stage=stage, lr=0.1)
    if stage == 3:
        average.module = zero.FSDP(average.module)
    for step in range(3):
        take_step(optimizer, model(data(4, 5, rank=rank, step=step)).square().mean())
        average.update_parameters(net)
    with torch.no_grad():
        return zero.full_state_dict(average.module, to=None), average.eval()(torch.ones(2, 5))


@pytest.mark.parametrize("kind", KINDS)
@ranks.on(2)
def test_averages_are_those_of_ddp(rank, world, kind):
    expected, computed = averaged(rank, 0, kind)
    for stage in (1, 2, 3):
        found, output = averaged(rank, stage, kind)
        same(found, expected)
        assert rank or torch.equal(output, computed)  # a forward of FSDP has the buffers of rank 0
