"""Stage 3 where users' hooks, kept objects, interrupts and steps meet it: each trains as torch alone, or raises on
every rank."""

from __future__ import annotations

import gc
import tempfile
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ranks
import zero
from assertions import same
from runs import SideBySide, loss_on, side_by_side
from transports import TRANSPORTS, calling
from zoo import WIDTH, Block, Stack, batch

KEPT = {"reshard_after_forward": False}


# ------------------------------------------------------------------------------------ a forward that is interrupted


class Stopped(Stack):
    """Stops in its forward where it is told to."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) if number else block(self.first(x))
            if number == 1 and self.error is not None:
                raise self.error
        return self.last(x)


@pytest.mark.parametrize("options", [{}, KEPT], ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, KeyError])
def test_saving_works_after_what_has_ended_a_forward(error, options, tmp_path):
    for transport in TRANSPORTS:
        args = (transport, stopped_and_saved, error, options, str(tmp_path / transport.replace(" ", "_")))
        ranks.run(calling, 2, args=args)


def stopped_and_saved(rank, world, error, options, path):
    both = SideBySide(Stopped(), partial(zero_fsdp, **options))
    both.step(loss_on(rank, 0))
    inner = both.model.module
    for trains in (True, False):
        inner.error = error("as told")
        with pytest.raises(error), torch.set_grad_enabled(trains):
            both.model(batch(rank, 1))
        inner.error = None
        same(zero.full_state_dict(both.model, to=None), {**both.plain.state_dict()})
        zero.full_optimizer_state_dict(both.model, both.optimizer, to=None)
        zero.checkpoint.save(path, both.model, both.optimizer)
    both.step(loss_on(rank, 2))


def zero_fsdp(model, optim, **options):
    wrapped = zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    return wrapped, optim(wrapped.parameters())


# ----------------------------------------------------------------------------------- gradients and steps within forward


class Forces(nn.Module):
    """Takes a gradient through a child unit within its forward, and then uses a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Block(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.after = Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(self.energy(inner).square().sum(), inner)
        return self.after(self.mix(torch.cat([self.energy(x), forces], dim=-1)))


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("options", [{}, KEPT], ids=str)
@ranks.on(2)
def test_a_layer_of_the_root_runs_after_a_gradient_within_forward(rank, world, options, partition):
    both = SideBySide(Forces(), partial(zero_fsdp, partition=partition, **options))
    for step in range(3):
        both.step(loss_on(rank, step))


class Trains(nn.Module):
    """Two players, one of whose layers lie in the root unit; its forward trains them in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block = Block(WIDTH)

    def forward(self, x: Tensor, train) -> list[Tensor]:
        losses = [train(0, self.block(self.one(x)).square().mean())]
        return [*losses, train(1, (self.two(self.one(x)) - x).square().mean())]


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_a_model_steps_within_its_forward_and_runs_on(rank, world, partition):
    both = SideBySide(Trains(), partial(zero_fsdp, partition=partition))
    players = [
        [SGD([*model.one.parameters(), *model.block.parameters()], lr=0.05), Adam(model.two.parameters(), lr=0.01)]
        for model in (both.model.module, both.plain)
    ]

    def trained(optimizers, average):
        def train(number, loss):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            average()
            optimizers[number].step()
            return loss.detach()

        return train

    def average():
        for param in both.plain.parameters():
            if param.grad is not None:
                torch.distributed.all_reduce(param.grad)
                param.grad /= world

    for step in range(3):
        found = both.model(batch(rank, step), trained(players[0], lambda: None))
        same(found, both.plain(batch(rank, step), trained(players[1], average)))
        same(zero.full_state_dict(both.model, to=None), {**both.plain.state_dict()})


# ------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("collects", [True, False], ids=["gc", "no gc"])
@pytest.mark.parametrize("who", ["rank 0", "all"])
@pytest.mark.parametrize("how", ["output", "cycle", "parts"])
@ranks.on(2)
def test_what_is_kept_of_forwards_without_backward_changes_nothing(rank, world, how, who, collects):
    both = SideBySide(Stack(), zero_fsdp)
    kept = []
    gc.disable()
    try:
        for step in range(3):
            output = both.model(batch(rank, 7 + step))  # nobody calls its backward
            if how == "parts":
                both.model.module.blocks[0].register_forward_hook(lambda _, __, out: kept.append(out[:1]))
            elif how == "cycle":
                cycle = [output]
                cycle.append(cycle)
                del cycle
            elif who == "all" or rank == 0:
                kept.append(output)
            del output
            if collects and rank == 0:
                gc.collect()
            both.step(loss_on(rank, step))
    finally:
        gc.enable()


@ranks.on(2)
def test_a_loss_over_two_forwards_is_reduced_once_whatever_was_kept_before(rank, world):
    """The same bits: the gradients of both calls are added before they are averaged."""
    both = SideBySide(Stack(), zero_fsdp)
    kept = [both.model(batch(rank, 9))]
    if rank:
        kept.clear()
    for step in range(3):
        both.step(lambda model: loss_on(rank, step)(model) + loss_on(rank, 10 + step)(model))  # noqa: B023
    assert len(kept) == (rank == 0)


# ------------------------------------------------------------------------------------------------- hooks of steps


def clips(optimizer, *_):
    clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1e-3)


@pytest.mark.parametrize("registers", ["before a step", "after a step", "for all"])
@ranks.on(2)
def test_torch_clips_in_a_hook_before_the_step(rank, world, registers):
    both = SideBySide(Stack(), zero_fsdp, partial(SGD, lr=0.1), tolerance=1e-6)
    optimizers = both.optimizer, both.plain_optimizer
    if registers == "after a step":
        both.step(loss_on(rank, 0))
    handles = (
        [register_optimizer_step_pre_hook(clips)]
        if registers == "for all"
        else [optimizer.register_step_pre_hook(clips) for optimizer in optimizers]
    )
    try:
        for step in range(1, 3):
            both.step(loss_on(rank, step))
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("offload", ["device", "disk", "cpu"])
@ranks.on(2)
def test_what_hooks_around_a_step_write_counts_and_they_may_be_removed(rank, world, offload):
    where = {"device": None, "disk": zero.DiskOffload(tempfile.mkdtemp()), "cpu": zero.CPUOffload()}[offload]
    both = SideBySide(Stack(), partial(zero_fsdp, offload=where), partial(Adam, lr=0.01))
    seen = []

    @torch.no_grad()
    def halve(optimizer, *_):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)

    @torch.no_grad()
    def shrink(optimizer, *_):
        for group in optimizer.param_groups:
            for param in group["params"]:
                seen.append(param.grad is None)
                param.mul_(0.9)

    both.step(loss_on(rank, 0))
    hooks = [
        register(hook)
        for optimizer in (both.optimizer, both.plain_optimizer)
        for register, hook in ((optimizer.register_step_pre_hook, halve), (optimizer.register_step_post_hook, shrink))
    ]
    for step in range(2):
        both.step(loss_on(rank, 1 + step))
    for hook in hooks:
        hook.remove()
    both.step(loss_on(rank, 5))
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("offload", ["device", "disk"])
@ranks.on(2)
def test_gradients_that_a_hook_clears_are_not_stepped(rank, world, offload):
    where = {"device": None, "disk": zero.DiskOffload(tempfile.mkdtemp())}[offload]
    both = SideBySide(Stack(), partial(zero_fsdp, offload=where), partial(Adam, lr=0.01))
    for optimizer in (both.optimizer, both.plain_optimizer):
        optimizer.register_step_pre_hook(lambda one, *_: one.zero_grad())
    both.step(loss_on(rank, 0))


# ---------------------------------------------------------------------------------------------------- 16 bits, layouts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@ranks.on(2)
def test_gradients_may_be_scaled_alike_in_any_dtype(rank, world, dtype):
    both = SideBySide(Stack().to(dtype), zero_fsdp, tolerance=2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 0)
    for step in range(2):
        both.zero_grad()
        both.backward(lambda model: model(batch(rank, step).to(dtype)).float().square().mean())  # noqa: B023
        for param in both.model.parameters():
            param.grad.mul_(1 / 3)
        for param in both.averages:
            both.averages[param] = both.averages[param] * (1 / 3)
        both.update()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).mean((2, 3)))


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_a_first_weight_in_channels_last_trains_in_float16(rank, world, partition):
    torch.manual_seed(0)
    model = zero.FSDP(Convolutions(), partition=partition)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = zero.full_state_dict(model, to=None)
    for step in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.full((2, 3, 5, 5), 1e6 if step == 1 and rank else 0.5)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = zero.full_state_dict(model, to=None)
        changed = not torch.equal(after["first.weight"], before["first.weight"])
        assert changed == (step != 1)  # an overflow on one rank skips the step on all
        before = after


# ------------------------------------------------------------------------------------------------------ frozen


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parameter_that_one_rank_alone_freezes_is_refused(when):
    for transport in TRANSPORTS:
        args = (transport, frozen_on_one, when)
        ranks.expect_error(calling, 2, RuntimeError, "trained", args=args)


def frozen_on_one(rank, world, when):
    both = side_by_side(Stack(), {})
    both.step(loss_on(rank, 0))
    both.model.module.first.weight.requires_grad_(rank == 0)
    for step in range(2):
        both.model(batch(rank, step)).square().mean().backward()
        both.optimizer.step()


@ranks.on(2)
def test_what_is_frozen_and_unfrozen_on_every_rank_trains(rank, world):
    both = side_by_side(Stack(), {})
    for step in range(4):
        for model in both.each():
            model.first.requires_grad_(step % 2 == 0)
        both.step(loss_on(rank, step))


@ranks.on(2)
def test_what_a_step_that_raises_hid_is_there_again(rank, world):
    both = SideBySide(Stack(), zero_fsdp)
    both.step(loss_on(rank, 0))
    both.zero_grad()
    both.backward(loss_on(rank, 1))
    failing = torch.optim.Optimizer.profile_hook_step(mock.Mock(side_effect=KeyError("in a step"), __name__="step"))
    with mock.patch.object(SGD, "step", failing), pytest.raises(KeyError):
        both.optimizer.step()
    both.backward(loss_on(rank, 2))  # adds to what there was
    both.update()
