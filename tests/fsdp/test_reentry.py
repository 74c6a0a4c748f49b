"""Forward or backward is interrupted, comes to a unit again, or steps: no gradient is lost, none that was cleared comes
back, and what is saved and trained is as by torch alone."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adam

import gpus
import matrix
import ranks
import zero
from assertions import plain, same
from odd import AT, STAGE_3
from runs import SideBySide, average_gradients, side_by_side
from transports import TRANSPORTS, by
from zoo import WIDTH, Block, Stack, batch, loss_on


class Stop(nn.Module):
    """Hands its input on, until it is told to fail: by an error, or "in backward"."""

    how: type[BaseException] | str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.how, type):
            raise self.how("as told")
        if self.how:
            x = x.clone()
            x.register_hook(self.fail)
        return x

    def fail(self, _: Tensor) -> None:
        raise KeyError("as told")


class Stopping(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = nn.Sequential(self.blocks[1].up, Stop())

    def failing(self, how: type[BaseException] | str, call: Any) -> Any:
        """What `call` returns while a stop fails."""
        stop = self.blocks[1].up[1]
        stop.how = how
        try:
            return call()
        finally:
            stop.how = None


@ranks.on(2, timeout=20)
def test_gradients_from_before_an_exception_are_there_after_it(rank, world):
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


@pytest.mark.matrix
@pytest.mark.parametrize("at", STAGE_3 if matrix.WHOLE else STAGE_3[::2])
@ranks.on(2, timeout=20)
def test_a_graph_after_one_whose_backward_failed_has_its_numbers(rank, world, at):
    both = SideBySide(Stopping(), AT[at])
    for step in range(2):
        both.zero_grad()
        graphs = {model: loss_on(rank, 2 * step)(model) for model in (both.model, both.plain)}
        failing = both.model.failing("in backward", lambda: loss_on(rank, 1)(both.model))
        with pytest.raises(KeyError):
            failing.backward()
        both.step(lambda model, graphs=graphs: graphs[model])


@ranks.on(2, timeout=20)
def test_a_step_may_follow_a_forward_that_was_interrupted(rank, world):
    """The second forward is one that is searched for reads."""
    both = side_by_side(Stopping(), {})
    both.backward(loss_on(rank, 0))
    with pytest.raises(KeyboardInterrupt):
        both.model.failing(KeyboardInterrupt, lambda: both.model(batch(rank, 1)))
    with mock.patch.object(both, "compare"):  # full weights are refused until the next forward
        both.update()
    both.step(loss_on(rank, 2))


def penalised(rank: int, step: int) -> Callable[[nn.Module], Tensor]:

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


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, KeyError])
@ranks.on(2)
def test_saving_works_after_what_has_ended_a_forward(rank, world, error, options, transport, tmp_path):
    with by(transport):
        both = side_by_side(Stopping(), options)
        both.step(loss_on(rank, 0))
        for trains in (True, False):
            with pytest.raises(error), torch.set_grad_enabled(trains):
                both.model.failing(error, lambda: both.model(batch(rank, 1)))
            same(zero.full_state_dict(both.model, to=None), {**both.plain.state_dict()})
            zero.full_optimizer_state_dict(both.model, both.optimizer, to=None)
            zero.checkpoint.save(tmp_path, both.model, both.optimizer)
        both.step(loss_on(rank, 2))


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
    both = side_by_side(Trains(), {"auto_wrap_policy": ModuleWrapPolicy({Block}), "partition": partition})
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
