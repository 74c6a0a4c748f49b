"""What optimizers are found to be, and what OSS makes of it: the right cut, or an error with the true reason."""

import io
import random
import re
from contextlib import redirect_stdout
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ranks
import zero
from assertions import same, same_weights
from optimizers import (
    ByParameter,
    ByPlace,
    Clipping,
    Curious,
    Eight,
    Estimating,
    Grouped,
    Hooked,
    Lamb,
    Lion,
    Moments,
    Noisy,
    Sam,
    Shampoo,
    Slow,
    Together,
    TrainedLion,
)
from runs import distributed, take_step, train
from zoo import OddNet, built, data, odd_loss

CUT, WHOLE = "^$", {"partition": "whole"}
COUPLED = r"cannot be sharded.*without zero \(stage 0\)"
OWN_ADAFACTOR = type("Own", (Adafactor,), {})
KINDS = {
    "element-wise, wants train()": (Lion, {}, CUT),
    "an option that does not couple": (Clipping, {"most": None}, CUT),
    "by groups, which do not say so": (Grouped, {"most": None}, CUT),
    "at random in 16 bits only": (Moments, {"at_random": True}, CUT),
    "a subclass": (OWN_ADAFACTOR, {}, r"the state .* is of shape \[12, 1\].*partition='whole'"),
    "norms": (Lamb, {}, "stepped to other values than its shards.*partition='whole'"),
    "matrices": (Shampoo, {}, r"the state 'left' .* is of shape \[12, 12\]"),
    "8 bits from 4,096 elements on": (Eight, {}, r"shape \[5120\] was stepped to other values"),
    "a norm of all": (Clipping, {"partition": "auto"}, r"Clipping \(optimizers\).*beside other tensors.*" + COUPLED),
    "a number of all, for later": (Estimating, {}, "it wrote 'd' .* where it had some of the parameters.*" + COUPLED),
    "random numbers": (Noisy, WHOLE, "draws random numbers, for one tensor after another.*" + COUPLED),
    "its place in the list": (ByPlace, {"most": None}, "another place in the list"),
    "a closure": (Sam, {"base_optimizer": SGD, "lr": 0.1}, "beside other tensors"),
    "collectives": (Together, WHOLE, r"Together \(optimizers\) calls collectives .*\(broadcast\).*without zero"),
    "hooks": (Hooked, {}, "in hooks.*Pass a plain optimizer"),
    "unknown": (Curious, {"secret": "other", "partition": "auto"}, "could not be measured.*AssertionError"),
}
"""What OSS says where it is to cut them, unless another partition is given."""


@pytest.mark.slow
@ranks.on(2)
def test_optimizers_are_found_to_be_what_they_are_and_refused_on_every_rank_with_the_reason(rank, world):
    for name, (optim, given, expected) in KINDS.items():
        told = ranks.refusal(partial(zero.OSS, built(OddNet).parameters(), optim, **{"partition": "even", **given}))
        assert told.startswith("ValueError" if told else "")
        assert re.search(expected, told, re.DOTALL), (name, told)


def state_of_generators():
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), torch.is_grad_enabled()]


@ranks.on(2)
def test_measuring_is_seen_by_nobody(rank, world):
    class Loud(Noisy):
        def step(self, closure=None):
            print("step")
            random.random()
            np.random.rand()
            super().step(closure)

    seen, model = [], built(OddNet)
    handle = register_optimizer_step_pre_hook(lambda *given: seen.append(given))
    before = state_of_generators()
    with torch.no_grad(), redirect_stdout(io.StringIO()) as written:
        assert "draws random numbers" in ranks.refusal(lambda: zero.OSS(model.parameters(), Loud))
    assert state_of_generators() == before
    assert not seen and not written.getvalue()
    SGD([nn.Parameter(torch.ones(1))]).step()
    assert len(seen) == 1
    handle.remove()


@pytest.mark.slow
@ranks.raises(2, "Exception", "Moments .* draws random numbers, for one torch.bfloat16 tensor after", timeout=15)
def test_rounding_at_random_is_refused_where_parameters_have_16_bits(rank, world):
    model = built(OddNet).to(torch.bfloat16)
    zero.OSS(model.parameters(), Moments, at_random=True)


@pytest.mark.slow
@ranks.raises(2, ValueError, "took more than 0 seconds", timeout=15)
def test_what_one_rank_finds_is_refused_on_all(rank, world):
    with mock.patch("zero.measure.probe._SECONDS", 0.0 if rank else 10.0):
        zero.OSS(built(OddNet).parameters(), type("New", (TrainedLion,), {}))


@ranks.raises(2, ValueError, "Grouped .* needs each parameter whole", timeout=15)
def test_what_a_later_group_brings_is_refused_on_all(rank, world):
    model = built(OddNet)
    optimizer = zero.OSS(model.first.parameters(), Grouped, most=None)
    optimizer.add_param_group({"params": model.middle.parameters(), "rank": 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "given", "cuts"),
    [(Eight, {}, False), (Curious, {"secret": "known", "partition": "whole"}, False), (TrainedLion, {}, True)],
    ids=["8 bits", "as the user says", "element-wise"],
)
@ranks.on(2)
def test_auto_is_the_cut_that_was_found_and_an_explicit_one_is_believed(rank, world, optim, given, cuts):
    model, plain = built(OddNet), built(OddNet)
    optimizer = zero.OSS(model.parameters(), optim, **given)
    parts = [(optimizer.part(param).numel(), param.numel()) for param in model.parameters()]
    assert any(part not in (0, whole) for part, whole in parts) == cuts
    given = {key: value for key, value in given.items() if key != "partition"}
    expected = optim([param for param in plain.parameters() if param.requires_grad], **given)
    plain, model = distributed(plain), zero.ShardedDDP(model, optimizer)
    for step in range(3):
        for each, its in ((model, optimizer), (plain, expected)):
            take_step(its, odd_loss(each, rank, step))
    same_weights(model.module, plain.module)


# Optimizers that need the names of what they step: they train as without `zero`.


class ByName(ByParameter):
    """As Adam-mini: takes pairs only, makes a group of each, decays by name, and has one number a parameter."""

    def __init__(self, named_parameters: Any, lr: float = 0.1) -> None:
        groups = [
            {"params": param, "name": name, "decay": 0.0 if "bias" in name else 0.1}
            for name, param in named_parameters
            if param.requires_grad
        ]
        super().__init__(groups, lr)

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("mean", torch.zeros_like(param))
        state["mean"].lerp_(param.grad, 0.5)
        state["square"] = state.get("square", 0.0) * 0.9 + param.grad.square().mean()
        param.mul_(1 - group["lr"] * group["decay"])
        param.sub_(group["lr"] * state["mean"] / (state["square"].sqrt() + 1e-3))


class ByNames(ByParameter):
    """Reads the names that torch puts into groups."""

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        name = next(name for name, one in zip(group["param_names"], group["params"], strict=True) if one is param)
        param.sub_(param.grad, alpha=group["lr"] / len(name))


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].bias.requires_grad_(False)
    return model


def steps(rank: int, model: nn.Module, optimizer: Optimizer, count: int) -> None:
    schedule = StepLR(optimizer, 1, gamma=0.7)
    for step in range(count):
        take_step(optimizer, model(data(4, 5, rank=rank, step=step)).square().mean())
        schedule.step()


@ranks.on(2)
def test_pairs_reach_an_optimizer_that_is_built_of_them(rank, world):
    plain, model = distributed(net()), zero.FSDP(net(), partition="whole")
    expected, optimizer = (ByName(each.named_parameters(), lr=0.2) for each in (plain.module, model))
    for each, its in ((plain, expected), (model, optimizer)):
        steps(rank, each, its, 3)
    same(dict(zero.full_state_dict(model, to=None)), dict(plain.module.state_dict()))
    state = zero.full_optimizer_state_dict(model, optimizer, to=None)["state"]
    same(state, expected.state_dict()["state"])


class Regrouped(SGD):
    """Makes a group of each parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{"params": param} for group in params for param in group["params"]], lr)


@ranks.raises(2, ValueError, "Regrouped made . groups of 1", "FSDP")
def test_other_groups_than_those_that_were_given_are_refused(rank, world):
    zero.OSS(net().parameters(), Regrouped, lr=0.1, partition="even")


def in_two_groups(model: nn.Module) -> Any:
    pairs = [*model.named_parameters()]
    return [{"params": pairs[:3]}, {"params": pairs[3:], "lr": 0.05}]


@ranks.on(2)
def test_names_are_in_the_groups_of_the_optimizer_inside(rank, world):
    plain, model = net(), net()
    optimizer = zero.OSS(in_two_groups(model), ByNames, lr=0.2)
    steps(0, model, optimizer, 2)
    steps(0, plain, ByNames(in_two_groups(plain), lr=0.2), 2)
    same(dict(model.state_dict()), dict(plain.state_dict()))
    optimizer.consolidate_state_dict(to=None)
    ByNames(in_two_groups(plain)).load_state_dict(optimizer.state_dict())


# Optimizers that wrap another one and keep state of their own, as Lookahead does: as without `zero`, or refused.


def slow_adam(params: Any, **options: Any) -> Slow:
    return Slow(Adam(params, **options))


def trained(rank: int, stage: int, *, inside: bool = True) -> tuple[Any, Any]:
    model, optimizer = zero.setup(built(), slow_adam if inside else Adam, stage=stage, lr=0.01)
    return train(model, optimizer if inside else Slow(optimizer), rank, range(3)), zero.full_state_dict(model, to=None)


@pytest.mark.parametrize(("stage", "inside"), [(1, False), (2, False), (2, True), (3, True)])
@ranks.on(2)
def test_wrappers_train_as_the_plain_ones_inside_oss_and_around_parameters_of_fsdp(rank, world, stage, inside):
    same(trained(rank, stage, inside=inside), trained(rank, 0), "losses and weights")


class Several(SGD):
    """Steps by others, which it has in a list."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.others = [Adam(group["params"], lr) for group in self.param_groups]


@pytest.mark.parametrize(("stage", "optim"), [(2, slow_adam), (2, Several), (3, Several)])
@ranks.on(2)
def test_state_of_optimizers_inside_is_refused_and_not_left_out(rank, world, tmp_path, stage, optim):
    model, optimizer = zero.setup(built(), optim, stage, lr=0.01)
    save = partial(zero.checkpoint.save, tmp_path, model, optimizer)
    full = partial(zero.full_optimizer_state_dict, model, optimizer)
    for use in (full, save, *([optimizer.state_dict] if stage == 2 else [])):  # the user's own at stage 3
        assert "keeps its state in another optimizer (Adam)" in ranks.refusal(use)
