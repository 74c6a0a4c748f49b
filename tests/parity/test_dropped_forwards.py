"""Forwards with gradients that no backward follows: the step has the numbers of stage 0, and at stage 3 the peak of a
step without such a forward."""

import gc
import math
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import gpus
import matrix
import ranks
from inner import Meter
from rows import Loop, Rows, momentum
from transports import TRANSPORTS, by
from zoo import WIDTH, Block

INNER, BLOCKS = 48, 4

row = Rows("B6: a dropped forward leaves no unit open", __name__)


class Deep(nn.Module):
    """Units of the same size in a small root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, INNER), nn.Linear(INNER, 3)
        self.blocks = nn.ModuleList(Block(INNER, 4 * INNER) for _ in range(BLOCKS))

    def forward(self, x: Tensor, breaks: bool = False) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if breaks and number == BLOCKS // 2:
                raise KeyError("a bad batch")
        return self.last(x)


def step(t, i):
    t.loss(i).backward()
    t.o.step()
    t.o.zero_grad()


def before_a_step(drop, t, i):
    drop(t, i)
    step(t, i)


def between_forward_and_backward(drop, t, i):
    loss = t.loss(i)
    drop(t, i)
    loss.backward()
    t.o.step()
    t.o.zero_grad()


def between_backward_and_step(drop, t, i):
    t.loss(i).backward()
    drop(t, i)
    t.o.step()
    t.o.zero_grad()


def in_an_accumulation(drop, t, i):
    with t.m.no_sync():
        t.loss(20 + i).backward()
        drop(t, i)
    step(t, i)


def in_evaluation_mode(t, i):
    t.m.eval()
    t.loss(10 + i)
    t.m.train()


def under_no_sync(t, i):
    with t.m.no_sync():
        t.loss(10 + i)


def break_off(t, i):
    with suppress(KeyError):
        t.loss(10 + i, breaks=True)


def free_by_the_collector(t, i):
    cycle = [t.loss(10 + i)]
    cycle.append(cycle)
    del cycle
    gc.collect()


def keep_for_one_step(t, i):
    t.kept.losses = [t.loss(10 + i)] if i % 2 else []


def drop(t, i):
    t.loss(10 + i)


def under_autocast(program):
    def under(*args):
        with torch.autocast(gpus.DEVICE, torch.bfloat16):
            program(*args)

    return under


step_under_autocast = under_autocast(step)


def before_one_under_autocast(drop, t, i):
    under_autocast(drop)(t, i)
    step_under_autocast(t, i)


def dropped(name, change, frame=before_a_step):
    row.within(frame, net=Deep, optim=momentum)(name, change)


dropped("a validation is dropped", drop)
dropped("a validation in evaluation mode is dropped", in_evaluation_mode)
dropped("a validation is dropped", drop, before_one_under_autocast)
dropped("two forwards are dropped", lambda t, i: [t.loss(10 + i), t.loss(20 + i)])
dropped("a loss that is not finite is skipped", lambda t, i: bool(t.loss(10 + i).mul(math.nan).isfinite()))
dropped("the score of another batch is logged", lambda t, i: t.note(t.loss(10 + i).detach()))
dropped("a forward under no_sync is dropped", under_no_sync)
dropped("a forward breaks off", break_off)
dropped("a dead graph is freed by the collector", free_by_the_collector)
dropped("a loss is kept for one step", keep_for_one_step)
dropped("a forward is dropped", drop, between_forward_and_backward)
dropped("a forward is dropped", drop, between_backward_and_step)
dropped("a forward is dropped", drop, in_an_accumulation)

test_rows = row.tests()


def keep_one(t, i):
    if i == 0:
        t.kept.loss = t.loss(10)
    step(t, i)


def keep_the_last(t, i):
    t.kept.loss = t.loss(10 + i)
    step(t, i)


def peak(t, program):
    """Of a settled step, in bytes; the least of several, as a thread of Gloo may drop its buffer a moment late."""
    peaks = []
    with Meter() as meter:
        for i in range(4):
            meter.reset_peak()
            program(t, i)
            t.seen.clear()
            peaks.append(meter.peak())
    return min(peaks[2:])


def accumulate(t, i):
    in_an_accumulation(lambda t, i: None, t, i)


PROGRAMS = [*(one.program for one in row.rows), keep_one, keep_the_last]


def units_more(rank, world, transport, which):
    """How much more memory the peaks of some of PROGRAMS take than those of steps that drop nothing, in units."""
    unit = sum(param.nbytes for param in Block(INNER, 4 * INNER).parameters())
    with by(transport):
        without = (step, accumulate, step_under_autocast)
        expected = {program: peak(Loop(row.rows[0], 3, rank, "."), program) for program in without}
        found = [(peak(Loop(row.rows[0], 3, rank, "."), program), program) for program in PROGRAMS[which]]
    beside = {in_an_accumulation: accumulate, before_one_under_autocast: step_under_autocast}
    return [(more - expected[beside.get(getattr(one, "func", None), step)]) / unit for more, one in found]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("transport", TRANSPORTS if matrix.WHOLE else TRANSPORTS[:1])
def test_the_peak_is_that_of_a_step_that_drops_nothing(transport):
    which = slice(0, -2) if matrix.WHOLE else slice(0, -2, 2)
    for found in ranks.run(units_more, 2, args=(transport, which)):
        assert max(found) < 0.1, found


@pytest.mark.slow
def test_a_loss_that_is_kept_costs_its_activations():
    for found in ranks.run(units_more, 2, args=(TRANSPORTS[-1], slice(-2, None))):
        assert all(0 < more <= 0.5 for more in found), found
