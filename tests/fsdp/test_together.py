"""Stage 3 where interrupts and steps meet its forward: it trains as torch alone."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adam

import ranks
import zero
from assertions import same
from runs import SideBySide, average_gradients
from transports import TRANSPORTS, by
from zoo import WIDTH, Block, Stack, batch, loss_on


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

    for step in range(3):
        found = both.model(batch(rank, step), trained(players[0], tuple))
        same(found, both.plain(batch(rank, step), trained(players[1], partial(average_gradients, both.plain))))
        same(zero.full_state_dict(both.model, to=None), {**both.plain.state_dict()})
