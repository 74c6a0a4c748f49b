"""Backwards under autocast, out of the usual order, and forwards that no backward follows: the step has the numbers of
stage 0, and at stage 3 the peak of a step without such a forward."""

import gc
import math
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gpus
import matrix
import ranks
from inner import Meter
from rows import Loop, Net, Rows, momentum
from transports import TRANSPORTS, by
from zoo import WIDTH, Block, Stack

row = Rows("autocast", __name__, optim=momentum)


def in_order(order):
    """A forward without gradients, then two, and a backward of each: in turn, together, or after one another."""

    def program(t, i):
        dtype = next(t.n.parameters()).dtype
        first, second = (t.batch(10 * i + k).to(dtype) for k in range(2))
        # DistributedDataParallel itself reduces the first only of backwards after several forwards.
        turns = order == "in turn" or (order == "after one another" and t.stage < 2)
        with torch.autocast(gpus.DEVICE, torch.bfloat16):
            with torch.no_grad():
                t.m(first)
            losses = []
            for inputs in (first, second):
                losses.append(t.m(inputs).float().square().mean())
                if turns:
                    losses.pop().backward()
            for loss in [sum(losses)] if order == "together" else losses:
                loss.backward()
            if t.stage:  # within the limit: torch's own does not take 16 bits under autocast
                clip_grad_norm_(t.m.parameters(), 1e3)
            t.update(None)

    return program


# In float16 DistributedDataParallel rounds sums of an averaged and a local gradient, where others add up averages.
UNUSED = {"find_unused_parameters": True}
HALF = {"net": lambda: Net().half(), "tolerance": 2e-3}
row.of("backwards in turn", in_order("in turn"), tolerance=1e-5)
row.of("one backward of two forwards", in_order("together"))
row.of("backwards after one another", in_order("after one another"), tolerance=1e-5)
row.of("backwards in turn in float16", in_order("in turn"), **HALF)
row.of("backwards after one another in float16", in_order("after one another"), **HALF)


class FirstWithout(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.blocks, self.last, self.first = nn.ModuleList([Block(WIDTH), Block(WIDTH)]), nn.Linear(WIDTH, 3), first

    def forward(self, x: Tensor) -> Tensor:
        for times in (2, 1):
            with torch.set_grad_enabled(times == 1 and torch.is_grad_enabled()):
                for _ in range(times):
                    for block in self.blocks[: 1 if self.first else 2]:
                        x = block(x)
        return self.last(x)


def trained_under_it(t, i):
    with torch.autocast(gpus.DEVICE, torch.bfloat16):
        loss = t.loss(i)
    t.update(loss)


for first in (True, False):
    words = "the first block runs" if first else "all blocks run"
    row.of(
        f"{words} without gradients and then with them", trained_under_it, net=partial(FirstWithout, first), ddp=UNUSED
    )
test_autocast = row.tests()


FSDP = [{"reshard_after_forward": False}, {"sharding_strategy": "NO_SHARD"}, {"prefetch": 1}, {"prefetch": 3}]

row = Rows("backwards out of the usual order", __name__, optim=momentum, tolerance=1e-6)


def everywhere(name, program, **how):
    row.of(name, program, **how)
    turn = len(row.rows) % len(FSDP)
    for options in FSDP if matrix.WHOLE else FSDP[turn : turn + 1]:
        told = ", ".join(f"{key} {value}" for key, value in options.items())
        row.of(f"{name} with {told}", program, same={3}, fsdp=options, **how)


def retained(t, i):
    kept = t.loss(2 * i)
    kept.backward(retain_graph=True)
    t.update(kept + t.loss(2 * i + 1))


def old(t, i):
    before = t.loss(3 * i)
    t.loss(3 * i + 1).backward()
    t.update(before + t.loss(3 * i + 2))


class Half(Block):
    half = False

    def forward(self, x):
        return x + self.up(x)[..., :WIDTH] if self.half else super().forward(x)


def half(t, i):
    t.loss(3 * i).backward()
    t.n.blocks[0].half = True
    with t.m.no_sync():
        t.loss(3 * i + 1).backward()
    t.n.blocks[0].half = False
    t.update(t.loss(3 * i + 2))


everywhere("a graph is retained beside a newer one", retained)
everywhere("a graph from before another backward is gone through with a newer one", old)
everywhere("half a block is not reached under no_sync", half, net=partial(Stack, Half, blocks=2))


def by_closure(t, i, *, sends=True, clip=False):
    """What no_sync left is reduced by the closure's own backward."""

    def closure():
        loss = t.loss(2 * i + 1)
        with nullcontext() if sends else t.m.no_sync():
            loss.backward()
        if clip:
            clip_grad_norm_(t.n.parameters(), 1e-3)
        return loss

    t.o.zero_grad()
    with t.m.no_sync():
        t.loss(2 * i).backward()
    assert t.o.step(closure=closure) > 0


row.of("a closure reduces what no_sync left", by_closure)
row.of("a closure leaves gradients unreduced", partial(by_closure, sends=False), same=(), refused={3: r"no_sync\(\)"})
row.of("a closure clips by the norm", partial(by_closure, clip=True), same={3}, tolerance=1e-6)


class Fails(nn.Module):
    """Its backward raises before the first gradient, once after each time that `fails` was set."""

    fails = False

    def __init__(self):
        super().__init__()
        self.inner = Stack(classes=3, blocks=2)

    def forward(self, x):
        found = self.inner(x)
        found.register_hook(self._reached)
        return found * 1.0

    def _reached(self, _):
        if self.fails:
            self.fails = False
            raise ArithmeticError("before the first gradient")


def failed(t, i):
    loss = t.loss(i)
    t.n.fails = True
    with suppress(ArithmeticError):
        loss.backward(retain_graph=True)
    t.update(loss)


row.of("a backward fails before its first gradient, and runs again", failed, net=Fails, same={1, 2})

test_rows = row.tests()


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
    t.update(t.loss(i))


def before_a_step(drop, t, i):
    drop(t, i)
    step(t, i)


def between_forward_and_backward(drop, t, i):
    loss = t.loss(i)
    drop(t, i)
    t.update(loss)


def between_backward_and_step(drop, t, i):
    t.update(t.loss(i), lambda t: drop(t, i))


def in_an_accumulation(drop, t, i):
    with t.m.no_sync():
        t.loss(20 + i).backward()
        drop(t, i)
    step(t, i)


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
dropped("a validation in evaluation mode is dropped", lambda t, i: t.m.eval() and (t.loss(10 + i), t.m.train()))
dropped("a validation is dropped", drop, before_one_under_autocast)
dropped("two forwards are dropped", lambda t, i: [t.loss(10 + i), t.loss(20 + i)])
dropped("a loss that is not finite is skipped", lambda t, i: bool(t.loss(10 + i).mul(math.nan).isfinite()))
dropped("the score of another batch is logged", lambda t, i: t.note(t.loss(10 + i).detach()))
dropped("a forward under no_sync is dropped", under_no_sync)
dropped("a forward breaks off", break_off)
dropped("a dead graph is freed by the collector", free_by_the_collector)
dropped("a loss is kept for one step", lambda t, i: setattr(t.kept, "losses", [t.loss(10 + i)] if i % 2 else []))
dropped("a forward is dropped", drop, between_forward_and_backward)
dropped("a forward is dropped", drop, between_backward_and_step)
dropped("a forward is dropped", drop, in_an_accumulation)

test_dropped = row.tests()


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
