"""`OSS.from_optimizer`: an optimizer that was built already trains on, sharded, as it would have by itself."""

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import ranks
import zero
from ranks import refusal
from runs import average_gradients
from zoo import data


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def groups(model: nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    """As the Trainer of transformers makes them."""
    decayed = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    others = [(n, p) for n, p in model.named_parameters() if p.dim() <= 1]
    made: list[dict[str, Any]] = []
    for pairs, decay in ((decayed, 0.1), (others, 0.0)):
        made.append({"params": [p for _, p in pairs], "weight_decay": decay})
        if named:
            made[-1]["param_names"] = [n for n, _ in pairs]
    return made


def train(model: nn.Module, optimizer: Optimizer, rank: int, steps: Iterable[int], scheduler: Any = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(data(4, 6, rank=rank, step=step)).square().sum().backward()
        average_gradients(model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@ranks.on(2)
def test_what_holds_groups_and_hooks_goes_on(rank, world):
    """Such as a scheduler that keeps the list, or one dictionary of it, and a handle that removes a hook later."""
    model, seen = net(), list[str]()
    given = SGD(groups(model), lr=0.1)
    held, first, kept = given.param_groups, given.param_groups[0], model[0].weight.clone()
    handle = given.register_step_pre_hook(lambda *_: seen.append("before"))
    given.register_step_post_hook(lambda *_: seen.append("after"))
    given.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    given.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer = zero.OSS.from_optimizer(given)
    assert optimizer.param_groups is held and held[0] is first and not seen
    first["lr"] = 0.0
    train(model, optimizer, rank, [0])
    assert torch.equal(model[0].weight, kept) and not torch.equal(model[0].bias, net()[0].bias)
    handle.remove()
    train(model, optimizer, rank, [1])
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "after", "saving", "loaded"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(held) == 3


class Forgetful(SGD):
    """Does not keep what it was built with."""

    def __init__(self, params: Any, lr: float = 0.1, scale: float = 1.0) -> None:
        super().__init__(params, lr=lr * scale)


@ranks.on(2)
def test_what_an_optimizer_does_not_keep_is_asked_for(rank, world):
    model = net()
    given = Forgetful(model.parameters(), scale=2.0)
    told = refusal(lambda: zero.OSS.from_optimizer(given))
    assert told.startswith("ValueError: ") and "Forgetful does not keep" in told and "functools.partial" in told
    optimizer = zero.OSS.from_optimizer(given, optim=functools.partial(Forgetful, scale=2.0))
    train(model, optimizer, rank, [0])
    assert not torch.equal(model[0].weight, net()[0].weight)


def with_state(net: nn.Module, *shape: int) -> Optimizer:
    """The momentum of one parameter has the shape."""
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    if shape:
        optimizer.state[net[0].weight]["momentum_buffer"] = torch.ones(shape)
    return optimizer


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "no optimizer": (lambda rank, net: net if rank else with_state(net), ["given a Sequential", r"\(on rank 1\)"]),
    "an OSS": (lambda rank, net: zero.OSS(net.parameters(), SGD, lr=0.1), ["given an OSS"]),
    "state on one rank": (lambda rank, net: with_state(net, *(10, 6)[: 2 * rank]), ["of 0 param", "of 1 param"]),
    "another model's state": (lambda rank, net: with_state(net, 7, 5), ["momentum_buffer", r"\[7, 5\]"]),
}


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, (_, words) in REFUSED.items()])
@ranks.raises(2, ValueError, timeout=10)
def test_what_cannot_be_taken_over_is_refused_on_every_rank(rank, world, name, words):
    zero.OSS.from_optimizer(REFUSED[name][0](rank, net()))
