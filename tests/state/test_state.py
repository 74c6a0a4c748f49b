"""Optimizer state: whole it is the plain optimizer's own, and goes anywhere; in shards it goes back where it was."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.testing._internal.two_tensor import TwoTensor

import matrix
import ranks
from optimizers import ByParameter, Lamb, Wrapping
from reference import (
    Net,
    batch,
    built,
    filled,
    loss_of,
    matrices,
    pair,
    refusal,
    same,
    same_weights,
    train,
)
from zero import FSDP, OSS, ShardedDDP, full_state_dict, traffic
from zero.oss.optimizer import set_bucket_size
from zero.plan.meter import Meter

CASES = {
    "SGD": (SGD, {"lr": 0.1}, Net),
    "SGD momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, Net),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}, Net),
    "Adam fused": (Adam, {"lr": 0.01, "fused": True}, Net),
    "Adam with a rate in a tensor": (Adam, {"lr": torch.tensor(0.01), "foreach": False}, Net),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, Net),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}, Net),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}, Net),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}, Net),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}, filled),
    "Muon": (torch.optim.Muon, {"lr": 0.1}, matrices),
    "LAMB by hand": (Lamb, {"lr": 0.1}, Net),
}


shards_travel = pytest.mark.filterwarnings("ignore:this state_dict.. is only one rank's shard:UserWarning")
"""From the ranks to the test, as bytes."""


def groups_of(model):
    """Two groups with options of their own; the first rank may own nothing of one of them."""
    params = [*model.parameters()]
    return [{"params": params[:1], "lr": torch.tensor(0.02)}, {"params": params[1:]}]


def plain_and_sharded(name, partition="auto"):
    optim, options, make = CASES[name]
    return pair(optim, partition, make, **options)


def is_shard(state):
    return "zero_shard" in state


# --------------------------------------------------------------------------------------------------------------- Whole


def _consolidate(rank, world, name, partition):
    (model, plain), (sharded_model, sharded) = plain_and_sharded(name, partition)
    for step in range(2):
        train(model, plain, rank, [step])
        train(sharded_model, sharded, rank, [step])
        for to in (0, world - 1, None):
            sharded.consolidate_state_dict(to=to)
            state = sharded.state_dict()
            if to in (None, rank):
                same(state, plain.state_dict(), f"what came to {to}")
            else:
                assert is_shard(state)
    same_weights(sharded_model, model)


@pytest.mark.parametrize("name", CASES)
def test_consolidated_it_equals_the_plain_optimizers(name):
    ranks.run(_consolidate, 2, args=(name, "auto"))


@matrix.combined("world, partition", [1, 2, 3], ["even", "whole"])
def test_consolidated_it_equals_the_plain_optimizers_on_any_number_of_ranks(world, partition):
    ranks.run(_consolidate, world, args=("AdamW", partition))


@ranks.on(2)
def test_consolidated_before_the_first_step_it_equals_the_plain_optimizers(rank, world):
    (_, plain), (_, sharded) = plain_and_sharded("AdamW")
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state before the first step")


@ranks.on(2)
def test_consolidated_state_of_several_groups(rank, world):
    both = pair(AdamW, params=groups_of, lr=torch.tensor(0.01), foreach=False)
    (_, plain), (_, sharded) = both
    for model, optimizer in both:
        train(model, optimizer, rank, range(2))
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state")


@ranks.on(2)
def test_options_are_those_of_now_also_after_consolidating(rank, world):
    both = pair(AdamW, lr=0.01)
    for model, optimizer in both:
        schedule = StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, rank, range(1))
        if optimizer is both[1][1]:
            optimizer.consolidate_state_dict(to=0)
        schedule.step()
    (_, plain), (_, sharded) = both
    told = sharded.state_dict()
    assert is_shard(told) == (rank != 0)
    same(told["param_groups"], plain.state_dict()["param_groups"], "the groups")


@ranks.on(2)
def test_parameters_that_were_not_stepped_have_no_state(rank, world):
    (model, plain), (sharded_model, sharded) = plain_and_sharded("AdamW")
    for each, optimizer in ((model, plain), (sharded_model, sharded)):
        loss_of(each, rank, 0).backward()
        each.module.first.weight.grad = None
        each.module.scale.grad = None
        optimizer.step()
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state")
    assert len(plain.state_dict()["state"]) == len([p for p in model.parameters() if p.requires_grad]) - 2


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_state_of_parameters_that_are_not_contiguous(rank, world, partition):
    """Memory order is not row order: what is consolidated must be."""

    def make():
        conv = nn.Conv2d(3, 8, 5).to(memory_format=torch.channels_last)
        conv.linear = nn.Parameter(torch.randn(40, 60).t())
        return conv

    model, sharded_model = built(make), built(make)
    plain, sharded = Adam(model.parameters()), OSS(sharded_model.parameters(), Adam, partition=partition)
    for step in range(2):
        for each, optimizer in ((model, plain), (sharded_model, sharded)):
            for index, param in enumerate(each.parameters()):
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + index))
            optimizer.step()
    sharded.consolidate_state_dict(to=None)
    whole = sharded.state_dict()
    same(whole, plain.state_dict(), "the state")
    again = OSS(built(make).parameters(), Adam, partition=partition)
    again.load_state_dict(whole)
    again.consolidate_state_dict(to=None)
    same(again.state_dict(), whole, "the state loaded and consolidated again")


def _taken(rank, world):
    """Bytes that consolidating to rank 0 takes at its peak, of a bucket and of the full state."""
    with Meter() as memory:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        sharded = OSS(model.parameters(), Adam)
        set_bucket_size(sharded, 256 * 256)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        sharded.step()
        before = memory.live()
        memory.reset_peak()
        sharded.consolidate_state_dict(to=0)
        peak = memory.peak() - before
    largest = max(group.full.nbytes for group in sharded.shards.shard_groups)
    return peak, largest, sum(2 * param.nbytes for param in model.parameters())


def test_who_only_sends_needs_no_more_than_a_bucket():
    (received, bucket, state), *others = ranks.run(_taken, 3)
    assert state <= received <= state + bucket
    assert all(peak <= bucket for peak, _, _ in others)


@ranks.on(2)
def test_consolidating_to_no_rank_of_the_group_is_refused_everywhere(rank, world):
    _, (_, sharded) = plain_and_sharded("SGD")
    above, below, fine = [refusal(lambda to=to: sharded.consolidate_state_dict(to=to)) for to in (2, -1, 0)]
    assert above == "ValueError: to=2 is no rank of the group of 2: choose 0 to 1, or None for all."
    assert below.startswith("ValueError: to=-1 is no rank")
    assert fine == ""


@ranks.on(2)
def test_what_was_consolidated_holds_until_the_next_step_or_load(rank, world):
    _, (sharded_model, sharded) = plain_and_sharded("SGD momentum")
    train(sharded_model, sharded, rank, range(1))
    sharded.consolidate_state_dict(to=None)
    assert not is_shard(sharded.state_dict())
    kept = sharded.state_dict()
    before = copy.deepcopy(kept)
    train(sharded_model, sharded, rank, range(1, 2))
    assert is_shard(sharded.state_dict()), "a state from before the last step is given out"
    same(kept, before, "a state that was given out earlier")
    sharded.consolidate_state_dict(to=None)
    sharded.load_state_dict(before)
    assert is_shard(sharded.state_dict()), "a state from before the last load is given out"


# ---------------------------------------------------------- To and from the plain optimizer and other numbers of ranks


def _saved(rank, world, name, partition):
    _, (model, sharded) = plain_and_sharded(name, partition)
    train(model, sharded, rank, range(3))
    sharded.consolidate_state_dict(to=0)
    return sharded.state_dict(), getattr(model, "module", model).state_dict()


def _continued(rank, world, name, partition, state, weights):
    """The plain optimizer goes on from the same state, beside OSS."""
    untouched = copy.deepcopy(state)
    (model, plain), (sharded_model, sharded) = plain_and_sharded(name, partition)
    for each in (model, sharded_model):
        getattr(each, "module", each).load_state_dict(weights)
    sharded.load_state_dict(state)
    same(state, untouched, "the caller's state")
    plain.load_state_dict(copy.deepcopy(state))
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state as loaded")
    losses = train(model, plain, rank, range(3, 6))
    same(train(sharded_model, sharded, rank, range(3, 6)), losses, "the losses")
    same_weights(sharded_model, model)
    same(state, untouched, "the caller's state after training on")


@shards_travel
@matrix.combined(
    "name, partition",
    ["SGD momentum", "AdamW", "Adam with a rate in a tensor", "Adafactor", "Muon"],
    ["even", "whole"],
)
def test_saved_on_two_ranks_it_trains_on_anywhere_as_the_plain_optimizer_does(name, partition):
    if partition == "even" and name in ("Adafactor", "Muon"):
        partition = "auto"
    state, weights = ranks.run(_saved, 2, args=(name, partition))[0]
    for world in (2, 3):
        ranks.run(_continued, world, args=(name, partition, state, weights))
    ranks.run(_continued, args=(name, partition, state, weights), bare=True)


@shards_travel
def test_saved_under_one_partition_it_loads_under_the_other():
    for one, other in [("even", "whole"), ("whole", "even")]:
        state, weights = ranks.run(_saved, 3, args=("AdamW", one))[0]
        ranks.run(_continued, 2, args=("AdamW", other, state, weights))


def test_saved_on_one_rank_it_loads_on_two():
    state, weights = ranks.run(_saved, args=("AdamW", "even"), bare=True)[0]
    ranks.run(_continued, 2, args=("AdamW", "even", state, weights))


@ranks.on(2)
def test_the_plain_optimizers_state_loads_with_its_options(rank, world):
    (model, plain), (sharded_model, sharded) = plain_and_sharded("AdamW")
    for group in plain.param_groups:
        group["lr"] = 0.03
    train(model, plain, rank, range(3))
    sharded_model.load_state_dict(model.state_dict())
    sharded.load_state_dict(plain.state_dict())
    assert sharded.param_groups[0]["lr"] == 0.03
    train(model, plain, rank, range(3, 6))
    train(sharded_model, sharded, rank, range(3, 6))
    same_weights(sharded_model, model)


@ranks.on(2)
def test_options_are_taken_as_copies(rank, world):
    (_, plain), (_, sharded) = plain_and_sharded("Adam with a rate in a tensor")
    state = plain.state_dict()
    sharded.load_state_dict(state)
    sharded.param_groups[0]["lr"].fill_(0.5)
    assert state["param_groups"][0]["lr"].item() == pytest.approx(0.01)


@ranks.on(2)
def test_consolidated_it_loads_from_a_file_without_unpickling_objects(rank, world):
    _, (model, sharded) = plain_and_sharded("AdamW")
    train(model, sharded, rank, range(1))
    sharded.consolidate_state_dict(to=None)
    state, file = sharded.state_dict(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    same(read, state, "the state from a file")
    sharded.load_state_dict(read)


@ranks.on(2)
def test_state_in_half_precision_keeps_its_dtypes(rank, world):
    """The plain optimizer keeps its state in the parameters' own precision."""

    def make():
        return nn.Linear(24, 40).bfloat16()

    model, sharded_model = built(make), built(make)
    plain, sharded = AdamW(model.parameters()), OSS(sharded_model.parameters(), AdamW)
    for each, optimizer in ((model, plain), (sharded_model, sharded)):
        each(batch(0, 0).bfloat16()).square().mean().backward()
        optimizer.step()
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state")
    again = OSS(built(make).parameters(), AdamW)
    again.load_state_dict(sharded.state_dict())
    again.consolidate_state_dict(to=None)
    same(again.state_dict(), plain.state_dict(), "the state loaded")


class Odd(ByParameter):
    """State of many kinds: numbers, nothing, words, small tensors of other dtypes and shapes."""

    def step_one(self, param, state, group):
        state.update(
            count=3, share=0.1, nothing=None, word="ä", flag=True, infinite=float("inf"),
            sum=param.grad.sum(), one=torch.ones(1), mask=param > 0, numbers=torch.arange(3),
            double=param.double(), empty=torch.zeros(0),
        )  # fmt: skip


@ranks.on(2)
def test_state_of_any_kind_that_a_file_can_hold_is_consolidated(rank, world):
    both = pair(Odd, "whole")  # what steps nothing cannot be measured
    (_, plain), (_, sharded) = both
    for model, optimizer in both:
        train(model, optimizer, rank, range(1))
    sharded.consolidate_state_dict(to=1)
    if rank == 1:
        same(sharded.state_dict(), plain.state_dict(), "the state")


class Historic(ByParameter):
    """State that holds tensors in lists, as Shampoo's does."""

    def step_one(self, param, state, group):
        state.setdefault("history", []).append(param.grad.clone())
        state["pair"] = (1, [2, 0.5], ())


@pytest.mark.parametrize("partition", ["whole", "even"])
@ranks.on(2)
def test_state_in_lists_and_tuples_is_consolidated_and_loaded(rank, world, partition):
    both = pair(Historic, partition)
    (_, plain), (_, sharded) = both
    for model, optimizer in both:
        train(model, optimizer, rank, range(2))
    sharded.consolidate_state_dict(to=None)
    state = sharded.state_dict()
    same(state, plain.state_dict(), "the state")
    again = OSS(built().parameters(), Historic, partition="even")
    again.load_state_dict(state)
    again.consolidate_state_dict(to=1)
    if rank == 1:
        same(again.state_dict(), state, "the state loaded under another partition and consolidated again")


# ------------------------------------------------------------------------------------------------------------ In shard


@ranks.on(2, timeout=20)
def test_asking_for_the_state_never_communicates(rank, world):
    _, (model, sharded) = plain_and_sharded("AdamW")
    before = traffic()
    if rank == 0:
        state = sharded.state_dict()
        assert is_shard(state)
        assert not state["state"]
    assert traffic() == before
    train(model, sharded, rank, range(1))
    before = traffic()
    if rank == 0:
        assert sharded.state_dict()["state"]
    assert traffic() == before
    train(model, sharded, rank, range(1, 2))


@pytest.mark.parametrize("partition", ["whole", "even"])
@ranks.on(2, timeout=20)
def test_state_shows_this_ranks_part_and_torchs_checkpoint_leaves_it_as_it_is(rank, world, partition):
    (model, plain), (sharded_model, sharded) = plain_and_sharded("AdamW", partition)
    assert not sharded.state
    train(model, plain, rank, range(2))
    train(sharded_model, sharded, rank, range(2))
    expected = [plain.state[param] for param in model.parameters()]
    found = [sharded.state.get(param, {}) for param in sharded_model.parameters()]
    for whole, shard, param in zip(expected, found, sharded_model.parameters(), strict=True):
        if sharded.part(param).numel() == 0:
            assert not shard.get("exp_avg", torch.empty(0)).numel()
            continue
        assert shard.keys() == whole.keys()  # of what is not trained none
        if partition == "whole":
            assert all(torch.equal(shard[key], value) for key, value in whole.items())
        elif whole:
            assert shard["exp_avg"].shape == sharded.part(param).shape
    sharded.zero_grad()
    before = copy.deepcopy(found)
    get_optimizer_state_dict(sharded_model, sharded)  # which takes a step, of an optimizer without state
    after = [sharded.state.get(param, {}) for param in sharded_model.parameters()]
    assert all(
        torch.equal(now[key], value) for now, then in zip(after, before, strict=True) for key, value in then.items()
    )


def _part(rank, world, name, partition):
    (model, plain), (sharded_model, sharded) = plain_and_sharded(name, partition)
    train(model, plain, rank, range(2))
    train(sharded_model, sharded, rank, range(2))
    state = copy.deepcopy(sharded.state_dict())
    weights = copy.deepcopy(sharded_model.module.state_dict())
    held = sum(
        value.numel() for entries in state["state"].values() for value in entries.values() if torch.is_tensor(value)
    )
    whole = sum(
        value.numel() for entries in plain.state.values() for value in entries.values() if torch.is_tensor(value)
    )
    assert 0 < held < whole

    untouched = copy.deepcopy(state)
    _, (again_model, again) = plain_and_sharded(name, partition)
    again_model.module.load_state_dict(weights)
    again.load_state_dict(state)
    train(model, plain, rank, range(2, 4))
    train(again_model, again, rank, range(2, 4))
    same_weights(again_model, model)
    same(state, untouched, "the caller's state")
    return state


@shards_travel
@pytest.mark.parametrize("partition", ["even", "whole"])
def test_a_part_loads_back_where_it_came_from(partition):
    ranks.run(_part, 2, args=("AdamW", partition))


def _part_elsewhere(rank, world, partition, shard):
    _, (_, sharded) = plain_and_sharded("AdamW", partition)
    before = copy.deepcopy(sharded.state_dict())
    refused = refusal(lambda: sharded.load_state_dict(shard))
    if refused:
        same(sharded.state_dict(), before, "the state after the refusal")
    return refused


@shards_travel
def test_a_part_is_refused_elsewhere_with_the_remedy():
    shards = ranks.run(_part, 2, args=("AdamW", "even"))
    told = ranks.run(_part_elsewhere, 3, args=("even", shards[0]))
    told += ranks.run(_part_elsewhere, 2, args=("whole", shards[1]))
    told += ranks.run(_part_elsewhere, args=("even", shards[0]), bare=True)
    others, own = ranks.run(_part_elsewhere, 2, args=("even", shards[1]))
    assert own == ""
    told.append(others)
    for text in told:
        assert text.startswith("ValueError: the state is one rank's shard (rank "), text
        assert text.endswith("Call consolidate_state_dict() before state_dict() to save what loads anywhere.")


# --------------------------------------------------------------------------------------------------- What does not fit


def _misfits(rank, world, change):
    _, (model, sharded) = plain_and_sharded("AdamW")
    train(model, sharded, rank, range(1))
    sharded.consolidate_state_dict(to=None)
    whole = sharded.state_dict()
    misfit = copy.deepcopy(whole)
    change(misfit)
    told = refusal(lambda: sharded.load_state_dict(misfit))
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), whole, f"the state after {told or 'no error'}")
    return told


def drop_a_parameter(state):
    state["param_groups"][0]["params"].pop()


def add_a_group(state):
    state["param_groups"].append({"lr": 0.1, "params": []})


def reshape_cut(state):
    reshape(state, (37, 37))


def reshape_uncut(state):
    reshape(state, (37, 24))


def reshape(state, shape):
    (entry,) = (entry for entry in state["state"].values() if entry["exp_avg"].shape == shape)
    entry["exp_avg"] = torch.zeros(1, 2)


@pytest.mark.parametrize("change", [drop_a_parameter, add_a_group])
def test_a_state_of_other_groups_is_refused_and_nothing_changes(change):
    count = len([*Net().parameters()])
    found = f"[{count - 1}]" if change is drop_a_parameter else f"[{count}, 0]"
    for told in ranks.run(_misfits, 2, args=(change,)):
        assert told.startswith(f"ValueError: the state has parameter groups of {found} parameters, the optimizer has")
        assert "Build OSS from the same parameters, in the same groups" in told


@pytest.mark.parametrize("change", [reshape_cut, reshape_uncut])
def test_a_state_of_other_shapes_is_refused_on_every_rank_and_nothing_changes(change):
    shape = [37, 37] if change is reshape_cut else [37, 24]
    for told in ranks.run(_misfits, 2, args=(change,)):
        assert told.startswith("ValueError: the state of parameter")
        assert f"'exp_avg' of shape [1, 2], but the parameter has {shape}" in told


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2, timeout=20)
def test_state_in_tensors_that_wrap_others_is_refused_whole_and_loads_by_rank(rank, world, stage):
    """What cannot be put together is refused; each rank's own goes on."""
    finals = []
    for reloads in (False, True):
        model = built(filled)
        if stage == 3:
            wrapped = FSDP(model, partition="whole")
            optimizer = Wrapping(wrapped.parameters())
        else:
            optimizer = OSS(model.parameters(), Wrapping)
            wrapped = ShardedDDP(model, optimizer)
        train(wrapped, optimizer, rank, range(2))
        if reloads:
            told = refusal(
                lambda of=optimizer, by=wrapped: by.optim_state_dict(of) if stage == 3 else of.consolidate_state_dict()
            )
            assert told.startswith("ValueError: the state 'mean' of ") and "TwoTensor" in told, told
            assert "Save each rank's own state_dict()" in told
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            inner = optimizer if stage == 3 else optimizer.optim
            assert {type(state["mean"]) for state in inner.state.values()} <= {TwoTensor}
        train(wrapped, optimizer, rank, range(2, 4))
        finals.append(full_state_dict(wrapped))
    same(*finals, "weights")
