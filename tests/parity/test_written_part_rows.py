"""Stage 2: who writes into `optimizer.part(param)` between steps has ranks compute with different weights."""

from __future__ import annotations

from functools import partial

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


def between_a_forward_and_its_backward(change, t, i):
    t.o.zero_grad()
    loss = t.loss(i)
    change(t, i)
    loss.backward()
    t.o.step()


told = {"refused": {2: r"optimizer\.part"}, "same": (), "fails": {2}}
before = partial(row.within(before_a_forward), **told)


@before()
def every_part_is_written(t, i):
    climb(t, 0.01)


@before(optim=momentum)
def one_part_is_written(t, i):
    with torch.no_grad():
        parts(t)[0].mul_(0.99)


@before()
def one_rank_writes_into_its_parts(t, i):
    if t.rank == 1:
        climb(t, 0.01)


@before()
def parts_are_written_after_the_first_steps(t, i):
    if i == 2:
        climb(t, 0.01)


@before()
def parts_are_written_by_foreach(t, i):
    with torch.no_grad():
        torch._foreach_mul_(parts(t), 0.99)


@before()
def parts_are_initialised(t, i):
    if i == 0:
        for part in parts(t):
            torch.nn.init.constant_(part, 0.1)


@before()
def parts_kept_from_before_training_are_written(t, i):
    if i == 0:
        t.kept.parts = parts(t)
    with torch.no_grad():
        for part in t.kept.parts:
            part.clamp_(-0.1, 0.1)


@before()
def parts_are_written_and_written_back_around_a_validation(t, i):
    climb(t, 0.01)
    with torch.no_grad():
        t.loss(10 + i)
    climb(t, -0.01)


@before()
def sharpness_is_looked_for_between_two_backwards(t, i):
    t.loss(i).backward()
    climb(t, 0.01)
    t.loss(i).backward()
    climb(t, -0.01)


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
