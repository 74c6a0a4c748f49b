"""Stage 2: what stands in `param.grad` is the truth. A placeholder counts, None was dropped, the rest is refused."""

from functools import partial

import torch
from torch.optim import SGD, Adam

from rows import Rows, adam, momentum

row = Rows("B1: what stands in param.grad is the truth", __name__)

NAME = r"(first|last|blocks\.\d\.\w+)\.(weight|bias)"


def each(module, change):
    """change: of a parameter, which has a gradient."""
    for p in module.parameters():
        if p.grad is not None:
            change(p)


def put(p, grad):
    p.grad = grad


def drop(p):
    p.grad = None


def delete(p):
    del p.grad


def zero(p):
    p.grad.zero_()


def between_forward_and_backward(change, t, i):
    loss = t.loss(i)
    change(t, i)
    loss.backward()
    t.o.step()


def zeros_for_all(t, i):
    for p in t.n.parameters():
        p.grad = torch.zeros_like(p)


between = row.within(between_forward_and_backward)

between("the module is cleared", lambda t, i: t.n.zero_grad())
between("the module is zeroed", lambda t, i: t.n.zero_grad(set_to_none=False), optim=momentum)
between("the wrapper is cleared", lambda t, i: t.m.zero_grad())
between("the optimizer clears", lambda t, i: t.o.zero_grad())
between("the optimizer zeroes", lambda t, i: t.o.zero_grad(set_to_none=False))
between("every gradient is set to None", lambda t, i: each(t.n, drop), optim=adam)
between("every gradient is deleted", lambda t, i: each(t.n, delete))
between("every gradient is zeroed", lambda t, i: each(t.n, zero), optim=momentum)
between("every gradient is set to zeros", zeros_for_all)
between("one block is cleared", lambda t, i: t.n.blocks[0].zero_grad(), tolerance=1e-6)
between("the root alone is cleared", lambda t, i: each(t.n.first, drop) or each(t.n.last, drop), tolerance=1e-6)


@row()
def zeros_are_allocated_before_training(t, i):
    if i == 0:
        zeros_for_all(t, i)
    t.loss(i).backward()
    t.o.step()
    t.o.zero_grad(set_to_none=False)


def cleared_by_a_hook(change, t, i):
    if i == 0:
        change(t, lambda *_: t.n.zero_grad())
    t.loss(i).backward()
    t.o.step()


by_hook = row.within(cleared_by_a_hook)
by_hook("before forward", lambda t, clear: t.n.register_forward_pre_hook(clear))
by_hook("after forward", lambda t, clear: t.n.register_forward_hook(clear))
by_hook("before the last layer", lambda t, clear: t.n.last.register_forward_pre_hook(clear))


@row()
def gradients_are_cleared_in_a_hook_on_the_loss(t, i):
    loss = t.loss(i)
    loss.register_hook(lambda _: t.n.zero_grad())
    loss.backward()
    t.o.step()


@row()
def gradients_are_cleared_between_two_forwards(t, i):
    one = t.loss(i)
    t.n.zero_grad()
    (one + t.loss(10 + i)).backward()
    t.o.step()


@row(tolerance=1e-6)
def one_parameter_is_cleared_after_a_second_forward(t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    loss = t.loss(10 + i)
    drop(t.n.first.weight)
    loss.backward()
    t.o.step()


@row()
def a_closure_clears_after_its_forward(t, i):
    def closure():
        loss = t.loss(i)
        t.n.zero_grad()
        loss.backward()
        return loss

    t.o.step(closure)


def with_zeros(change, t, i):
    loss = t.loss(i)
    t.n.zero_grad(set_to_none=False)
    loss.backward()
    change(t, i)
    t.o.step()
    t.o.zero_grad(set_to_none=False)


def step_on_zeros(t, i):
    if i == 1:
        t.o.zero_grad(set_to_none=False)


zeroing = row.within(with_zeros)
for how in ({"fused": True}, {"foreach": True}):
    for kind in (partial(SGD, lr=0.1, momentum=0.9, **how), partial(Adam, lr=0.01, **how)):
        title = " ".join([*how, kind.func.__name__])
        zeroing(f"{title} clears", lambda t, i: None, optim=kind)
        zeroing(f"{title} clears and steps", step_on_zeros, optim=kind)


def between_backward_and_step(change, t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    change(t, i)
    t.o.step()


after = row.within(between_backward_and_step, optim=momentum)

after("one layer is cleared every other time", lambda t, i: each(t.n.last, drop if i % 2 else zero))
after("one layer is zeroed", lambda t, i: each(t.n.last, zero))
after("every gradient of a bad batch is dropped", lambda t, i: i == 1 and each(t.n, drop))
after("the optimizer zeroes", lambda t, i: i == 1 and t.o.zero_grad(set_to_none=False))
after("a validation clears one block", lambda t, i: torch.no_grad()(t.loss)(10 + i) and t.n.blocks[1].zero_grad())
after("another step comes", lambda t, i: t.o.step())
after("a detached gradient is put in its place", lambda t, i: each(t.n, lambda p: put(p, p.grad.detach())))


@row(tolerance=1e-6)
def gradients_are_never_cleared(t, i):
    t.loss(i).backward()
    t.o.step()


def put_back(meanwhile, t, i):
    saved = [(p, p.grad) for p in t.n.parameters()]
    meanwhile(t, i)
    for p, grad in saved:
        p.grad = grad


def put_back_before_the_step(change, t, i):
    between_backward_and_step(partial(put_back, change), t, i)


def step_and_clear(t, i):
    t.o.step()
    t.n.zero_grad()


def validate(t, i):
    t.o.zero_grad()
    with torch.no_grad():
        t.loss(10 + i)


def hide_one_from_a_step(t, i):
    drop(t.n.last.bias)
    t.o.step()


def pass_another_batch(t, i):
    t.n.zero_grad()
    t.loss(10 + i).backward()


kept = row.within(put_back_before_the_step, optim=momentum)

kept("gradients cleared by the module are", lambda t, i: t.n.zero_grad())
kept("gradients cleared by the optimizer are", lambda t, i: t.o.zero_grad())
kept("gradients cleared for a validation are", validate)
kept("gradients cleared after a step are", step_and_clear)
kept("a gradient hidden from a step is", hide_one_from_a_step)
kept("gradients of the batch before are", pass_another_batch, same={2, 3})  # stage 1: views of buckets


def swap(one, two):
    one.grad, two.grad = two.grad, one.grad


def noise(p):
    p.grad = torch.randn_like(p)


def one_without_backward(t, i):
    t.n.zero_grad()
    t.n.last.bias.grad = torch.full_like(t.n.last.bias, 0.1)


refused = row.within(between_backward_and_step, same={1})
DOWN = r"blocks\.\d\.down\.bias"

refused("two gradients are swapped", lambda t, i: swap(*(b.down.bias for b in t.n.blocks)), refused={2: DOWN})
refused(
    "one gradient is given to another parameter too",
    lambda t, i: put(t.n.blocks[1].down.bias, t.n.blocks[0].down.bias.grad),
    refused={2: DOWN},
)
refused(
    "a gradient takes the place of one that was dropped",
    lambda t, i: drop(t.n.blocks[1].down.bias) or swap(*(block.down.bias for block in t.n.blocks)),
    refused={2: DOWN},
)
refused("zeros are put there", zeros_for_all, refused={2: NAME})
refused("noise is put there", lambda t, i: noise(t.n.last.weight), refused={2: r"last\.weight"})
refused("one comes without a backward", one_without_backward, refused={2: r"last\.bias"})

after("a gradient is scaled", lambda t, i: t.n.first.weight.grad.mul_(0.5))
after("all gradients are scaled", lambda t, i: torch._foreach_mul_([p.grad for p in t.n.parameters()], 0.5))
after("a row is masked", lambda t, i: t.n.first.weight.grad.__setitem__(0, 0.0))
after("a gradient is cloned", lambda t, i: put(t.n.first.weight, t.n.first.weight.grad.clone()))
after("a norm is taken", lambda t, i: t.note(t.n.first.weight.grad.norm().clone()), tolerance=1e-6)
copied = (r"first\.weight", "writes into a copy of")
refused("a view is masked", lambda t, i: t.n.first.weight.grad[0].zero_(), refused={2: copied, 3: copied})

test_rows = row.tests()
