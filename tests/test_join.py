"""Different numbers of batches on different ranks: zero.join at every stage, beside one process that trains on the
batches that count."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import matrix
import ranks
import zero
from assertions import close
from ranks import refusal
from runs import sgd, take_step
from transports import TRANSPORTS, between_hosts, by
from zoo import Stack, batch

STAGES = [0, 1, 2, 3]


def batches(rank: int, counts: Sequence[int]) -> list[Tensor]:
    return [batch(rank, number) for number in range(counts[rank])]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def reference(counts: Sequence[int], micro: int = 1) -> dict[str, Tensor]:
    """One process that averages over the batches that count; micro: so many of each rank go into a step."""
    model = Stack()
    optimizer = sgd(model.parameters())
    for number in range(max(counts)):
        counted = [rank for rank, count in enumerate(counts) if number < count]
        (sum(loss_of(model, batch(rank, number)) for rank in counted) / len(counted)).backward()
        if (number + 1) % micro == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train(model: nn.Module, optimizer: Optimizer, given: Any) -> list[float]:
    """The weights of the batches."""
    weights = []
    for inputs, weight in given:
        take_step(optimizer, weight * loss_of(model, inputs))
        weights.append(weight)
    return weights


def assert_trained(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = zero.full_state_dict(model, to=None)
    assert {*found} == {*expected}
    assert [name for name, value in expected.items() if not close(found[name], value, 1e-5)] == []


COUNTS = {  # the weights of each rank's batches, and by what those are multiplied that are repeated
    (4, 1): ([[1, 2, 2, 2], [1, 0, 0, 0]], torch.nan),
    (1, 2, 4): ([[1, 0, 0, 0], [1, 1.5, 0, 0], [1, 1.5, 3, 3]], 1.0),
}


def trained(rank: int, world: int, counts: Sequence[int], stage: int, transport: str) -> list[float]:
    with by(transport):
        model, optimizer = zero.setup(Stack(), sgd, stage=stage)
        given = zero.join(batches(rank, counts), model)
        bad = COUNTS[counts][1]
        weights = train(model, optimizer, ((inputs if weight else inputs * bad, weight) for inputs, weight in given))
        assert_trained(model, reference(counts))
    return weights


@matrix.combined("stage, counts, transport", STAGES, COUNTS, TRANSPORTS)
def test_ranks_train_as_one_process_on_the_batches_that_count(stage, counts, transport):
    """Repeated batches that are not finite do not reach the others."""
    assert ranks.run(trained, len(counts), (counts, stage, transport)) == COUNTS[counts][0]


@matrix.combined("how, stage", ["no_sync", "each sent", "one backward"], STAGES, each=2)
@ranks.on(2)
def test_gradients_of_several_batches_may_add_up_to_a_step(rank, world, how, stage):
    """Of the second step rank 0 has half, of the third nothing, and its repeated batches are not finite."""
    how = "no_sync" if stage == 0 and how == "one backward" else how
    model, optimizer = zero.setup(Stack(), sgd, stage=stage)
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
    assert_trained(model, reference((3, 6), micro=2))


@ranks.on(3)
def test_one_number_is_summed_a_batch(rank, world):
    """And one at the end."""
    with between_hosts():
        model, _ = zero.setup(Stack(), sgd, stage=1)
        before = zero.traffic()
        for _ in zero.join(batches(rank, (4, 5, 6)), model):
            pass
    assert (zero.traffic() - before).total == 7 * (2 * 8 * 2 // 3)


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_the_loop_may_be_left_on_all_ranks_together(rank, world, stage):
    model, optimizer = zero.setup(Stack(), sgd, stage=stage)
    hooks = [len(param._backward_hooks or ()) for param in model.parameters()]
    for number, (inputs, weight) in enumerate(zero.join(batches(rank, (2, 9)), model)):
        take_step(optimizer, weight * loss_of(model, inputs))
        if number == 3:
            assert weight == (0.0, 2.0)[rank]
            break
    left = [len(param._backward_hooks or ()) for param in model.parameters()]
    assert left == hooks, "what changes gradients is still there"
    assert_trained(model, reference((2, 4)))
    train(model, optimizer, zero.join(batches(rank, (1, 2)), model))


@ranks.on(2)
def test_batches_are_taken_one_by_one(rank, world):
    taken = 0

    def source() -> Iterator[Tensor]:
        nonlocal taken
        for inputs in batches(rank, (2, 5)):
            taken += 1
            yield inputs

    given = zero.join(source(), zero.setup(Stack(), sgd, stage=2)[0])
    assert taken == 0
    for number, (inputs, weight) in enumerate(given):
        last = min(number, (1, 4)[rank])
        assert (taken, weight > 0) == (last + 1, number == last)
        assert torch.equal(inputs, batch(rank, last))
    assert number == 4


@ranks.raises(3, ValueError, r"no batch on rank 0, 2 of 3\b", "one batch at least")
def test_a_rank_without_any_batch_is_refused_on_every_rank(rank, world):
    model, optimizer = zero.setup(Stack(), sgd, stage=2)
    train(model, optimizer, zero.join(batches(rank, (0, 3, 0)), model))


def test_without_other_ranks_it_is_the_plain_loop():
    model = Stack()
    train(model, sgd(model.parameters()), zero.join(batches(0, [3]), model))
    assert_trained(model, reference([3]))
    assert "no batch on rank 0 of 1" in refusal(lambda: next(zero.join([], model)))
