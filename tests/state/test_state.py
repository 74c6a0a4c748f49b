"""Optimizer state: whole it is the plain optimizer's own, and goes anywhere; in shards it goes back where it was."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import StepLR

import matrix
import ranks
import zero
from assertions import same, same_weights
from inner import Meter, set_bucket_size, shard_groups
from optimizers import Lamb
from ranks import refusal
from runs import pair, train
from zero import OSS, traffic
from zero.measure.kinds import ELEMENTWISE, SINGLE
from zero.shards.sharded_parameter import Shard
from zoo import OddNet, data, filled, matrices, odd_loss


def strided():
    """Memory order is not row order, in four dimensions."""
    conv = nn.Conv2d(3, 8, (2, 3)).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Unflatten(1, (3, 2, 4)), conv, nn.Flatten())


def groups_of(model):
    """Two groups with options of their own; the first rank may own nothing of one of them."""
    params = [*model.parameters()]
    return [{"params": params[:1], "lr": torch.tensor(0.02)}, {"params": params[1:]}]


CASES = {
    "SGD momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, OddNet),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}, OddNet),
    "AdamW, strided": (AdamW, {}, strided),
    "AdamW, in groups": (AdamW, {"lr": torch.tensor(0.01), "foreach": False, "params": groups_of}, OddNet),
    "Adam with a rate in a tensor": (Adam, {"lr": torch.tensor(0.01), "foreach": False}, OddNet),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}, OddNet),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}, filled),
    "Muon": (torch.optim.Muon, {"lr": 0.1}, matrices),
    "LAMB by hand": (Lamb, {"lr": 0.1}, OddNet),
}


shards_travel = pytest.mark.filterwarnings("ignore:this state_dict.. is only one rank's shard:UserWarning")
"""From the ranks to the test, as bytes."""


def plain_and_sharded(name, partition="auto"):
    optim, options, make = CASES[name]
    return pair(optim, partition, make, **options)


def is_shard(state):
    return all("zero_shard" in group for group in state["param_groups"])


# --------------------------------------------------------------------------------------------------------------- Whole


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@ranks.on("world")
def test_consolidated_it_equals_the_plain_optimizers(rank, world):
    for name in CASES if world == 2 else ["AdamW"]:
        (model, plain), (sharded_model, sharded) = plain_and_sharded(name, "whole" if world == 3 else "auto")
        for step in range(2):
            if step:  # at first before any step
                train(model, plain, rank, range(2))
                train(sharded_model, sharded, rank, range(2))
            for to in (0, world - 1, None):
                sharded.consolidate_state_dict(to=to)
                state = sharded.state_dict()
                assert is_shard(state) == (to not in (None, rank))
                if to in (None, rank):
                    same(state, plain.state_dict(), f"{name}: what came to {to}")
        same_weights(sharded_model, model)


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
    groups = [{key: value for key, value in group.items() if key != "zero_shard"} for group in told["param_groups"]]
    same(groups, plain.state_dict()["param_groups"], "the groups")


@ranks.on(2)
def test_parameters_that_were_not_stepped_have_no_state(rank, world):
    (model, plain), (sharded_model, sharded) = plain_and_sharded("AdamW")
    for each, optimizer in ((model, plain), (sharded_model, sharded)):
        odd_loss(each, rank, 0).backward()
        each.module.first.weight.grad = None
        each.module.scale.grad = None
        optimizer.step()
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state")
    assert len(plain.state_dict()["state"]) == len([p for p in model.parameters() if p.requires_grad]) - 2


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
    largest = max(group.full.nbytes for group in shard_groups(sharded))
    return peak, largest, sum(2 * param.nbytes for param in model.parameters())


def test_who_only_sends_needs_no_more_than_a_bucket():
    (received, bucket, state), *others = ranks.run(_taken, 3)
    assert state <= received <= state + bucket
    assert all(peak <= bucket for peak, _, _ in others)


@ranks.on(2)
def test_what_was_consolidated_holds_until_the_next_step_or_load(rank, world):
    """Asking for it sends nothing, also on one rank alone."""
    _, (sharded_model, sharded) = plain_and_sharded("SGD momentum")
    before = traffic()
    if rank == 0:
        assert is_shard(sharded.state_dict()) and not sharded.state_dict()["state"]
    assert traffic() == before
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


# ------------------------------------------------------------------------------------------------------------ In shard


@pytest.mark.parametrize("partition", ["whole", "even"])
@ranks.on(2, timeout=20)
def test_state_answers_as_the_full_one_on_every_rank(rank, world, partition):
    """Also where a rank owns nothing of a parameter; it is plain again in a step, and in what is saved."""
    (model, plain), (sharded_model, sharded) = plain_and_sharded("AdamW", partition)
    for steps in (range(2), range(2, 4)):
        train(model, plain, rank, steps)
        train(sharded_model, sharded, rank, steps)
        for whole, part in zip(model.parameters(), sharded_model.parameters(), strict=True):
            state, expected = sharded.state.get(part, {}), plain.state.get(whole, {})
            assert state.keys() == expected.keys()  # of what is not trained none
            for key, value in expected.items():
                assert state[key].shape == value.shape and state[key].numel() == value.numel()
                assert torch.equal(torch.as_tensor(state[key].tolist(), dtype=value.dtype), value), key
            if expected:
                state["exp_avg"].mul_(0.5)
                expected["exp_avg"].mul_(0.5)
                state["exp_avg_sq"] = torch.full_like(expected["exp_avg_sq"], 0.25)  # in full
                expected["exp_avg_sq"] = torch.full_like(expected["exp_avg_sq"], 0.25)
                assert state["exp_avg"].norm(1) == pytest.approx(expected["exp_avg"].norm(1).item())
        assert not any(isinstance(one, Shard) for of in sharded.state_dict()["state"].values() for one in of.values())


class Small(nn.Module):
    """With parameters of one element, with and without dimensions, of which most ranks own nothing."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.rare, self.once = nn.Linear(6, 6), nn.Linear(6, 6)
        self.gain, self.shift = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x) * self.gain)) + self.shift + self.rare(x) + self.once(x)


def _through_a_file(model, optimizer, other, fresh, folder):
    zero.checkpoint.save(folder, model, optimizer)
    zero.checkpoint.load(folder, other, fresh)


def _in_full(model, optimizer, other, fresh, _):
    zero.load_full_optimizer_state_dict(other, fresh, zero.full_optimizer_state_dict(model, optimizer))


WAYS = {
    "as it is": lambda *_: None,
    "own": lambda model, optimizer, other, fresh, _: fresh.load_state_dict(optimizer.state_dict()),
    "full": _in_full,
    "file": _through_a_file,
}
KINDS = {kind.__name__: kind for kind in sorted(ELEMENTWISE, key=lambda kind: kind.__name__)}


@pytest.mark.filterwarnings("ignore:Sharded tensors were gathered")
@matrix.combined("stage, way, kind", [1, 2, 3], WAYS, KINDS, each=3)
@ranks.on(2)
def test_state_is_there_on_every_rank_also_once_it_was_loaded(rank, world, stage, way, kind, tmp_path):
    def start(stage):
        torch.manual_seed(0)
        net = Small()
        given = {"momentum": 0.9} if KINDS[kind] in (SGD, RMSprop) else {}
        return zero.setup(net, KINDS[kind](net.parameters(), lr=0.01, **given), stage=stage)

    def trained(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(data(4, 6, rank=rank, step=step)).square().mean().backward()
            for layer in [model.module.rare] * (step % 2) + [model.module.once] * (step > 0):  # it counts fewer steps
                layer.zero_grad()
            optimizer.step()

    def values(model, optimizer):
        return [
            {key: value.tolist() if isinstance(value, Tensor) else value for key, value in optimizer.state[one].items()}
            for one in model.parameters()
        ]

    (reference, plain), (model, optimizer), (other, fresh) = start(0), start(stage), start(stage)
    trained(reference, plain, range(2))
    trained(model, optimizer, range(2))
    WAYS[way](model, optimizer, other, fresh, tmp_path)
    held = (model, optimizer) if way == "as it is" else (other, fresh)
    assert values(*held) == (found := values(reference, plain))
    weight = reference.module.up.weight
    single = {key for key, one in plain.state[weight].items() if one.shape != weight.shape}
    assert single == plain.state[weight].keys() & SINGLE
    if way != "as it is":
        zero.load_full_state_dict(other, zero.full_state_dict(model, to=None))
    trained(reference, plain, range(2, 4))
    trained(*held, range(2, 4))
    assert values(*held) == values(reference, plain) != found


def _part(rank, world, partition):
    _, (model, sharded) = plain_and_sharded("AdamW", partition)
    train(model, sharded, rank, range(2))
    return copy.deepcopy(sharded.state_dict())


def _part_elsewhere(rank, world, partition, shard):
    _, (_, sharded) = plain_and_sharded("AdamW", partition)
    before = copy.deepcopy(sharded.state_dict())
    refused = refusal(lambda: sharded.load_state_dict(shard))
    if refused:
        same(sharded.state_dict(), before, "the state after the refusal")
    return refused


@pytest.mark.slow
@shards_travel
def test_a_part_is_refused_elsewhere_with_the_remedy():
    shards = ranks.run(_part, 2, args=("even",))
    told = ranks.run(_part_elsewhere, 3, args=("even", shards[0]))
    told += ranks.run(_part_elsewhere, 2, args=("whole", shards[1]))
    told += ranks.run(_part_elsewhere, args=("even", shards[0]), bare=True)
    others, own = ranks.run(_part_elsewhere, 2, args=("even", shards[1]))
    assert own == ""
    for text in [*told, others]:
        assert text.startswith("ValueError") and "one rank's shard (rank " in text and "consolidate_state_dict" in text
