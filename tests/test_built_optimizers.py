"""Optimizers that a script has built before, given to zero.setup or OSS.from_optimizer: they train on as they would by
themselves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR

import matrix
import ranks
import zero
from assertions import same
from runs import average_gradients
from transports import TRANSPORTS, by
from zoo import data


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def in_groups(model: nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    """named: as the Trainer of transformers makes them."""
    made: list[dict[str, Any]] = [{"weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0}]
    for group, wide in zip(made, (True, False), strict=True):
        pairs = [(name, param) for name, param in model.named_parameters() if (param.dim() > 1) == wide]
        group["params"] = [param for _, param in pairs]
        group |= {"param_names": [name for name, _ in pairs]} if named else {}
    return made


class Handing(SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda model: Adam(in_groups(model), lr=0.01, betas=(0.8, 0.9)),
    "sgd": lambda model: SGD(in_groups(model), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda model: Adagrad(in_groups(model), lr=0.1),  # has state as soon as it is built
    "adam, named": lambda model: Adam(in_groups(model, named=True), lr=0.01, amsgrad=True),
    "a class of a user's": lambda model: Handing(in_groups(model), lr=0.1, momentum=0.5),
}


class Trained:
    """A model, its optimizer with what a script has around it, and what hooks have seen."""

    def __init__(self, build: Callable[[nn.Module], Optimizer]) -> None:
        self.model, self.seen = net(), list[str]()
        self.optimizer = build(self.model)
        self.groups = self.optimizer.param_groups
        self.scheduler = SequentialLR(
            self.optimizer, [ConstantLR(self.optimizer, 0.5, 1), ExponentialLR(self.optimizer, 0.5)], [2]
        )
        register = self.optimizer.register_step_pre_hook, self.optimizer.register_step_post_hook
        self.handles = [on(partial(self.note, when)) for on, when in zip(register, ("before", "after"), strict=True)]
        self.optimizer.register_state_dict_post_hook(lambda _, found: found.update(note="mine"))

    def note(self, when: str, optimizer: Optimizer, *_: Any) -> None:
        gradients = [param.grad for group in optimizer.param_groups for param in group["params"]]
        self.seen.append(f"{when} a step of {len(optimizer.param_groups)} groups")
        assert when == "after" or any(gradient is not None for gradient in gradients)

    def steps(self, rank: int, numbers: range, *, average: bool = False) -> list[float]:
        losses = []
        for number in numbers:
            self.optimizer.zero_grad()
            loss = self.model(data(4, 6, rank=rank, step=number)).square().mean()
            loss.backward()
            if average:
                average_gradients(self.model)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@matrix.combined("stage, transport, name", range(4), TRANSPORTS, OPTIMIZERS, each=2)
@ranks.on(2)
def test_a_built_optimizer_goes_on_at_every_stage(rank, world, stage, transport, name):
    """With its class, groups, options, hooks and state, and the schedule that was made for it before."""
    expected, found = Trained(OPTIMIZERS[name]), Trained(OPTIMIZERS[name])
    given = found.optimizer
    for one in (expected, found):
        one.steps(rank, range(2), average=True)
    with by(transport):
        found.model, found.optimizer = zero.setup(found.model, given, stage=stage)
        kept = found.optimizer.optim if stage in (1, 2) else found.optimizer
        assert type(kept) is type(given) and (kept is given) == (stage in (0, 3))
        before = zero.full_optimizer_state_dict(found.model, found.optimizer, to=None)
        same(before, expected.optimizer.state_dict(), "the state")
        for numbers in (range(2, 4), range(4, 5)):
            assert found.steps(rank, numbers) == expected.steps(rank, numbers, average=True)
            found.handles.pop().remove()
            expected.handles.pop().remove()
        same(zero.full_state_dict(found.model, to=None), dict(expected.model.state_dict()), "the weights")
        state = zero.full_optimizer_state_dict(found.model, found.optimizer, to=None)
    same(state, expected.optimizer.state_dict(), "the state")
    assert state["note"] == "mine" and found.seen == expected.seen and len(found.seen) == 9
    assert found.groups is found.optimizer.param_groups is given.param_groups


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_an_optimizer_that_was_given_to_setup_neither_steps_nor_saves(rank, world, stage):
    model = net()
    given = SGD(model.parameters(), lr=0.1)
    _, optimizer = zero.setup(model, given, stage=stage)
    for use in (given.step, given.state_dict, lambda: given.load_state_dict({})):
        told = ranks.refusal(use)
        assert told.startswith("RuntimeError: this SGD was given to") and "the OSS that it returned" in told
    optimizer.state_dict()


@ranks.on(2)
def test_state_that_was_cut_is_marked_before_the_first_step(rank, world):
    trained = Trained(OPTIMIZERS["adam"])
    trained.steps(rank, range(1), average=True)
    _, optimizer = zero.setup(trained.model, trained.optimizer, stage=3)
    saved: list[Any] = [None, None]
    with pytest.warns(UserWarning, match="only one rank's shard"):
        dist.all_gather_object(saved, optimizer.state_dict())
    optimizer.load_state_dict(saved[rank])
    assert "one rank's shard" in ranks.refusal(lambda: optimizer.load_state_dict(saved[1 - rank]))


class Forgetful(SGD):
    def __init__(self, params: Any, lr: float = 0.1, scale: float = 1.0) -> None:
        super().__init__(params, lr=lr * scale)


@ranks.on(2)
def test_what_an_optimizer_does_not_keep_is_asked_for(rank, world):
    model = net()
    given = Forgetful(model.parameters(), scale=2.0)
    told = ranks.refusal(lambda: zero.OSS.from_optimizer(given))
    assert told.startswith("ValueError: ") and "Forgetful does not keep" in told and "functools.partial" in told
    optimizer = zero.OSS.from_optimizer(given, optim=partial(Forgetful, scale=2.0))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(given.param_groups) == 2
    model(data(4, 6, rank=0)).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[0].bias, net()[0].bias - 0.2 * model[0].bias.grad)


def with_state(net: nn.Module, *shape: int) -> Optimizer:
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
