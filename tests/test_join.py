"""Different numbers of batches on different ranks: zero.join at every stage, beside one process that trains on the
batches that count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adam, Optimizer

import gpus
import ranks
import zero
from transports import TRANSPORTS, between_hosts, by
from zero.comm import Comm
from zero.comm.process_group import Gloo

WIDTH = 6
STAGES = [0, 1, 2, 3]
OPTIMIZERS: list[Callable[..., Optimizer]] = [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.01)]

at_every_stage = pytest.mark.parametrize("stage", STAGES)
over_each = pytest.mark.parametrize("transport", TRANSPORTS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net().to(gpus.DEVICE, torch.float64)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=gpus.generator(100 * rank + number), dtype=torch.float64)


def batches(rank: int, counts: Sequence[int]) -> list[Tensor]:
    return [batch(rank, number) for number in range(counts[rank])]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    return loss


def at(stage: int, optim: Callable[..., Optimizer] = OPTIMIZERS[0], **options: Any) -> tuple[nn.Module, Optimizer]:
    if stage == 3:
        model = zero.FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options)
        return model, optim(model.parameters())
    return zero.setup(net(), optim, stage=stage)


def reference(counts: Sequence[int], optim: Callable[..., Optimizer], micro: int = 1) -> dict[str, Tensor]:
    """One process that averages over the batches that count; micro: so many of each rank go into a step."""
    model = net()
    optimizer = optim(model.parameters())
    for number in range(max(counts)):
        counted = [rank for rank, count in enumerate(counts) if number < count]
        (sum(loss_of(model, batch(rank, number)) for rank in counted) / len(counted)).backward()
        if (number + 1) % micro == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train(model: nn.Module, optimizer: Optimizer, given: Any) -> None:
    for inputs, weight in given:
        optimizer.zero_grad()
        (weight * loss_of(model, inputs)).backward()
        optimizer.step()


def close(model: nn.Module, expected: dict[str, Tensor]) -> None:
    got = zero.full_state_dict(model)
    assert {*got} == {*expected}
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@over_each
@at_every_stage
@ranks.on(2)
def test_two_ranks_train_as_one_process_on_the_batches_that_count(rank, world, stage, transport):
    with by(transport):
        for counts in (3, 5), (4, 1), (3, 3):
            for optim in OPTIMIZERS:
                model, optimizer = at(stage, optim)
                train(model, optimizer, zero.join(batches(rank, counts), model))
                close(model, reference(counts, optim))


@over_each
@at_every_stage
@ranks.on(3)
def test_three_ranks_do_so(rank, world, stage, transport):
    with by(transport):
        for optim in OPTIMIZERS:
            model, optimizer = at(stage, optim)
            weights = []
            given = zero.join(batches(rank, (1, 2, 4)), model)
            train(model, optimizer, (pair for pair in given if not weights.append(pair[1])))
            close(model, reference((1, 2, 4), optim))
            assert weights == [1.0, *((0.0, 0.0, 0.0), (1.5, 0.0, 0.0), (1.5, 3.0, 3.0))[rank]]


@ranks.on(4)
def test_ranks_of_a_hybrid_strategy_are_counted_together(rank, world):
    model, optimizer = at(3, sharding_strategy="HYBRID_SHARD", device_mesh=init_device_mesh(gpus.DEVICE, (2, 2)))
    train(model, optimizer, zero.join(batches(rank, (2, 3, 5, 4)), model))
    close(model, reference((2, 3, 5, 4), OPTIMIZERS[0]))


@over_each
@at_every_stage
@ranks.on(2)
def test_equally_many_batches_train_to_the_bits_of_a_loop_without_it(rank, world, stage, transport):
    with by(transport):
        (joined, one), (plain, other) = at(stage), at(stage)
        train(joined, one, zero.join(batches(rank, (4, 4)), joined))
        train(plain, other, ((inputs, 1) for inputs in batches(rank, (4, 4))))
        expected = zero.full_state_dict(plain)
        assert all(torch.equal(value, expected[name]) for name, value in zero.full_state_dict(joined).items())


@over_each
@at_every_stage
@ranks.on(2)
def test_a_repeated_batch_that_is_not_finite_does_not_reach_the_others(rank, world, stage, transport):
    with by(transport):
        for bad in torch.nan, torch.inf:
            model, optimizer = at(stage)
            given = zero.join(batches(rank, (2, 4)), model)
            train(model, optimizer, ((inputs if weight else inputs * bad, weight) for inputs, weight in given))
            close(model, reference((2, 4), OPTIMIZERS[0]))


@pytest.mark.parametrize("how", ["no_sync", "each sent", "one backward"])
@at_every_stage
@ranks.on(2)
def test_gradients_of_several_batches_may_add_up_to_a_step(rank, world, stage, how):
    """Of the second step rank 0 has half, of the third nothing, and its repeated batches are not finite."""
    if how == "one backward" and stage == 0:
        how = "no_sync"
    model, optimizer = at(stage)
    losses = []
    for number, (inputs, weight) in enumerate(zero.join(batches(rank, (3, 6)), model)):
        sends = number % 2 == 1
        with nullcontext() if sends or how != "no_sync" else zero.no_sync(model):
            losses.append(weight * loss_of(model, inputs if weight or how == "one backward" else inputs * torch.nan))
            if sends or how != "one backward":
                sum(losses).backward()
                losses.clear()
        if sends:
            optimizer.step()
            optimizer.zero_grad()
    close(model, reference((3, 6), OPTIMIZERS[0], micro=2))


@pytest.mark.parametrize("world", [2, 3])
@ranks.on("world")
def test_one_number_is_summed_a_batch(rank, world):
    """And no other message is sent, even where ranks compare what they send."""
    compared, summed = mock.MagicMock(wraps=Gloo.compare), mock.MagicMock(wraps=Comm.all_reduce)
    with between_hosts(), mock.patch.object(Gloo, "compare", lambda *given, **how: compared(*given, **how)):
        model, _ = at(1)
        before = zero.traffic()
        compared.reset_mock()
        with mock.patch.object(Comm, "all_reduce", lambda *given, **how: summed(*given, **how)):
            for _ in zero.join(batches(rank, range(4, 4 + world)), model):
                pass
    sums = 4 + world  # of each batch, and one at the end
    assert [call.args[1].numel() for call in summed.call_args_list] == [1] * sums
    assert compared.call_count <= 1  # of the first
    assert (zero.traffic() - before).total == sums * (2 * 8 * (world - 1) // world)


@at_every_stage
@ranks.on(2)
def test_the_loop_may_be_left_on_all_ranks_together(rank, world, stage):
    model, optimizer = at(stage)
    for number, (inputs, weight) in enumerate(zero.join(batches(rank, (2, 9)), model)):
        optimizer.zero_grad()
        (weight * loss_of(model, inputs)).backward()
        optimizer.step()
        if number == 3:
            assert weight == (0.0, 2.0)[rank]
            break
    assert not any(param._backward_hooks for param in model.parameters()), "what changes gradients is still there"
    close(model, reference((2, 4), OPTIMIZERS[0]))
    train(model, optimizer, zero.join(batches(rank, (1, 2)), model))


@ranks.on(2)
def test_batches_are_taken_one_by_one(rank, world):
    taken = 0

    def source() -> Iterator[Tensor]:
        nonlocal taken
        for inputs in batches(rank, (2, 5)):
            taken += 1
            yield inputs

    given = zero.join(source(), at(2)[0])
    assert taken == 0
    for number, (inputs, weight) in enumerate(given):
        last = min(number, (1, 4)[rank])
        assert taken == last + 1
        assert torch.equal(inputs, batch(rank, last))
        assert (weight > 0) == (number == last)
    assert number == 4


@at_every_stage
@ranks.raises(3, ValueError, r"no batch on rank 0, 2 of 3\b", "one batch at least")
def test_a_rank_without_any_batch_is_refused_on_every_rank(rank, world, stage):
    model, optimizer = at(stage)
    train(model, optimizer, zero.join(batches(rank, (0, 3, 0)), model))


def test_without_other_ranks_it_is_the_plain_loop():
    model = net()
    optimizer = OPTIMIZERS[0](model.parameters())
    train(model, optimizer, zero.join(batches(0, [3]), model))
    close(model, reference([3], OPTIMIZERS[0]))
    with pytest.raises(ValueError, match="no batch on rank 0 of 1"):
        next(zero.join([], model))
