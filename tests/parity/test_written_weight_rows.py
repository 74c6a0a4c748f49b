"""Weights that are written between a forward and its backward are found by torch, as under DistributedDataParallel."""

from __future__ import annotations

import torch

import zero
from rows import Net, Rows, adam, changed, momentum

row = Rows("B11: weights written between a forward and its backward", __name__)

WRITTEN = dict.fromkeys(range(4), "modified by an inplace operation")


def between_a_forward_and_its_backward(change, t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    loss = t.loss(10 + i)
    change(t, i)
    loss.backward()
    t.o.step()


def step_one_layer(t, i):
    for p in t.n.parameters():
        if p is not t.n.last.weight:
            p.grad = None
    t.o.step()


def step_by_nothing(t, i):
    t.o.param_groups[0]["lr"] = 0.0
    t.o.step()


def step_a_closure(t, i):
    def closure():
        t.o.zero_grad()
        loss = t.loss(20 + i)
        loss.backward()
        return loss

    t.o.step(closure)


def load(t, *optimizers):
    zero.checkpoint.save(t.folder, t.m, *optimizers)
    zero.checkpoint.load(t.folder, t.m, *optimizers)


between = row.within(between_a_forward_and_its_backward, refused=WRITTEN)

between("the optimizer steps", lambda t, i: t.o.step())
between("adam steps", lambda t, i: t.o.step(), optim=adam)
between("the optimizer steps by nothing", step_by_nothing)
between("one layer is stepped", step_one_layer)
between("a closure is stepped", step_a_closure, optim=momentum)
between("a checkpoint is loaded", lambda t, i: load(t, t.o))
between("a checkpoint of weights is loaded", lambda t, i: load(t))
between("a full state is loaded", lambda t, i: zero.load_full_state_dict(t.m, zero.full_state_dict(t.m)))
between("a state dict is loaded", lambda t, i: t.m.load_state_dict(t.m.state_dict()))
between("weights are written by hand", lambda t, i: [p.detach().mul_(0.9) for p in t.n.parameters()])


@row(refused=WRITTEN)
def a_step_between_the_backwards_of_two_forwards(t, i):
    one, two = t.loss(i), t.loss(10 + i)
    one.backward()
    t.o.step()
    two.backward()


@row(refused=WRITTEN)
def a_step_between_two_backwards_through_one_graph(t, i):
    loss = t.loss(i)
    loss.backward(retain_graph=True)
    t.o.step()
    loss.backward()


@row(refused=WRITTEN)
def a_step_between_a_forward_under_no_sync_and_its_backward(t, i):
    t.loss(i).backward()
    with t.m.no_sync():
        loss = t.loss(10 + i)
        t.o.step()
        loss.backward()


# ---------------------------------------------------------------------------------- what no graph reads may be written


@row()
def a_step_follows_a_forward_without_graph(t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    with torch.no_grad():
        t.loss(10 + i)
    t.o.step()


@row()
def a_step_follows_a_forward_whose_loss_is_dropped(t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    t.loss(10 + i)
    t.o.step()


@row()
def a_step_without_gradients_comes_between(t, i):
    t.o.zero_grad()
    loss = t.loss(i)
    t.o.step()
    loss.backward()
    t.o.step()


@row(net=lambda: changed(Net(), lambda net: [p.requires_grad_(p.ndim == 1) for p in net.parameters()]))
def a_step_of_biases_alone_comes_between(t, i):
    """No graph keeps a bias for its backward."""
    t.o.zero_grad()
    t.loss(i).backward()
    loss = t.loss(10 + i)
    t.o.step()
    t.o.zero_grad()
    loss.backward()
    t.o.step()


test_rows = row.tests()
