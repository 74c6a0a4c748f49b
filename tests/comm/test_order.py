"""When ranks compare what they do between hosts, and what they are told when they are out of step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch

import ranks
import zero
from ranks import refusal
from stacks import WIDTH, Stack
from transports import between_hosts
from zero.comm import Comm
from zero.comm.order import Order
from zero.comm.process_group import Gloo, ProcessGroupTransport


@contextmanager
def counted() -> Iterator[list[int]]:
    """The comparisons between ranks, by channel."""
    seen: list[int] = []
    compare = ProcessGroupTransport.compare

    def counting(self: ProcessGroupTransport, channel: int, *, flags: int = 0) -> int:
        seen.append(channel)
        return compare(self, channel, flags=flags)

    with mock.patch.object(ProcessGroupTransport, "compare", counting):
        yield seen


class Steps:
    """Gathers of some lengths one after another, and an agreement at the end of each step."""

    def __init__(self) -> None:
        self.comm = Comm()
        self._end = self.comm.channel("the end of a step")
        self._gathers = [self.comm.channel(f"gather {number}") for number in range(4)]

    def gather(self, number: int, length: int = 5) -> None:
        world = self.comm.world
        full = torch.full((world * length,), float(self.comm.rank))
        self.comm.gather(full, range(0, world * length + 1, length), self._gathers[number]).wait()
        assert full.view(world, length)[:, 0].tolist() == [*range(world)]

    def step(self, *numbers: int) -> None:
        for number in numbers:
            self.gather(number)
        self.comm.agree(self._end)


def comparisons_of_each_step(rank: int, world: int) -> list[int]:
    with between_hosts(), counted() as seen:
        steps = Steps()
        found = []
        for numbers in [(0, 1, 2), (0, 1, 2), (0, 2, 1), (0, 2, 1), (0, 1, 2)]:
            seen.clear()
            steps.step(*numbers)
            found.append(len(seen))
    return found


def test_operations_are_compared_one_by_one_only_where_the_schedule_is_new():
    assert ranks.run(comparisons_of_each_step, 2) == [[4, 1, 3, 1, 1]] * 2


@pytest.mark.parametrize(("together", "of_the_first_operation"), [(False, 0), (True, 3)])
@ranks.on(2)
def test_schedules_settle_without_agreements_too(rank, world, together, of_the_first_operation):
    """If ranks begin them together, one that begins another schedule alone must not send it into others' backward.

    As of an evaluation, which has forwards alone.
    """
    with between_hosts(), counted() as seen:
        steps = Steps()
        for _ in range(4):
            steps.comm.begin_schedule(together=together)
            steps.gather(0)
            steps.gather(1)
    assert len(seen) == 2 + of_the_first_operation


def test_each_operation_is_compared_where_the_environment_says_so():
    assert ranks.run(with_check, 2, args=("each",)) == [[4, 4, 4, 4, 4]] * 2


def with_check(rank: int, world: int, how: str) -> list[int]:
    with mock.patch.dict(os.environ, ZERO_CHECK=how):
        return comparisons_of_each_step(rank, world)


@ranks.on(2)
def test_what_the_environment_must_not_say_is_refused(rank, world):
    with mock.patch.dict(os.environ, ZERO_CHECK="always"):
        told = refusal(Comm)
    assert "ZERO_CHECK='always'" in told


# ----------------------------------------------------------------------------------- Out of step in a settled schedule


def settled() -> Steps:
    """Two schedules that ranks have seen together."""
    steps = Steps()
    for numbers in [(0, 1, 2), (0, 2, 1)] * 2:
        steps.step(*numbers)
    return steps


@ranks.on(3, timeout=20)
def test_the_log_tells_of_another_order_where_nothing_else_does(rank, world):
    """Transfers of one size arrive, one in the place of another."""
    with between_hosts():
        steps = settled()
        told = refusal(lambda: steps.step(*((0, 1, 2) if rank else (0, 2, 1))))
        first, second = told, refusal(lambda: steps.step(0, 1, 2))
    assert "out of step: rank 0 is in gather 2, but rank 1 in gather 1, rank 2 in gather 1" in first
    assert "nitialise the process group again" in second


@ranks.on(3, timeout=20)
def test_ranks_that_wait_for_one_another_in_vain_are_told_which_is_where(rank, world):
    """The timeout of the group, half an hour, is not waited for."""
    with between_hosts():
        steps = settled()
        told = refusal(lambda: steps.step(*((0, 1) if rank == 1 else (0, 1, 2))))
    assert "RuntimeError" in told
    ours, theirs = r"rank [02] (is )?in gather 2", "rank 1 (is )?in the end of a step"
    assert re.search(f"({ours}, but {theirs}|{theirs}, but {ours})", told), told


def one_fails(rank: int, world: int) -> str:
    """One rank has failed, but its process and connections live on."""
    with between_hosts():
        steps = settled()
        if rank == 1:
            with mock.patch.object(Gloo, "_broadcast", side_effect=RuntimeError("cut off")):
                return refusal(lambda: steps.step(0, 1, 2))
        return refusal(lambda: steps.step(0, 1, 2))


def test_ranks_that_wait_are_told_that_another_has_failed():
    for told in ranks.run(one_fails, 3, timeout=20):
        assert "rank 1 failed in gather 0" in told
        assert "cut off" in told


def never_comes(rank: int, world: int) -> str:
    with between_hosts():
        group = torch.distributed.new_group([0, 1, 2], timeout=timedelta(seconds=2))
        comm = Comm(group)
        end = comm.channel("the end of a step")
        comm.agree(end)
        return "" if rank == 2 else refusal(lambda: comm.agree(end))


def test_a_rank_that_never_comes_is_named_after_the_timeout():
    for told in ranks.run(never_comes, 3, timeout=30)[:2]:
        assert "failed in the end of a step" in told
        assert "rank 2 of the group of 3 has not reached the next operation" in told


class CompleteJustAfterwards:
    """A transfer that is there when the time to wait for it has just passed."""

    def wait(self, *timeout: timedelta) -> None:
        if timeout:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return True


def test_a_transfer_that_is_complete_just_after_the_time_is_up_has_arrived():
    ProcessGroupTransport._await(mock.Mock(), [CompleteJustAfterwards()])  # type: ignore[arg-type]


def test_logs_are_compared_where_both_have_entries():
    order = Order(0, 2)
    names = [order.channel(name) for name in ("a", "b", "c")]
    a, b, c = names
    assert order.difference({0: (2, [a, b]), 1: (3, [a, b, c])}) == {}
    assert order.difference({0: (3, [b, c]), 1: (2, [a, c])}) == {0: b, 1: c}


def test_a_remedy_is_told_where_all_operations_out_of_step_have_it():
    order = Order(0, 2)
    first, second = order.channel("expert 1", "Do this."), order.channel("expert 2", "Do this.")
    other, another = order.channel("expert 3", "Do that."), order.channel("a step")
    step = "Each of these is collective: call it on every rank, in the same order."
    batches = f"{step} With fewer batches on one rank than on others take them from zero.join."
    for channels, end in [
        ((first, second), f"{step} Do this."),
        ((first, other), batches),
        ((first, another), batches),
        ((another, first), batches),
    ]:
        text = refusal(lambda here=channels[0], there=channels[1]: order.refuse_differing(here, {0: here, 1: there}))
        assert text.endswith(end), text
        order.broken = None
    assert "moved different numbers of bytes. Each of these" in refusal(lambda: order.out_of_step({}))


# --------------------------------------------------------------------------------------------------------- Whole steps


@pytest.mark.parametrize(("stage", "most"), [(1, 1), (2, 2), (3, 2)])
@ranks.on(2)
def test_a_settled_step_has_few_comparisons_whatever_the_number_of_units(rank, world, stage, most):
    """What waits for all ranks without bringing anything: comparisons, and sums of a few numbers."""
    found = []
    with between_hosts(), counted() as seen:
        sums = mock.patch.object(Comm, "all_reduce", autospec=True, side_effect=Comm.all_reduce)
        model, optimizer = zero.setup(Stack(blocks=6), torch.optim.Adam, stage=stage, lr=0.01)
        for step in range(3):
            seen.clear()
            optimizer.zero_grad()
            with sums as summed:
                model(torch.full((2, WIDTH), float(rank + step))).square().mean().backward()
                optimizer.step()
            found.append(len(seen) + summed.call_count)
    first, *settled_ones = found
    assert settled_ones == [most, most]
    assert first > most
