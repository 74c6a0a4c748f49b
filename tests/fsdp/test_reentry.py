"""Backward comes to a unit again while its gradients are on their way, or is interrupted: no gradient is lost, and none
that was cleared comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import matrix
import ranks
import sidebyside
import zero
from stacks import WIDTH, Block, Scenarios, Stack, batch, loss_on, steps, unsharded_in_backward

SCENARIOS = scenario = Scenarios()

side_by_side = partial(sidebyside.side_by_side, tolerance=1e-6)  # gradients sent in two goes are rounded once more


def adversarial(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    """The loss on a batch and on what an attack by its gradient makes of it."""

    def loss(model: nn.Module) -> Tensor:
        x = batch(rank, step).requires_grad_()
        clean = model(x).square().mean()
        (towards,) = torch.autograd.grad(clean, x, retain_graph=True)
        return clean + model((x + 0.1 * towards.sign()).detach()).square().mean()

    return loss


@scenario
def such_graphs_with_accumulation_and_no_sync(rank, world, options):
    both = side_by_side(Stack(), options)
    for step in range(3):
        both.zero_grad()
        both.backward(adversarial(rank, 4 * step))
        both.backward(adversarial(rank, 4 * step + 1), sync=False)
        both.backward(adversarial(rank, 4 * step + 2))
        both.backward(loss_on(rank, 4 * step + 3))
        both.update()


@scenario
def a_parameter_that_a_backward_under_no_sync_does_not_reach(rank, world, options):
    class Half(Block):
        half = False

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(x)[..., :WIDTH] if self.half else super().forward(x)

    def half(model: Any, step: int) -> Tensor:
        model.blocks[0].half = True
        found = loss_on(rank, step)(model)
        model.blocks[0].half = False
        return found

    both = side_by_side(Stack(Half, blocks=2), options)
    for step in range(3):
        both.zero_grad()
        both.backward(loss_on(rank, 3 * step))
        both.backward(lambda model, step=step: half(model, 3 * step + 1), sync=False)
        both.backward(loss_on(rank, 3 * step + 2))
        both.update()


@scenario
def a_graph_that_is_retained_and_a_newer_one(rank, world, options):
    both = side_by_side(Stack(), options)
    for step in range(3):
        both.zero_grad()
        kept = {model: loss_on(rank, 2 * step)(model) for model in (both.model, both.plain)}
        both.backward(lambda model, kept=kept: kept[model], retain_graph=True)
        both.backward(lambda model, kept=kept, step=step: kept[model] + loss_on(rank, 2 * step + 1)(model))
        both.update()


@scenario
def a_graph_from_before_another_backward_and_a_newer_one(rank, world, options):
    both = side_by_side(Stack(), options)
    for step in range(3):
        old = {model: loss_on(rank, 3 * step)(model) for model in (both.model, both.plain)}
        newer = loss_on(rank, 3 * step + 2)
        both.step(loss_on(rank, 3 * step + 1), lambda model, old=old, newer=newer: old[model] + newer(model))


@scenario
def a_retained_graph_of_a_block_that_calls_itself(rank, world, options):
    class Recursive(Block):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = super().forward(x)
            return super().forward(torch.tanh(self(x, again=False))) if again else x

    both = side_by_side(Stack(Recursive, blocks=2), options)
    for step in range(3):
        both.step(adversarial(rank, step))


class Shared(Stack):
    """Each block runs three times in a row."""

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for _ in range(3):
                x = checkpoint(block, x, use_reentrant=True)
        return x


@scenario
def blocks_used_again_under_reentrant_checkpointing(rank, world, options):
    for blocks in (1, 2):
        both = side_by_side(Shared(blocks=blocks), options)
        steps(both, rank)
        both.step(*(loss_on(rank, number) for number in (3, 4, 5)), unsent=1)


class Stop(nn.Module):
    """Hands its input on, until it is told to fail."""

    where: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise KeyboardInterrupt
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

    def stop(self, where: str | None, *, late: bool) -> None:
        self.blocks[1].up[0 if late else 2].where = where


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sync", [True, False])
@ranks.on(2, timeout=20)
def test_gradients_that_are_cleared_after_an_exception_do_not_come_back(rank, world, sync, late):
    both = side_by_side(Stopping(), {})
    for step in range(3):
        both.zero_grad()
        both.backward(loss_on(rank, 9 * step))
        both.backward(loss_on(rank, 9 * step + 1), sync=sync)
        both.model.module.stop("backward", late=late)
        with pytest.raises(KeyError):
            loss_on(rank, 9 * step + 2)(both.model).backward()
        both.model.module.stop(None, late=late)
        both.zero_grad()
        with torch.no_grad():
            both.model(batch(rank, 0))
        assert all(param.grad is None for param in both.model.parameters())
        both.step(loss_on(rank, 9 * step + 3))


@ranks.on(2, timeout=20)
def test_gradients_from_before_an_exception_are_there_after_it(rank, world):
    """The exception comes before the first gradient of the last block."""
    both = side_by_side(Stopping(), {})
    params = [*both.model.parameters()]
    both.backward(loss_on(rank, 0))
    before = [None if param.grad is None else param.grad.clone() for param in params]
    output = both.model(batch(rank, 1))
    both.model.module.blocks[2].down.bias.register_hook(Stop().fail)
    with pytest.raises(KeyError):
        output.square().mean().backward()
    for param, old in zip(params, before, strict=True):
        assert param.grad is old is None or torch.equal(param.grad, old)


@scenario
def a_graph_after_one_whose_backward_failed(rank, world, options):
    """No forward comes between the two backwards."""
    both = side_by_side(Stopping(), options)
    for step in range(3):
        both.zero_grad()
        graphs = {model: loss_on(rank, 2 * step)(model) for model in (both.model, both.plain)}
        both.model.module.stop("backward", late=False)
        failing = loss_on(rank, 2 * step + 1)(both.model)
        both.model.module.stop(None, late=False)
        with pytest.raises(KeyError):
            failing.backward()
        both.step(lambda model, graphs=graphs: graphs[model])


@scenario
def an_interrupt_in_forward(rank, world, options):
    """Which hooks of modules are not told of, unlike other exceptions."""
    both = side_by_side(Stopping(), options)
    for step in range(3):
        both.zero_grad()
        both.backward(loss_on(rank, 4 * step), sync=False)
        both.model.module.stop("forward", late=False)
        for enter in (both.model, both.model.module.blocks[1] if step == 2 else both.model):
            with pytest.raises(KeyboardInterrupt):
                enter(batch(rank, 4 * step + 1))
        both.model.module.stop(None, late=False)
        both.backward(loss_on(rank, 4 * step + 2))
        both.update()


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "no shard": {"sharding_strategy": "NO_SHARD"},
    "memory first": {"prefetch": zero.MEMORY_FIRST},
    "speed first": {"prefetch": zero.SPEED_FIRST},
}


@matrix.combined("name, options", SCENARIOS, OPTIONS, each=3)
def test_numbers_are_those_of_the_reference(name, options):
    ranks.run(SCENARIOS[name], args=(OPTIONS[options],), timeout=20)


@pytest.mark.parametrize("name", SCENARIOS)
def test_numbers_of_a_single_rank(name):
    ranks.run(SCENARIOS[name], world=1, args=({},), timeout=20)


@ranks.raises(2, RuntimeError, "out of step", "the gathering of unit", timeout=20)
def test_a_graph_that_one_rank_alone_goes_through_again_is_refused_on_every_rank(rank, world):
    model = zero.FSDP(Stack())
    first = loss_on(rank, 0)(model)
    first.backward(retain_graph=True)
    second = loss_on(rank, 1)(model)
    (first + second if rank == 0 else second).backward()


@ranks.raises(2, RuntimeError, r"blocks\.0\.up\.weight", "inside forward", timeout=20)
def test_a_gradient_that_comes_past_forward_after_the_others_were_sent_is_refused(rank, world):
    model = zero.FSDP(Stack(), sharding_strategy="NO_SHARD", auto_wrap_policy=ModuleWrapPolicy({Block}))
    penalty = model.module.blocks[0].up.weight.square().sum()
    (penalty + loss_on(rank, 0)(model)).backward()


class Segments(Stack):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)


@pytest.mark.parametrize("options", ["default", "memory first"])
@ranks.on(2, timeout=20)
def test_blocks_that_are_computed_again_together_are_released_one_by_one(rank, world, options):
    both = side_by_side(Segments(blocks=8), {**OPTIONS[options], "auto_wrap_policy": ModuleWrapPolicy({Block})})
    both.step(loss_on(rank, 0))
    counts = unsharded_in_backward(both.model, [block.up.weight for block in both.model.module.blocks])
    for step in range(1, 3):
        both.step(loss_on(rank, step))
    assert max(counts) == 1
