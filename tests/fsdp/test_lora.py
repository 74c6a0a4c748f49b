"""Frozen parameters beside trained ones in a unit: adapters, and freezing and unfreezing between steps."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import zero
from assertions import plain
from runs import SideBySide, sgd, side_by_side, stage_3
from zoo import WIDTH, Adapted, Stack, loss_on


def net() -> Stack:
    model = Stack(classes=5).requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(WIDTH, 2 * WIDTH)
    model.last.requires_grad_(True)
    return model


@ranks.on(2)
def test_unfrozen_parameters_are_added_to_the_optimizer(rank, world):
    """By add_param_group, with hyperparameters of their own."""

    def trained(params: Any) -> Any:
        return sgd([param for param in params if param.requires_grad])

    both = SideBySide(net(), stage_3, trained)
    for step in range(2):
        if step == 1:
            for inner, optimizer in zip(both.each(), (both.optimizer, both.plain_optimizer), strict=True):
                params = [*inner.blocks[1].down.requires_grad_(True).parameters()]
                optimizer.add_param_group({"params": params, "lr": 0.01, "weight_decay": 0.2})
        both.step(loss_on(rank, step))


def between(rank: int, world: int, thaw: bool) -> None:
    """Frozen or unfrozen after a backward under no_sync, before the one that sends what it left."""
    both = side_by_side(net(), {})
    both.step(loss_on(rank, 0))
    both.zero_grad()
    both.backward(loss_on(rank, 1), sync=False)
    for inner in both.each():
        (inner.blocks[1].down if thaw else inner.blocks[1].up).requires_grad_(thaw)
    both.backward(loss_on(rank, 2))
    both.update()
    both.step(loss_on(rank, 3))


def test_between_backwards_of_a_step_parameters_may_be_unfrozen_and_frozen_ones_are_not_stepped():
    ranks.run(between, args=(True,))
    words = [r"'blocks\.1\.up\.[\w.]+' has a gradient that was not reduced", "no_sync"]
    ranks.expect_error(between, 2, RuntimeError, *words, args=(False,), timeout=15)


@ranks.on(2)
def test_frozen_parameters_take_no_memory_for_gradients(rank, world):
    model = zero.FSDP(net())
    loss_on(rank, 0)(model).backward()
    trained = sum(plain(param).nbytes for param in model.parameters() if param.requires_grad)
    storages = {param.grad.untyped_storage() for param in model.parameters() if param.grad is not None}
    held = sum(one.nbytes() for one in storages)
    assert trained <= held <= trained + 4 * 4 * 16  # the usage counts, a unit


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["the root's", "a block's"])
@ranks.on(2)
def test_what_the_loss_alone_reads_after_forward_may_be_unfrozen(rank, world, options):
    """Of what stays unsharded until backward."""

    def reader(model: nn.Module) -> Any:
        return model.blocks[1] if options else model

    model = net()
    reader(model).gain = nn.Parameter(torch.linspace(0, 1, 5), requires_grad=False)
    both = side_by_side(model, options)

    def loss(model: nn.Module, step: int) -> Tensor:
        return loss_on(rank, step)(model) * reader(model).gain.exp().mean()

    for step in range(3):
        if step == 1:
            for inner in both.each():
                reader(inner).gain.requires_grad_(True)
        both.step(partial(loss, step=step))
