"""Optimizers that need the names of what they step: they train as without `zero`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import ranks
import zero
from optimizers import ByParameter
from runs import distributed, take_step
from zoo import data


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


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@ranks.on(2)
def test_pairs_reach_an_optimizer_that_is_built_of_them(rank, world):
    plain, model = distributed(net()), zero.FSDP(net(), partition="whole")
    expected, optimizer = (ByName(each.named_parameters(), lr=0.2) for each in (plain.module, model))
    for each, its in ((plain, expected), (model, optimizer)):
        steps(rank, each, its, 3)
    assert same(zero.full_state_dict(model, to=None), plain.module.state_dict())
    state = zero.full_optimizer_state_dict(model, optimizer, to=None)["state"]
    assert all(same(state[number], of_one) for number, of_one in expected.state_dict()["state"].items())


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
    assert same(model.state_dict(), plain.state_dict())
    optimizer.consolidate_state_dict(to=None)
    ByNames(in_two_groups(plain)).load_state_dict(optimizer.state_dict())
