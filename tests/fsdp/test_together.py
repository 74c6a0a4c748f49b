"""Stage 3 where users' hooks, kept objects, interrupts and steps meet it: each trains as torch alone, or raises on
every rank."""

import tempfile
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adam

import ranks
import zero
from assertions import same
from runs import SideBySide, loss_on
from transports import TRANSPORTS, by
from zoo import WIDTH, Block, Stack, batch


class Stopped(Stack):
    """Stops in its forward where it is told to."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) if number else block(self.first(x))
            if number == 1 and self.error is not None:
                raise self.error
        return self.last(x)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, KeyError])
@ranks.on(2)
def test_saving_works_after_what_has_ended_a_forward(rank, world, error, options, transport, tmp_path):
    with by(transport):
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
            zero.checkpoint.save(tmp_path, both.model, both.optimizer)
        both.step(loss_on(rank, 2))


def zero_fsdp(model, optim, **options):
    wrapped = zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    return wrapped, optim(wrapped.parameters())


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
