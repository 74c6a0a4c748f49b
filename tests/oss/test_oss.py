"""Stage 1 beside DistributedDataParallel with the plain optimizer: the same losses and parameters, bit for bit."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import ranks
from assertions import same, same_weights
from optimizers import ELEMENTWISE, MOMENTUM, Lamb, MyAdam
from rows import Rows, adam, trains
from runs import at_stage, norm_of_gradients, pair, train
from zoo import OddNet, built, filled, matrices


def adam_by_factory(params, **options):
    return Adam(params, **options)


# What is stepped, its options, and the cut that "auto" should choose for it.
OPTIMIZERS = {
    **{name: (*given, "even") for name, given in ELEMENTWISE.items()},
    "SGD fused": (SGD, {**MOMENTUM, "fused": True}, "even"),
    "Adam fused": (Adam, {"lr": 0.01, "amsgrad": True, "fused": True}, "even"),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}, "whole"),
    "LAMB by hand": (Lamb, {"lr": 0.1}, "whole"),
    "a subclass of Adam": (MyAdam, {"lr": 0.01}, "even"),
    "partial of partial": (partial(partial(Lamb, lr=0.5), lr=0.1), {}, "whole"),
    "a function": (adam_by_factory, {"lr": 0.01}, "even"),
}
OPTIMIZERS["Muon"] = (torch.optim.Muon, {"lr": 0.1, "weight_decay": 0.1}, "whole")
MODELS = {"Adafactor": filled, "Muon": matrices}  # what these cannot take is left out


def is_cut(optimizer):
    """Whether any parameter has shards on several ranks."""
    return any(0 < optimizer.part(p).numel() < p.numel() for each in optimizer.param_groups for p in each["params"])


def assert_equal_training(rank, plain, sharded, **options):
    expected = train(*plain, rank, **options)
    same(train(*sharded, rank, **options), expected, "the losses")
    same_weights(sharded[0], plain[0])
    assert expected[0] != expected[-1]


CASES = [(name, "auto", 1) for name in OPTIMIZERS]
CASES += [(name, "auto", 2) for name in ("Muon", "Adafactor", "LAMB by hand")]
CASES += [("a subclass of Adam", "whole", 1), ("a function", "even", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
@ranks.on(2)
def test_trains_as_the_plain_optimizer_does_bit_for_bit(rank, world, turn):
    for name, partition, stage in CASES[turn::4]:
        optim, options, auto = OPTIMIZERS[name]
        make = MODELS.get(name, OddNet)
        plain, sharded = (at_stage(at, built(make), optim, partition=partition, **options) for at in (0, stage))
        assert is_cut(sharded[1]) == ((auto if partition == "auto" else partition) == "even")
        assert_equal_training(rank, plain, sharded, steps=range(3))


def tiny():
    """Fewer parameters than ranks, and fewer elements than ranks in each."""
    return nn.Sequential(nn.Linear(24, 1, bias=False), nn.LayerNorm(1))


@pytest.mark.parametrize(("make", "partition", "world"), [(OddNet, "whole", 3), (tiny, "even", 3), (tiny, "whole", 4)])
@ranks.on("world")
def test_trains_the_same_within_rounding_on_other_numbers_of_ranks(rank, world, make, partition):
    plain, sharded = pair(SGD, partition, make, **MOMENTUM)
    losses = train(*plain, rank)
    assert train(*sharded, rank) == pytest.approx(losses, rel=2e-6)
    found, expected = (dict(model.state_dict()) for model, _ in (sharded, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@ranks.on(bare=True)
def test_trains_the_same_without_a_process_group(rank, world):
    plain, sharded = pair(Adam, lr=0.01)
    assert_equal_training(rank, plain, sharded)
    same(sharded[1].state_dict(), plain[1].state_dict(), "the state")


def groups_of(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
        {"params": [p for p in model.parameters() if p.dim() >= 2], "momentum": 0.5},
    ]


@pytest.mark.parametrize("params", [groups_of, nn.Module.named_parameters])
@ranks.on(2)
def test_groups_with_options_and_names_are_taken_as_torch_takes_them(rank, world, params):
    (model, plain), (other, sharded) = pair(SGD, params=lambda model: params(model.module), **MOMENTUM)
    assert_equal_training(rank, (model, plain), (other, sharded))
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state, with names and options")
    same(sharded.defaults, plain.defaults, "the defaults")


class Cooling(SGD):
    """Changes its own options, as optimizers do that choose their learning rate."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5
        return loss


row = Rows("options that change in training", __name__)
row.of("the optimizer changes them itself", optim=partial(Cooling, lr=0.1, momentum=0.9))


@row(optim=adam)
def one_cycle_of_rates_and_betas(t, i):
    if i == 0:
        t.kept.schedule = OneCycleLR(t.o, max_lr=0.02, total_steps=6)
    trains(t, i)
    t.kept.schedule.step()
    [group] = t.o.param_groups
    t.note(torch.tensor([group["lr"], *group["betas"]]))


test_rows = row.tests()


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_parameters_may_be_added_after_some_steps(rank, world, partition):
    """What a scheduler has set since the last step is kept."""
    both = pair(SGD, partition, params=lambda model: model.module.first.parameters(), **MOMENTUM)
    for model, optimizer in both:
        schedule = StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, rank, range(2), after=lambda *_, schedule=schedule: schedule.step())
        inner = model.module
        optimizer.add_param_group({"params": [inner.middle.weight, inner.scale], "lr": 0.01})
        optimizer.add_param_group({"params": inner.norm.parameters(), "nesterov": True})
        optimizer.add_param_group({"params": inner.transposed})
    assert [group["lr"] for group in both[1][1].param_groups] == [0.025, 0.01, 0.1, 0.1]
    assert_equal_training(rank, *both, steps=range(2, 5))
    norms = [norm_of_gradients(model).item() for model, _ in both]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    (_, plain), (_, sharded) = both
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state")
