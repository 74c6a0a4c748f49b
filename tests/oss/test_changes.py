"""What users do to a model after OSS and ShardedDDP were built: handled, or refused with the remedy."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam

import ranks
import zero
from models import take_step
from reference import (
    FEATURES,
    MOMENTUM,
    at_stage,
    batch,
    built,
    distributed,
    loss_of,
    refusal,
    same,
    same_weights,
    train,
    weights,
)
from zero.oss.optimizer import set_bucket_size

by_stage = pytest.mark.parametrize("stage", [1, 2])
CUTS = ["even", "whole"]
by_cut = pytest.mark.parametrize("cut", CUTS)


# ------------------------------------------------------------------------------------------------- Frozen and unfrozen


@by_stage
@ranks.on(2)
def test_frozen_between_backward_and_step_is_stepped_once_more(rank, world, stage):
    """Frozen between backward and step: the plain optimizer steps whatever has a gradient."""
    finals = []
    for at in (0, stage):
        model, optimizer = at_stage(at, built(lambda: nn.Linear(FEATURES, 40)), SGD, **MOMENTUM)
        train(model, optimizer, rank, range(1))
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        model.requires_grad_(False)
        optimizer.step()
        finals.append(weights(model))
    same(finals[1], finals[0], "weights")


# ----------------------------------------------------------------------------------------------- Moved, cast, replaced


def vector_loaded(model):
    params = [param for param in model.parameters() if param.is_contiguous()]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() * 2, params)


def data_replaced(model):
    model.norm.weight.data = torch.ones(37)


CHANGES = {
    "cast": lambda model: model.double(),
    "cast_there_and_back": lambda model: model.half().float(),
    "cast_part": lambda model: model.tied.to(torch.bfloat16),
    "data_replaced": data_replaced,
    "vector_loaded": vector_loaded,
}


@pytest.mark.parametrize("change", CHANGES)
@by_stage
@ranks.raises(
    2,
    RuntimeError,
    "was moved, cast or given other data after OSS was built",
    "Move and cast the model first, then build",
)
def test_parameters_moved_or_cast_are_refused_with_the_remedy(rank, world, stage, change):
    model, optimizer = at_stage(stage, built(), SGD, **MOMENTUM)
    train(model, optimizer, rank, range(1))
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    CHANGES[change](model.module)
    optimizer.step()


@by_stage
@ranks.on(2)
def test_moving_a_model_to_where_it_is_changes_nothing(rank, world, stage):
    model, optimizer = at_stage(stage, built(), SGD, **MOMENTUM)
    plain = at_stage(0, built(), SGD, **MOMENTUM)
    train(model, optimizer, rank, range(1))
    assert model.to("cpu") is model
    model.float().cpu()
    model.module.to(torch.float32)
    model.eval().train()
    train(model, optimizer, rank, range(1, 3))
    train(*plain, rank, range(3))
    same_weights(model.module, plain[0].module)


@pytest.mark.parametrize("before", ["forward", "backward"])
@by_stage
@ranks.raises(2, RuntimeError, "assign", "OSS")
def test_weights_loaded_by_assigning_are_refused_with_the_remedy(rank, world, stage, before):
    model, optimizer = at_stage(stage, built(), SGD, **MOMENTUM)
    train(model, optimizer, rank, range(1))
    optimizer.zero_grad()
    inner = model.module
    if before == "forward":
        inner.load_state_dict(built().state_dict(), assign=True)
    loss = loss_of(model, rank, 1)
    if before == "backward":
        inner.load_state_dict(built().state_dict(), assign=True)
    loss.backward()
    optimizer.step()
    take_step(optimizer, loss_of(model, rank, 2))


@pytest.mark.parametrize(
    ("stage", "words"), [(1, "did not receive grad"), (2, ["norm", "assign=True", "add_param_group"])]
)
@ranks.raises(2, RuntimeError)
def test_one_parameter_replaced_is_refused(rank, world, stage, words):
    """One module's only: at stage 2 it is seen by ShardedDDP, at stage 1 by DistributedDataParallel a step later."""
    model, optimizer = at_stage(stage, built(), SGD, **MOMENTUM)
    train(model, optimizer, rank, range(1))
    model.module.norm.load_state_dict(nn.LayerNorm(37).state_dict(), assign=True)
    train(model, optimizer, rank, range(1, 2 if stage == 2 else 3))


@ranks.on(2)
def test_assigning_through_sharded_ddp_is_refused_at_once(rank, world):
    model, _ = at_stage(2, built(), SGD, **MOMENTUM)
    told = refusal(lambda: model.load_state_dict(built().state_dict(), assign=True))
    assert told.startswith("ValueError"), told
    assert "assign=False" in told


# ----------------------------------------------------------------------------------------------------- Loaded in place


# -------------------------------------------------------------------------------------------------- Copied and pickled


class Deep(nn.Module):
    """Many parameters in one buffer, one of them under two names."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(20))
        self.tied = self.layers[3].weight

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return inputs


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@by_stage
@ranks.on(2)
def test_copies_and_pickles_of_the_model_have_its_values(rank, world, stage):
    """Nor do saved ones take more: parameters are views of shared buffers, which torch.save stores once.

    Plain pickle stores a buffer again for every view of it; a deep copy of the model has no views.
    """
    model, optimizer = at_stage(stage, built(Deep), SGD, **MOMENTUM)
    train(model, optimizer, rank, range(2))
    inner = model.module
    values = inner.state_dict()
    again = [
        copy.deepcopy(inner),
        pickle.loads(pickle.dumps(inner)),
        torch.load(io.BytesIO(saved(inner)), weights_only=False),
    ]
    for one in again:
        same(one.state_dict(), values, "a copy")
        assert one.tied is one.layers[3].weight
        before = {name: value.clone() for name, value in values.items()}
        with torch.no_grad():
            for param in one.parameters():
                param.add_(1.0)
        same(inner.state_dict(), before, "the model that was copied")
        one(batch(0, 0)).sum().backward()
    same(torch.load(io.BytesIO(saved(values)), weights_only=True), dict(values), "the state dict")
    sizes, plain_sizes = [[len(pickle.dumps(copy.deepcopy(each))), len(saved(each))] for each in (inner, built(Deep))]
    for size, plain in zip(sizes, plain_sizes, strict=True):
        assert size <= 1.2 * plain


@ranks.on(2)
def test_copying_and_pickling_what_is_spread_over_ranks_is_refused(rank, world):
    model, optimizer = at_stage(2, built(), SGD, **MOMENTUM)
    train(model, optimizer, rank, range(1))
    for value, remedy in ((optimizer, "state_dict"), (model, "module")):
        for call in (copy.deepcopy, copy.copy, pickle.dumps, saved):
            told = refusal(lambda: call(value))  # noqa: B023 - called at once
            assert told.startswith("TypeError"), f"{call.__name__}: {told}"
            assert remedy in told
    plain = at_stage(2, built(), SGD, **MOMENTUM)
    train(*plain, rank, range(3))
    train(model, optimizer, rank, range(1, 3))
    same_weights(model.module, plain[0].module)


# ------------------------------------------------------------------------------------------------------- Laid out anew


@by_cut
@by_stage
@pytest.mark.parametrize(("optim", "options"), [(SGD, MOMENTUM), (Adam, {"lr": 0.01})])
@ranks.on(2)
def test_other_buckets_in_the_middle_of_training_keep_the_state(rank, world, stage, cut, optim, options):
    finals = []
    for limit in (None, 0, 750, 1 << 22):
        model, optimizer = at_stage(stage, built(), optim, partition=cut, **options)
        losses = train(model, optimizer, rank, range(2))
        if limit is not None:
            set_bucket_size(optimizer, limit)
            if limit == 0:
                flats = optimizer.shards.shard_groups
                sizes = [[param.numel() for param in flat.params if param.numel()] for flat in flats]
                assert max(map(len, sizes)) == 1
        losses += train(model, optimizer, rank, range(2, 5))
        optimizer.consolidate_state_dict(to=None)
        finals.append((losses, weights(model), optimizer.state_dict()))
    plain = distributed(built())
    alone = optim(plain.parameters(), **options)
    expected = train(plain, alone, rank, range(5)), weights(plain), alone.state_dict()
    for final in finals:
        same(final, expected, "losses, weights and state")


@ranks.on(2)
def test_state_loaded_before_sharded_ddp_is_kept(rank, world):
    """ShardedDDP lays out anew for its reduce_buffer_size; the state that was loaded before comes along."""
    model, optimizer = at_stage(2, built(), Adam, lr=0.01)
    train(model, optimizer, rank, range(2))
    optimizer.consolidate_state_dict(to=None)
    values, state = copy.deepcopy(model.module.state_dict()), copy.deepcopy(optimizer.state_dict())
    inner = built()
    inner.load_state_dict(values)
    again = zero.OSS(inner.parameters(), Adam, lr=0.01)
    again.load_state_dict(state)
    wrapped = zero.ShardedDDP(inner, again, reduce_buffer_size=100)
    same(train(wrapped, again, rank, range(2, 5)), train(model, optimizer, rank, range(2, 5)), "losses")
    same_weights(inner, model.module)


@pytest.mark.parametrize("limit", [0, 1 << 22])
@ranks.on(2)
def test_other_buckets_where_a_rank_has_no_state(rank, world, limit):
    """Adagrad has state from the start, but of one parameter that lies whole with one rank only that rank has some."""
    finals = []
    for at in (0, 2):
        net = built(lambda: nn.Linear(FEATURES, 4, bias=False))
        model, optimizer = at_stage(at, net, Adagrad, partition="whole", lr=0.1)
        if at == 2:
            assert sorted(optimizer.comm.all_gather_text(str(bool(optimizer.optim.state)))) == ["False", "True"]
            set_bucket_size(optimizer, limit)
        losses = train(model, optimizer, rank, range(3))
        finals.append((losses, weights(model)))
    same(finals[1], finals[0], "losses and weights")
