"""Backwards that are asked for the gradients of particular parameters, and hooks on these: right, or refused."""

from __future__ import annotations

import torch
from either import RightOrRefused
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from loops import WIDTH, Net, adam

row = RightOrRefused("B7: gradients of parameters that are asked for")

OWN = r"(?i)shard|unit|FSDP"  # the word of zero's own errors, not of torch's
UNITS = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}


class Units(nn.Sequential):
    """Of units alone: the root has no parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


@row(net=Units, options=UNITS, or_refused=OWN, fails={3})
def backward_is_given_all_parameters_of_units(t, i):
    t.o.zero_grad()
    t.loss(i).backward(inputs=list(t.m.parameters()))
    t.o.step()


@row(or_refused=OWN)
def backward_is_given_all_parameters_of_units_and_of_the_root(t, i):
    t.o.zero_grad()
    t.loss(i).backward(inputs=list(t.m.parameters()))
    t.o.step()


@row(net=Units, options=UNITS, optim=adam, or_refused=OWN, fails={3})
def a_backward_under_no_sync_is_given_all_parameters(t, i):
    with t.m.no_sync():
        t.loss(i).backward(inputs=list(t.m.parameters()))
    t.loss(10 + i).backward(inputs=list(t.m.parameters()))
    t.o.step()
    t.o.zero_grad()


@row(net=Units, options=UNITS, or_refused=OWN, tolerance=1e-6, fails={3})
def one_backward_of_two_losses_is_given_all_parameters(t, i):
    t.o.zero_grad()
    torch.autograd.backward([t.loss(i), t.loss(10 + i)], inputs=list(t.m.parameters()))
    t.o.step()


@row(net=Units, options=UNITS, or_refused=OWN)
def backward_is_given_the_input_and_all_parameters(t, i):
    x = t.batch(i).requires_grad_()
    t.o.zero_grad()
    t.m(x).square().mean().backward(inputs=[x, *t.m.parameters()])
    t.note(x.grad)
    t.o.step()


@row(net=Units, options=UNITS, or_refused="nothing")
def backward_is_given_parameters_that_were_listed_before_the_forward(t, i):
    params = list(t.m.parameters())
    t.o.zero_grad()
    t.loss(i).backward(inputs=params)
    t.o.step()


@row(net=Units, options=UNITS, or_refused="nothing")
def parameters_are_counted_between_forward_and_backward(t, i):
    loss = t.loss(i)
    t.note(torch.tensor(len([p for p in t.m.parameters() if p.requires_grad])))
    loss.backward()
    t.o.step()
    t.o.zero_grad()


@row(net=Units, options=UNITS, steps=1, or_refused=OWN, fails={3})
def gradients_of_units_are_asked_for_where_they_may_be_unused(t, i):
    for gradient in torch.autograd.grad(t.loss(i), [*t.m.parameters()], allow_unused=True):
        t.note(torch.tensor(torch.nan) if gradient is None else gradient)


@row(steps=1, or_refused=OWN, fails={3})
def gradients_of_units_and_the_root_are_asked_for_where_they_may_be_unused(t, i):
    for gradient in torch.autograd.grad(t.loss(i), [*t.m.parameters()], allow_unused=True):
        t.note(torch.tensor(torch.nan) if gradient is None else gradient)


@row(steps=1, or_refused=OWN, fails={3})
def gradients_of_all_parameters_are_asked_for(t, i):
    for gradient in torch.autograd.grad(t.loss(i), [*t.m.parameters()]):
        t.note(gradient)


@row(or_refused=OWN)
def the_loss_is_weighed_by_the_gradient_of_the_last_layer(t, i):
    loss = t.loss(i)
    norm = torch.autograd.grad(loss, t.n.last.weight, retain_graph=True)[0].norm()
    (loss / t.note(norm)).backward()
    t.o.step()
    t.o.zero_grad()


@row(or_refused="nothing")
def the_gradient_of_the_input_is_asked_for_beside_training(t, i):
    x = t.batch(10 + i).requires_grad_()
    t.note(torch.autograd.grad(t.m(x).sum(), x)[0])
    t.o.zero_grad()
    t.loss(i).backward()
    t.o.step()


@row(net=Units, options=UNITS, or_refused=OWN, fails={3})
def a_hook_sees_the_gradients_of_all_parameters(t, i):
    if i == 0:
        register_multi_grad_hook([*t.m.parameters()], lambda all: [t.note(one.square().sum()) for one in all])
    t.o.zero_grad()
    t.loss(i).backward()
    t.o.step()


@row(net=Net, or_refused=OWN, fails={3})
def a_hook_is_told_which_parameters_of_units_and_root_have_gradients(t, i):
    hook = register_multi_grad_hook([*t.m.parameters()], lambda all: t.note(torch.tensor([x is None for x in all])))
    t.loss(i).backward()
    t.o.step()
    t.o.zero_grad()
    hook.remove()


@row(net=Units, options=UNITS, or_refused="nothing")
def hooks_of_parameters_scale_their_gradients(t, i):
    for p in t.m.parameters() if i == 0 else ():
        p.register_hook(lambda gradient: 0.5 * gradient)
    t.o.zero_grad()
    t.loss(i).backward()
    t.o.step()


test_rows = row.tests()
