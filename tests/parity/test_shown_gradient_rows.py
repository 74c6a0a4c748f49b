"""Stage 2: what stands in `param.grad` is the truth. A placeholder counts, None was dropped, the rest is refused."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch.optim import SGD, Adam

from loops import Rows, adam, momentum

row = Rows("B1: what stands in param.grad is the truth")

NAME = r"(first|last|blocks\.\d\.\w+)\.(weight|bias)"


def between_forward_and_backward(change, t, i):
    loss = t.loss(i)
    change(t, i)
    loss.backward()
    t.o.step()


def between_backward_and_step(change, t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    change(t, i)
    t.o.step()


between = row.within(between_forward_and_backward)
after = row.within(between_backward_and_step)
refused = partial(row.within(between_backward_and_step), same={1})


# ------------------------------------------------------------------------------ cleared between forward and backward


@between(fails={2})
def the_module_is_cleared(t, i):
    t.n.zero_grad()


@between(fails={2}, optim=momentum)
def the_module_is_zeroed(t, i):
    t.n.zero_grad(set_to_none=False)


@between()
def the_wrapper_is_cleared(t, i):
    t.m.zero_grad()


@between()
def the_optimizer_clears(t, i):
    t.o.zero_grad()


@between(fails={2}, optim=adam)
def every_gradient_is_set_to_none(t, i):
    for p in t.n.parameters():
        p.grad = None


@between(fails={2})
def every_gradient_is_deleted(t, i):
    for p in t.n.parameters():
        del p.grad


@between(fails={2}, optim=momentum)
def every_gradient_is_zeroed(t, i):
    for p in t.n.parameters():
        if p.grad is not None:
            p.grad.zero_()


@between(fails={2, 3})
def every_gradient_is_set_to_zeros(t, i):
    for p in t.n.parameters():
        p.grad = torch.zeros_like(p)


@between(fails={2}, tolerance=1e-6)
def one_block_alone_is_cleared(t, i):
    t.n.blocks[0].zero_grad()


@row()
def gradients_are_allocated_as_zeros_before_training(t, i):
    if i == 0:
        for p in t.n.parameters():
            p.grad = torch.zeros_like(p)
    t.loss(i).backward()
    t.o.step()
    t.o.zero_grad(set_to_none=False)


def clear(t, *_):
    t.n.zero_grad()


def register_once(register, t, i):
    if i == 0:
        getattr(t.n, register)(partial(clear, t))
    t.loss(i).backward()
    t.o.step()


for register in ("register_forward_pre_hook", "register_forward_hook"):
    row(f"gradients_are_cleared_by_{register}", fails={2})(partial(register_once, register))


@row(fails={2})
def gradients_are_cleared_in_a_hook_on_the_loss(t, i):
    loss = t.loss(i)
    loss.register_hook(lambda _: t.n.zero_grad())
    loss.backward()
    t.o.step()


@row(fails={2})
def gradients_are_cleared_between_two_forwards(t, i):
    one = t.loss(i)
    t.n.zero_grad()
    (one + t.loss(10 + i)).backward()
    t.o.step()


@row(fails={2}, tolerance=1e-6)
def one_parameter_is_cleared_after_a_second_forward(t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    loss = t.loss(10 + i)
    t.n.first.weight.grad = None
    loss.backward()
    t.o.step()


@row(fails={2})
def a_closure_clears_after_its_forward(t, i):
    def closure():
        loss = t.loss(i)
        t.n.zero_grad()
        loss.backward()
        return loss

    t.o.step(closure)


def clears_with_zeros(t, i):
    loss = t.loss(i)
    t.n.zero_grad(set_to_none=False)
    loss.backward()
    t.o.step()
    t.o.zero_grad(set_to_none=False)


def steps_on_zeros(t, i):
    t.loss(i).backward()
    if i == 1:
        t.o.zero_grad(set_to_none=False)
    t.o.step()
    t.o.zero_grad()


for how in ({"fused": True}, {"foreach": True}):
    for kind in (partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.01)):
        for program in (clears_with_zeros, steps_on_zeros):
            name = "_".join([*how, kind.func.__name__, program.__name__])
            row(name, optim=partial(kind, **how), fails={2})(program)


# ------------------------------------------------------------------------- dropped, or nothing, after the backward


@after(optim=momentum)
def one_layer_is_cleared_every_other_time(t, i):
    if i % 2:
        t.n.last.zero_grad()


@after(optim=momentum)
def one_layer_is_zeroed(t, i):
    for p in t.n.last.parameters():
        if p.grad is not None:
            p.grad.zero_()


@after()
def every_gradient_is_dropped_after_a_bad_batch(t, i):
    if i == 1:
        for p in t.n.parameters():
            p.grad = None


@after(optim=momentum)
def one_block_is_cleared_beside_a_forward_without_graph(t, i):
    with torch.no_grad():
        t.loss(10 + i)
        t.n.blocks[1].zero_grad()


@after(optim=momentum)
def another_step_comes(t, i):
    t.o.step()


@after()
def a_detached_gradient_is_put_in_its_place(t, i):
    for p in t.n.parameters():
        if p.grad is not None:
            p.grad = p.grad.detach()


@row(tolerance=1e-6)
def gradients_are_never_cleared(t, i):
    t.loss(i).backward()
    t.o.step()


# ------------------------------------------------------------------------------------------- kept, and put back


@after()
def gradients_are_kept_and_cleared_and_put_back(t, i):
    params = [*t.n.parameters()]
    saved = [p.grad for p in params]
    t.n.zero_grad()
    for p, grad in zip(params, saved, strict=True):
        p.grad = grad


@after(fails={2}, optim=momentum)
def gradients_are_put_back_after_a_validation(t, i):
    saved = {p: p.grad for p in t.n.parameters()}
    t.o.zero_grad()
    with torch.no_grad():
        t.loss(10 + i)
    for p in saved:
        p.grad = saved[p]


@after(fails={2}, optim=momentum)
def one_gradient_is_hidden_from_a_step_and_put_back_for_the_next(t, i):
    bias, t.n.last.bias.grad = t.n.last.bias.grad, None
    t.o.step()
    t.n.last.bias.grad = bias


@after(optim=momentum)
def gradients_are_cleared_after_a_step_and_put_back_for_another(t, i):
    saved = [(p, p.grad) for p in t.n.parameters()]
    t.o.step()
    t.n.zero_grad()
    for p, grad in saved:
        p.grad = grad


@refused(refused={2: NAME}, fails={1, 2})
def gradients_are_put_back_after_another_backward(t, i):
    saved = [(p, p.grad) for p in t.n.parameters()]
    t.n.zero_grad()
    t.loss(10 + i).backward()
    for p, grad in saved:
        p.grad = grad


# ----------------------------------------------------------------------------------- something else put there


@refused(refused={2: r"blocks\.\d\.up\.weight"}, fails={2})
def two_gradients_are_swapped(t, i):
    one, two = (block.up.weight for block in t.n.blocks)
    one.grad, two.grad = two.grad, one.grad


@refused(refused={2: r"blocks\.1\.down\.bias"}, fails={2})
def one_gradient_is_given_to_another_parameter_too(t, i):
    t.n.blocks[1].down.bias.grad = t.n.blocks[0].down.bias.grad


@refused(refused={2: r"blocks\.1\.down\.bias"}, fails={2})
def a_gradient_moves_to_another_parameter(t, i):
    one, two = (block.down.bias for block in t.n.blocks)
    one.grad, two.grad = None, one.grad


@refused(refused={2: NAME})
def zeros_are_put_there(t, i):
    for p in t.n.parameters():
        p.grad = torch.zeros_like(p)


@refused(refused={2: r"last\.weight"})
def noise_is_put_there(t, i):
    t.n.last.weight.grad = torch.randn_like(t.n.last.weight)


@refused(refused={2: r"last\.bias"})
def weight_decay_by_hand_is_put_there(t, i):
    t.n.last.bias.grad = 0.1 * t.n.last.bias.detach()


@row(same={1}, refused={2: NAME})
def gradients_are_made_without_any_backward(t, i):
    for p in t.n.parameters():
        p.grad = torch.full_like(p, 0.1)
    t.o.step()


# ------------------------------------------------------------------------------------------- computing with it

computed = partial(refused, refused={2: (r"first\.weight", r"optimizer\.part\(param\)\.grad")})


@computed()
def a_gradient_is_scaled(t, i):
    t.n.first.weight.grad.mul_(0.5)


@computed()
def all_gradients_are_scaled(t, i):
    torch._foreach_mul_([p.grad for p in t.n.parameters()], 0.5)


@computed()
def the_weight_is_added(t, i):
    t.n.first.weight.grad.add_(t.n.first.weight.detach(), alpha=0.1)


@computed()
def a_row_is_masked(t, i):
    t.n.first.weight.grad[0] = 0


@computed()
def a_gradient_is_cloned(t, i):
    t.n.first.weight.grad = t.n.first.weight.grad.clone()


@computed()
def a_gradient_is_copied_to_be_kept(t, i):
    t.kept.grad = copy.deepcopy(t.n.first.weight.grad)


@computed()
def a_norm_is_taken(t, i):
    t.note(t.n.first.weight.grad.norm())


test_rows = row.tests()
