"""What users and tools do with any torch optimizer: hooks, closures, arguments of step, methods of the inner one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import ranks
import zero
from reference import FEATURES, MOMENTUM, at_stage, built, loss_of, same, train, weights

by_stage = pytest.mark.parametrize("stage", [1, 2])


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, FEATURES))


@ranks.on(2)
def test_steps_that_never_find_a_gradient_warn_once(rank, world):
    optimizer = zero.OSS(built().parameters(), SGD, lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.step()
    told = [str(one.message) for one in found if "no gradient" in str(one.message)]
    assert len(told) == 1
    assert "assign=False" in told[0]


def noise(optimizer: Optimizer, *_: Any) -> None:
    """An edit of each gradient by itself, once in place and once by another tensor."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    assert params
    for param in params:
        param.grad.clamp_(-0.01, 0.02)
        param.grad = param.grad + 0.003


def clip_by_norm(optimizer: Optimizer, *_: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    torch.nn.utils.clip_grad_norm_(params, 1e-3)


@pytest.mark.parametrize(("optim", "options"), [(SGD, MOMENTUM), (Adam, {"lr": 0.01})])
@by_stage
@ranks.on(2)
def test_hooks_that_edit_gradients_count(rank, world, stage, optim, options):
    finals = []
    for at in (0, stage):
        model, optimizer = at_stage(at, built(linear), optim, **options)
        handle = optimizer.register_step_pre_hook(noise)
        losses = train(model, optimizer, rank, range(3))
        handle.remove()
        losses += train(model, optimizer, rank, range(3, 5))
        finals.append((losses, weights(model)))
    same(finals[1], finals[0], "losses and weights")


@ranks.raises(2, RuntimeError, "scaled differently", "clip_grad_norm", timeout=15)
def test_a_hook_that_clips_by_the_norm_of_a_shard_is_refused(rank, world):
    model, optimizer = at_stage(2, built(linear), SGD, **MOMENTUM)
    optimizer.register_step_pre_hook(clip_by_norm)
    train(model, optimizer, rank, range(1))


@ranks.on(2)
def test_hooks_on_state_dicts_are_called(rank, world):
    model, optimizer = at_stage(2, built(), Adam, lr=0.01)
    train(model, optimizer, rank, range(1))
    seen = []
    optimizer.register_state_dict_pre_hook(lambda one: seen.append(one is optimizer))
    optimizer.register_state_dict_post_hook(lambda one, found: {**found, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda one, found: seen.append(found.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append("loaded"))
    found = optimizer.state_dict()
    assert found["more"] == 1
    optimizer.load_state_dict(found)
    assert found["more"] == 1, "the caller's dictionary stays as it is"
    assert seen == [True, 1, "loaded"]


class Extragradient(Optimizer):
    """Asks for gradients twice a step, the second time half a step ahead, and notes in its group how far it is."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float], *, scale: float = 1.0) -> float:
        closure, group = torch.enable_grad()(closure), self.param_groups[0]
        loss = closure()
        group["calls"] = group.get("calls", 0) + 1
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        for param in params:
            param.sub_(param.grad, alpha=0.5 * scale * self.param_groups[0]["lr"])
        closure()
        for param, old in zip(params, before, strict=True):
            param.copy_(old - scale * self.param_groups[0]["lr"] * param.grad)
        return loss


class Ignoring(Optimizer):
    """Has no use for a closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad)


@ranks.on(2)
def test_a_closure_that_the_optimizer_ignores_is_not_called(rank, world):
    model, optimizer = at_stage(1, built(linear), Ignoring, partition="even")
    before = weights(model)
    assert optimizer.step(lambda: pytest.fail("nobody asked for it")) is None
    same(weights(model), before, "weights")


@by_stage
@ranks.on(2)
def test_closures_and_arguments_of_step_reach_the_inner_optimizer(rank, world, stage):
    finals = []
    for at in (0, stage):
        partition = {"partition": "even"} if at else {}
        model, optimizer = at_stage(at, built(linear), Extragradient, lr=0.1, **partition)
        losses = []
        for step in range(3):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss.item()

            losses.append(optimizer.step(closure, scale=0.7))
        finals.append((losses, weights(model), optimizer.param_groups[0]["calls"]))
    same(finals[1], finals[0], "losses, weights and calls")


class Averaged(Optimizer):
    """Trains at one set of weights and is evaluated at another, their average, as Schedule-Free does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "training": True})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert self.param_groups[0]["training"]
        self.count += 1
        for param in self._params():
            if param.grad is not None:
                mean = self.state[param].setdefault("mean", param.clone())
                param.sub_(param.grad, alpha=self.param_groups[0]["lr"])
                mean.lerp_(param, 0.3)

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    def reset(self) -> None:
        """Not to be called on this rank's shards in the name of all."""

    @torch.no_grad()
    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for param in group["params"]:
                    if "mean" in self.state[param]:
                        mean = self.state[param]["mean"]
                        param.data, self.state[param]["mean"] = param.data.copy_(mean), param.data.clone()
                group["training"] = training

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]


@pytest.mark.parametrize("through", ["oss", "optim"])
@by_stage
@ranks.on(2)
def test_weights_that_the_inner_optimizer_switches_are_gathered(rank, world, stage, through):
    finals = []
    for at in (0, stage):
        model, optimizer = at_stage(at, built(linear), Averaged, lr=0.1, **({"partition": "even"} if at else {}))
        losses = train(model, optimizer, rank, range(2))
        switch = optimizer.optim if at and through == "optim" else optimizer
        switch.eval()
        with torch.no_grad():
            losses.append(loss_of(model, rank, 7).item())
        shown = weights(model)
        switch.train()
        losses += train(model, optimizer, rank, range(2, 4))
        finals.append((losses, shown, weights(model), optimizer.count))
        if at:
            assert not hasattr(optimizer, "reset")
            with pytest.raises(AttributeError, match="shards alone"):
                optimizer.reset()
    same(finals[1], finals[0], "losses, averages, weights")


class DecayingAll(Optimizer):
    """Decays what has no gradient, too, and past autograd's counts."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.99)
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"])


@pytest.mark.parametrize("partition", ["auto", "whole"])
@by_stage
@ranks.on(2)
def test_frozen_parameters_that_a_step_writes_are_gathered(rank, world, stage, partition):
    finals = []
    for at in (0, stage):
        net = built(linear)
        net[0].requires_grad_(False)
        model, optimizer = at_stage(at, net, DecayingAll, lr=0.1, **({"partition": partition} if at else {}))
        losses = train(model, optimizer, rank, range(3))
        finals.append((losses, weights(model)))
    same(finals[1], finals[0], "losses and weights")
