"""Gradients of backwards under no_sync: what a loop does to them before they are sent, and what keeps them."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from loops import Rows, adam, momentum

edited = Rows("B3: at stage 3 gradients under no_sync are cleared, or edits raise")

NAME = r"(first|last|blocks\.\d\.\w+)\.(weight|bias)"


def after_a_backward_under_no_sync(change, t, i):
    t.o.zero_grad()
    with t.m.no_sync():
        t.loss(i).backward()
    change(t, i)
    t.loss(10 + i).backward()
    t.o.step()


clears = edited.within(after_a_backward_under_no_sync)
edits = partial(clears, refused={3: (NAME, "no_sync")}, fails={3})


def gradients(t):
    return [p.grad for p in t.n.parameters() if p.grad is not None]


@edits()
def gradients_are_halved(t, i):
    for grad in gradients(t):
        grad.mul_(0.5)


@edits()
def gradients_are_clones(t, i):
    for p in t.n.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone()


@edits(optim=momentum)
def the_module_zeroes_its_gradients(t, i):
    t.n.zero_grad(set_to_none=False)


@edits(optim=momentum)
def the_optimizer_zeroes_its_gradients(t, i):
    t.o.zero_grad(set_to_none=False)


@edits()
def gradients_are_clipped_by_value(t, i):
    clip_grad_value_(t.n.parameters(), 0.01)


@edits()
def gradients_are_clipped_by_their_own_norm(t, i):
    clip_grad_norm_(t.n.parameters(), 0.01)


@edits()
def gradients_are_halved_by_foreach(t, i):
    torch._foreach_mul_(gradients(t), 0.5)


@edits()
def gradients_are_halved_out_of_place(t, i):
    for p in t.n.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


@edits()
def one_gradient_is_halved(t, i):
    if t.n.first.weight.grad is not None:
        t.n.first.weight.grad *= 0.5


@edits()
def their_signs_are_taken(t, i):
    for grad in gradients(t):
        grad.sign_()


@edits()
def weight_decay_is_added(t, i):
    for p in t.n.parameters():
        if p.grad is not None:
            p.grad.add_(p.detach(), alpha=0.1)


@edits()
def data_of_gradients_are_halved(t, i):
    for grad in gradients(t):
        grad.data.mul_(0.5)


@clears()
def the_module_is_cleared(t, i):
    t.n.zero_grad()


@clears(optim=adam)
def the_optimizer_clears(t, i):
    t.o.zero_grad()


@clears()
def one_block_is_cleared(t, i):
    t.n.blocks[1].zero_grad()


@clears()
def one_parameter_is_set_to_none(t, i):
    t.n.first.weight.grad = None


@clears()
def the_module_is_cleared_between_forward_and_backward_of_another(t, i):
    with t.m.no_sync():
        loss = t.loss(20 + i)
        t.n.zero_grad()
        loss.backward()


test_edited = edited.tests()

# --------------------------------------------------------------------------- a backward passes the model while frozen

kept = Rows("B10: at stage 3 what no_sync accumulated survives a backward through a frozen model")
frozen = kept.within(after_a_backward_under_no_sync)


def passed(t, i, *modules):
    """A backward through the model, of which these modules are frozen. Returns the gradient of its inputs."""
    inputs = t.batch(i).requires_grad_()
    for module in modules:
        module.requires_grad_(False)
    with t.m.no_sync():
        t.m(inputs).sum().backward()
    for module in modules:
        module.requires_grad_(True)
    return t.note(inputs.grad)


@frozen(fails={3})
def the_whole_model_is_frozen(t, i):
    passed(t, 20 + i, t.n)


@frozen(fails={3})
def half_of_the_model_is_frozen(t, i):
    passed(t, 20 + i, t.n.first, t.n.blocks[0])


@frozen(fails={3})
def one_block_is_frozen(t, i):
    passed(t, 20 + i, t.n.blocks[1])


@frozen(fails={3})
def the_root_alone_is_frozen(t, i):
    passed(t, 20 + i, t.n.first, t.n.last)


@frozen(fails={3})
def biases_are_frozen(t, i):
    passed(t, 20 + i, *(p for p in t.n.parameters() if p.ndim == 1))


@frozen(fails={3}, optim=adam)
def the_whole_model_is_frozen_twice(t, i):
    passed(t, 20 + i, t.n)
    passed(t, 30 + i, t.n)


@frozen(fails={3})
def the_model_is_frozen_between_two_accumulated_backwards(t, i):
    passed(t, 20 + i, t.n)
    with t.m.no_sync():
        t.loss(30 + i).backward()


@frozen(fails={3}, tolerance=1e-6)
def a_frozen_model_sends(t, i):
    t.n.requires_grad_(False)
    inputs = t.batch(20 + i).requires_grad_()
    t.m(inputs).sum().backward()
    t.n.requires_grad_(True)
    t.note(inputs.grad)


@frozen(fails={3})
def a_frozen_model_gives_the_gradient_of_its_inputs_alone(t, i):
    t.n.requires_grad_(False)
    inputs = t.batch(20 + i).requires_grad_()
    t.note(torch.autograd.grad(t.m(inputs).sum(), inputs)[0])
    t.n.requires_grad_(True)


@frozen(fails={3})
def a_frozen_model_in_evaluation_passes_a_backward(t, i):
    t.m.eval()
    passed(t, 20 + i, t.n)
    t.m.train()


@frozen(fails={3})
def the_module_inside_passes_a_backward_while_frozen(t, i):
    t.n.requires_grad_(False)
    inputs = t.batch(20 + i).requires_grad_()
    t.n(inputs).sum().backward()
    t.n.requires_grad_(True)
    t.note(inputs.grad)


test_kept = kept.tests()
