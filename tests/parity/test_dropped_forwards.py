"""Forwards with gradients that no backward follows: the step has the numbers of stage 0, and at stage 3 the peak of a
step without such a forward."""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial

import pytest
from torch import Tensor, nn

import ranks
from loops import WIDTH, Block, Loop, Rows, momentum
from transports import TRANSPORTS, by
from zero.plan.meter import Meter

INNER, BLOCKS = 48, 6

row = Rows("B6: a dropped forward leaves no unit open")


class Wide(Block):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up, self.down = nn.Linear(INNER, 4 * INNER), nn.Linear(4 * INNER, INNER)


class Deep(nn.Module):
    """Six units of the same size in a small root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, INNER), nn.Linear(INNER, 3)
        self.blocks = nn.ModuleList(Wide() for _ in range(BLOCKS))

    def forward(self, x: Tensor, breaks: bool = False) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if breaks and number == BLOCKS // 2:
                raise KeyError("a bad batch")
        return self.last(x)


def step(t: Loop, i: int) -> None:
    t.loss(i).backward()
    t.o.step()
    t.o.zero_grad()


def drops(t: Loop) -> bool:
    return getattr(t.kept, "drops", True)


rows = partial(row, net=Deep, optim=momentum)

OPEN = []
"""The programs of which units still stay open."""


def leaves_units_open(program):
    OPEN.append(program)
    return program


@leaves_units_open
@rows()
def a_validation_without_no_grad(t, i):
    if drops(t):
        t.loss(10 + i)
    step(t, i)


@leaves_units_open
@rows()
def a_validation_in_evaluation_mode_without_no_grad(t, i):
    if drops(t):
        t.m.eval()
        t.loss(10 + i)
        t.m.train()
    step(t, i)


@leaves_units_open
@rows()
def two_forwards_are_dropped(t, i):
    for k in range(2 if drops(t) else 0):
        t.loss(10 + i + k)
    step(t, i)


@leaves_units_open
@rows()
def a_loss_that_is_not_finite_is_skipped(t, i):
    if drops(t):
        loss = t.loss(10 + i) * float("nan")
        assert not loss.isfinite()
        del loss
    step(t, i)


@leaves_units_open
@rows()
def the_score_of_a_second_batch_is_only_logged(t, i):
    if drops(t):
        t.note(t.loss(10 + i).detach())
    step(t, i)


@rows()
def a_second_forward_is_dropped_between_forward_and_backward(t, i):
    loss = t.loss(i)
    if drops(t):
        t.loss(10 + i)
    loss.backward()
    t.o.step()
    t.o.zero_grad()


@leaves_units_open
@rows()
def forwards_are_dropped_in_an_accumulation(t, i):
    with t.m.no_sync():
        t.loss(20 + i).backward()
        if drops(t):
            t.loss(10 + i)
    step(t, i)


@leaves_units_open
@rows()
def a_forward_under_no_sync_is_dropped(t, i):
    if drops(t):
        with t.m.no_sync():
            t.loss(10 + i)
    step(t, i)


@leaves_units_open
@rows()
def a_forward_breaks_off(t, i):
    if drops(t):
        with suppress(KeyError):
            t.loss(10 + i, breaks=True)
    step(t, i)


@leaves_units_open
@rows()
def a_dead_graph_is_freed_by_the_collector(t, i):
    if drops(t):
        cycle = [t.loss(10 + i)]
        cycle.append(cycle)
        del cycle
        gc.collect()
    step(t, i)


@rows()
def a_loss_is_kept_for_one_step(t, i):
    t.kept.losses = [t.loss(10 + i)] if drops(t) and i % 2 else []
    step(t, i)


@leaves_units_open
@rows()
def a_forward_is_dropped_after_the_backward(t, i):
    t.loss(i).backward()
    if drops(t):
        t.loss(10 + i)
    t.o.step()
    t.o.zero_grad()


test_rows = row.tests()


def keeping(t, i):
    vars(t.kept).setdefault("loss", t.loss(10))
    step(t, i)


def peak(t, program, drops):
    """Of a settled step, in bytes; the least of several, as a thread of Gloo may drop its buffer a moment late."""
    t.kept.drops, peaks = drops, []
    with Meter() as meter:
        for i in range(7):
            meter.reset_peak()
            program(t, i)
            t.seen.clear()
            peaks.append(meter.peak())
    return min(peaks[3:])


def peaks_of(rank, world, programs, transport):
    """By program and whether it drops forwards, each with a model of its own."""
    with by(transport):
        return [peak(Loop(row.rows[0], 3, rank, "."), program, drops) for program, drops in programs]


def in_units(nbytes):
    return nbytes / sum(param.nbytes for param in Wide().parameters())


CASES = [
    pytest.param(each.program, marks=[pytest.mark.xfail(strict=True, reason=row.kind)] if each.program in OPEN else [])
    for each in row.rows
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("program", CASES)
def test_the_peak_is_that_of_a_step_that_drops_nothing(program, transport):
    for without, found in ranks.run(peaks_of, 2, args=([(program, False), (program, True)], transport)):
        assert in_units(found - without) < 0.1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_loss_that_is_kept_costs_full_parameters_and_gradients_at_most(transport):
    for without, found in ranks.run(peaks_of, 2, args=([(step, False), (keeping, False)], transport)):
        assert in_units(found - without) <= 2 * BLOCKS
