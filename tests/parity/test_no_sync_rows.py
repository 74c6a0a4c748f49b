"""Gradients of backwards under no_sync: what a loop does to them before they are sent, and what keeps them."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import ranks
import zero
from rows import Net, Rows, adam, momentum, sgd
from runs import norm_of_gradients
from zoo import WIDTH, data

edited = Rows("B3: what is done to gradients under no_sync counts, or raises", __name__)

NAME = r"(first|last|blocks\.\d\.\w+)\.(weight|bias)"


def after_a_backward_under_no_sync(change, t, i):
    t.o.zero_grad()
    with t.m.no_sync():
        t.loss(i).backward()
    change(t, i)
    t.loss(10 + i).backward()
    t.o.step()


def gradients(t):
    return [p.grad for p in t.n.parameters() if p.grad is not None]


def replace(t, by):
    for p in t.n.parameters():
        p.grad = None if p.grad is None else by(p)


def halve_one(t, i):
    if t.n.first.weight.grad is not None:
        t.n.first.weight.grad *= 0.5


def clear_before_another_backward(t, i):
    with t.m.no_sync():
        loss = t.loss(20 + i)
        t.n.zero_grad()
        loss.backward()


edits = clears = edited.within(after_a_backward_under_no_sync)
# torch itself refuses what has another shape than the shard, and a shard beside the full gradient.
replaces = partial(edits, or_refused="assign a gradient of size|must match the size of tensor|" + NAME)

edits("gradients are halved", lambda t, i: [grad.mul_(0.5) for grad in gradients(t)])
edits("gradients are halved by foreach", lambda t, i: torch._foreach_mul_(gradients(t), 0.5))
edits("gradients are halved by their data", lambda t, i: [grad.data.mul_(0.5) for grad in gradients(t)])
replaces("halves of gradients are assigned", lambda t, i: replace(t, lambda p: p.grad * 0.5))
replaces("clones of gradients are assigned", lambda t, i: replace(t, lambda p: p.grad.clone()))
replaces("one gradient is halved by *=", halve_one)
replaces("weight decay is added", lambda t, i: replace(t, lambda p: p.grad + 0.1 * p.detach()))
edits("the module zeroes", lambda t, i: t.n.zero_grad(set_to_none=False), optim=momentum)
edits("the optimizer zeroes", lambda t, i: t.o.zero_grad(set_to_none=False), optim=momentum)
edits("gradients are clipped by value", lambda t, i: clip_grad_value_(t.n.parameters(), 0.01))
edits("gradients are clipped by their norm", lambda t, i: clip_grad_norm_(t.n.parameters(), 0.01))
edits("signs are taken", lambda t, i: [grad.sign_() for grad in gradients(t)])
alone = partial(edits, fsdp={"sharding_strategy": "NO_SHARD"}, same={3})  # there shards have the full shape
alone("halves are assigned where nothing is cut", lambda t, i: replace(t, lambda p: p.grad * 0.5))
edits("the norm is asked for", lambda t, i: t.note(norm_of_gradients(t.m)))
full = partial(edits, same=(), refused={3: NAME})
full("full gradients are asked for", lambda t, i: t.m.summon_full_params(with_grads=True).__enter__())
clears("the module is cleared", lambda t, i: t.n.zero_grad())
clears("the optimizer clears", lambda t, i: t.o.zero_grad(), optim=adam)
clears("one block is cleared", lambda t, i: t.n.blocks[1].zero_grad())
clears("one gradient is set to None", lambda t, i: setattr(t.n.first.weight, "grad", None))
clears("gradients are cleared between forward and backward of another", clear_before_another_backward)

test_edited = edited.tests()


kept = Rows("B10: at stage 3 what no_sync accumulated survives a backward through a frozen model", __name__)
frozen = kept.within(after_a_backward_under_no_sync)


def passed(t, *modules, through=None, sends=False, i=20):
    """A backward through the model, of which these modules are frozen."""
    inputs = t.batch(i).requires_grad_()
    for module in modules:
        module.requires_grad_(False)
    with nullcontext() if sends else t.m.no_sync():
        (through or t.m)(inputs).sum().backward()
    for module in modules:
        module.requires_grad_(True)
    t.note(inputs.grad)


def accumulate_after_it(t, i):
    passed(t, t.n)
    with t.m.no_sync():
        t.loss(30 + i).backward()


def take_the_gradient_of_inputs(t, i):
    t.n.requires_grad_(False)
    inputs = t.batch(20 + i).requires_grad_()
    t.note(torch.autograd.grad(t.m(inputs).sum(), inputs)[0])
    t.n.requires_grad_(True)


frozen("the model is frozen", lambda t, i: passed(t, t.n))
frozen("half of the model is frozen", lambda t, i: passed(t, t.n.first, t.n.blocks[0]))
frozen("one block is frozen", lambda t, i: passed(t, t.n.blocks[1]))
frozen("the root alone is frozen", lambda t, i: passed(t, t.n.first, t.n.last))
frozen("biases are frozen", lambda t, i: passed(t, *(p for p in t.n.parameters() if p.ndim == 1)))
frozen("the model is frozen and sends", lambda t, i: passed(t, t.n, sends=True), tolerance=1e-6)
frozen("the model is frozen twice", lambda t, i: [passed(t, t.n, i=k) for k in (20, 30)], optim=adam)
frozen("the model is frozen before another backward", accumulate_after_it)
frozen("the model is frozen for the gradient of its inputs", take_the_gradient_of_inputs)
frozen("the module inside is frozen and called", lambda t, i: passed(t, t.n, through=t.n, sends=True), tolerance=1e-6)

test_kept = kept.tests()


def alone(model, x):
    with model.no_sync():
        loss = model(x).square().mean()
    loss.backward()


def both(model, x):
    with model.no_sync():
        model(x).square().mean().backward()


def together(model, x):
    """DistributedDataParallel, which goes by the last forward, reduces as well."""
    with model.no_sync():
        loss = model(x).square().mean()
    (loss + model(x).mean()).backward()


def of_inputs(model, x):
    with model.no_sync():
        loss = model(x.requires_grad_()).square().mean()
    torch.autograd.grad(loss, x)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_a_forward_alone_under_no_sync_is_told_once(rank, world, stage):
    model, optimizer = zero.setup(Net(), sgd, stage=stage)
    told = []
    for accumulate in (both, together, of_inputs, alone, alone):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accumulate(model, data(4, WIDTH, rank=rank, step=0))
            model(data(4, WIDTH, rank=rank, step=1)).square().mean().backward()
        told.append([str(one.message) for one in caught if one.filename == __file__])
        optimizer.step()
        optimizer.zero_grad()
    assert told[:3] == [[], [], []] and told[4] == []
    assert len(told[3]) == 1 and "Run both under zero.no_sync(model)" in told[3][0]
