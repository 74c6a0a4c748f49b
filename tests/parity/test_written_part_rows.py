"""Stage 2: who writes into `optimizer.part(param)` between steps has ranks compute with different weights."""

from __future__ import annotations

import torch

from loops import Rows, momentum

row = Rows("B8: writes into optimizer.part(param) raise on every rank")


def parts(t):
    """At stage 0 the parameters themselves."""
    return [getattr(t.o, "part", lambda p: p)(p) for p in t.n.parameters()]


@torch.no_grad()
def climb(t, by):
    for part in parts(t):
        part.add_(by)


def before_a_forward(change, t, i):
    t.o.zero_grad()
    change(t, i)
    t.loss(i).backward()
    t.o.step()


def initialise(t, i):
    for part in parts(t) if i == 0 else ():
        torch.nn.init.constant_(part, 0.1)


@torch.no_grad()
def clamp_those_kept(t, i):
    if i == 0:
        t.kept.parts = parts(t)
    for part in t.kept.parts:
        part.clamp_(-0.1, 0.1)


def climb_for_a_validation(t, i):
    climb(t, 0.01)
    with torch.no_grad():
        t.loss(10 + i)
    climb(t, -0.01)


def climb_for_a_backward(t, i):
    t.loss(i).backward()
    climb(t, 0.01)
    t.loss(i).backward()
    climb(t, -0.01)


told = {"refused": {2: r"optimizer\.part"}, "same": ()}
before = row.within(before_a_forward, **told)

before("all parts are written", lambda t, i: climb(t, 0.01))
before("one part is written", lambda t, i: parts(t)[0].detach().mul_(0.99), optim=momentum)
before("one rank writes parts", lambda t, i: t.rank == 1 and climb(t, 0.01))
before("parts are written at the third step", lambda t, i: i == 2 and climb(t, 0.01))
before("parts are written by foreach", lambda t, i: torch.no_grad()(torch._foreach_mul_)(parts(t), 0.99))
before("parts are initialised", initialise)
before("parts kept from before training are written", clamp_those_kept)
before("parts are written, and written back after a validation,", climb_for_a_validation)
before("parts are written, and written back after a backward,", climb_for_a_backward)


@row(**told)
def parts_are_written_in_an_accumulation(t, i):
    t.o.zero_grad()
    with t.m.no_sync():
        t.loss(i).backward()
    climb(t, 0.01)
    t.loss(10 + i).backward()
    t.o.step()


@row(same={2})
def parts_are_read(t, i):
    t.o.zero_grad()
    sum(part.detach().sum() for part in parts(t))
    t.loss(i).backward()
    t.o.step()


@row(same={2})
def parts_are_written_between_backward_and_step(t, i):
    """The step gathers what their owners wrote."""
    t.o.zero_grad()
    t.loss(i).backward()
    climb(t, 0.01)
    t.o.step()


test_rows = row.tests()
