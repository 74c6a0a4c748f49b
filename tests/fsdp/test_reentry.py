"""Backward is interrupted, or comes to a unit again: no gradient is lost, and none that was cleared comes back."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import gpus
import matrix
import ranks
import zero
from assertions import plain
from runs import side_by_side, steps
from zoo import Block, Stack, batch, loss_on


class Stop(nn.Module):
    """Hands its input on, until it is told to fail."""

    where: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "interrupt":
            raise KeyboardInterrupt
        if self.where == "forward":
            raise KeyError("as told")
        if self.where == "backward":
            x = x.clone()
            x.register_hook(self.fail)
        return x

    def fail(self, _: Tensor) -> None:
        raise KeyError("as told")


class Stopping(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = nn.Sequential(Stop(), self.blocks[1].up, Stop())

    def failing(self, where: str, call: Any, *, late: bool = False) -> Any:
        """What `call` returns while a stop fails. late: in backward, after a gradient of the block."""
        stop = self.blocks[1].up[0 if late else 2]
        stop.where = where
        try:
            return call()
        finally:
            stop.where = None


@ranks.on(2, timeout=20)
def test_gradients_from_before_an_exception_are_there_after_it(rank, world):
    """The exception comes before the first gradient of the last block."""
    both = side_by_side(Stopping(), {})
    params = [*both.model.parameters()]
    both.backward(loss_on(rank, 0))
    before = [None if param.grad is None else param.grad.clone() for param in params]
    output = both.model(batch(rank, 1))
    both.model.blocks[2].down.bias.register_hook(Stop().fail)
    with pytest.raises(KeyError):
        output.square().mean().backward()
    if gpus.ON:  # the thread in which autograd computes there ends after the exception
        both.model.eval()(batch(rank, 1))
    for param, old in zip(params, before, strict=True):
        assert param.grad is old is None or torch.equal(plain(param.grad), plain(old))


def a_graph_after_one_whose_backward_failed(rank, world, options):
    """No forward comes between the two backwards."""
    both = side_by_side(Stopping(), options)
    for step in range(2):
        both.zero_grad()
        graphs = {model: loss_on(rank, 2 * step)(model) for model in (both.model, both.plain)}
        failing = both.model.failing("backward", lambda: loss_on(rank, 1)(both.model))
        with pytest.raises(KeyError):
            failing.backward()
        both.step(lambda model, graphs=graphs: graphs[model])


def a_forward_that_is_broken_off(rank, world, options):
    """After a backward under no_sync, and where nothing is trained. Hooks of modules are not told of an interrupt."""
    both = side_by_side(Stopping(), options, tolerance=1e-6)
    model = both.model
    for step, where in enumerate(["interrupt", "forward"]):
        both.zero_grad()
        both.backward(loss_on(rank, 4 * step), sync=False)
        for enter in (model, model.blocks[1] if step == 0 else model):
            with pytest.raises((KeyError, KeyboardInterrupt)), model.no_sync():
                model.failing(where, lambda enter=enter: enter(batch(rank, 1)))
        both.backward(loss_on(rank, 4 * step + 2))  # what no_sync kept before is there still
        both.update()
        with pytest.raises((KeyError, KeyboardInterrupt)), torch.no_grad():
            model.failing(where, lambda: model(batch(rank, 3)))
    steps(both, rank, 1)


@ranks.on(2, timeout=20)
def test_a_step_may_follow_a_forward_that_was_interrupted(rank, world):
    """The second forward is one that is searched for reads."""
    both = side_by_side(Stopping(), {})
    both.backward(loss_on(rank, 0))
    with pytest.raises(KeyboardInterrupt):
        both.model.failing("interrupt", lambda: both.model(batch(rank, 1)))
    with mock.patch.object(both, "compare"):  # full weights are refused until the next forward
        both.update()
    both.step(loss_on(rank, 2))


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "no shard": {"sharding_strategy": "NO_SHARD"},
    "memory first": {"prefetch": 1},
    "speed first": {"prefetch": 3},
}


@matrix.combined(
    "scenario, options", [a_graph_after_one_whose_backward_failed, a_forward_that_is_broken_off], OPTIONS, each=3
)
def test_numbers_are_those_of_the_reference(scenario, options):
    ranks.run(scenario, args=(OPTIONS[options],), timeout=20)


def penalised(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    """A penalty that is computed past forward."""

    def loss(model: nn.Module) -> Tensor:
        blocks: Any = getattr(model, "module", model).blocks
        return blocks[0].up.weight.square().sum() + loss_on(rank, step)(model)

    return loss


NO_SHARD: dict[str, Any] = {"sharding_strategy": "NO_SHARD", "auto_wrap_policy": ModuleWrapPolicy({Block})}


@ranks.on(2)
def test_where_parameters_are_always_full_a_gradient_may_come_past_forward(rank, world):
    both = side_by_side(Stack(), NO_SHARD)
    for step in range(3):
        both.step(penalised(rank, step))


@ranks.on(2)
def test_a_gradient_that_comes_past_forward_after_the_others_were_sent_is_added_to_them(rank, world):
    narrow = {**NO_SHARD, "precision": zero.MixedPrecision(param_dtype=torch.bfloat16)}
    torch.manual_seed(0)
    plain, both = zero.FSDP(net := Stack(), **narrow), zero.FSDP(copied := Stack(), **narrow)
    copied.load_state_dict(net.state_dict())
    loss_on(rank, 0)(plain).backward()
    penalised(rank, 0)(both).backward()
    for (name, one), other in zip(plain.named_parameters(), both.parameters(), strict=True):
        penalty = 2 * one.detach() if name == "blocks.0.up.weight" else 0
        torch.testing.assert_close(other.grad, one.grad + penalty, rtol=1e-2, atol=1e-3)
