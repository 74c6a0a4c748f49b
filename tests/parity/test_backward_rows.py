"""Backwards out of the usual order, and steps that are given a closure."""

from contextlib import nullcontext, suppress
from functools import partial

from torch import nn
from torch.nn.utils import clip_grad_norm_

import matrix
from rows import Rows, momentum
from zoo import WIDTH, Block, Stack

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
    """The same graph again, with no forward in between."""
    loss = t.loss(i)
    t.n.fails = True
    with suppress(ArithmeticError):
        loss.backward(retain_graph=True)
    t.update(loss)


row.of("a backward fails before its first gradient, and runs again", failed, net=Fails, same={1, 2})

test_rows = row.tests()
