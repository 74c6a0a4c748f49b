"""Gradients of parameters: what stands in `param.grad` is the truth, whoever put it there; they are asked for,
looped over, and clipped; and what a loop does to those of backwards under no_sync, before they are sent."""

import warnings
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam

import gpus
import ranks
import zero
from assertions import close, same
from rows import Net, Rows, adam, changed, momentum, sgd, trains
from runs import norm_of_gradients
from zoo import WIDTH, data

row = Rows("B1: what stands in param.grad is the truth", __name__)

NAME = r"(first|last|blocks\.\d\.\w+)\.(weight|bias)"


def each(module, change):
    for p in module.parameters():
        if p.grad is not None:
            change(p)


def put(p, grad):
    p.grad = grad


def drop(p):
    p.grad = None


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
between("every gradient is deleted", lambda t, i: each(t.n, lambda p: delattr(p, "grad")))
between("every gradient is zeroed", lambda t, i: each(t.n, lambda p: p.grad.zero_()), optim=momentum)
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


zeroing = row.within(with_zeros)
for how in ({"fused": True}, {"foreach": True}):
    for kind in (partial(SGD, lr=0.1, momentum=0.9, **how), partial(Adam, lr=0.01, **how)):
        title = " ".join([*how, kind.func.__name__])
        zeroing(f"{title} clears", lambda t, i: None, optim=kind)
        zeroing(f"{title} clears and steps", lambda t, i: i == 1 and t.o.zero_grad(set_to_none=False), optim=kind)


def between_backward_and_step(change, t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    change(t, i)
    t.o.step()


after = row.within(between_backward_and_step, optim=momentum)

after("one layer is cleared every other time", lambda t, i: each(t.n.last, drop if i % 2 else lambda p: p.grad.zero_()))
after("one layer is zeroed", lambda t, i: each(t.n.last, lambda p: p.grad.zero_()))
after("every gradient of a bad batch is dropped", lambda t, i: i == 1 and each(t.n, drop))
after("the optimizer zeroes", lambda t, i: i == 1 and t.o.zero_grad(set_to_none=False))
after("a validation clears one block", lambda t, i: torch.no_grad()(t.loss)(10 + i) and t.n.blocks[1].zero_grad())
after("another step comes", lambda t, i: t.o.step())
after("gradients are detached in place", lambda t, i: each(t.n, lambda p: p.grad.detach_()))
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


def validate(t, i):
    t.o.zero_grad()
    with torch.no_grad():
        t.loss(10 + i)


kept = row.within(put_back_before_the_step, optim=momentum)

kept("gradients cleared by the module are", lambda t, i: t.n.zero_grad())
kept("gradients cleared by the optimizer are", lambda t, i: t.o.zero_grad())
kept("gradients cleared for a validation are", validate)
kept("gradients cleared after a step are", lambda t, i: t.o.step() or t.n.zero_grad())
kept("a gradient hidden from a step is", lambda t, i: drop(t.n.last.bias) or t.o.step())
other = lambda t, i: t.n.zero_grad() or t.loss(10 + i).backward()  # noqa: E731
kept("gradients of the batch before are", other, same={2, 3})  # stage 1: views of buckets


def swap(one, two):
    one.grad, two.grad = two.grad, one.grad


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
refused(
    "noise is put there",
    lambda t, i: put(t.n.last.weight, torch.randn_like(t.n.last.weight)),
    refused={2: r"last\.weight"},
)
refused(
    "one comes without a backward",
    lambda t, i: t.n.zero_grad() or put(t.n.last.bias, torch.full_like(t.n.last.bias, 0.1)),
    refused={2: r"last\.bias"},
)

after("a gradient is scaled", lambda t, i: t.n.first.weight.grad.mul_(0.5))
after("all gradients are scaled", lambda t, i: torch._foreach_mul_([p.grad for p in t.n.parameters()], 0.5))
after("a row is masked", lambda t, i: t.n.first.weight.grad.__setitem__(0, 0.0))
after("a gradient is cloned", lambda t, i: put(t.n.first.weight, t.n.first.weight.grad.clone()))
after("a norm is taken", lambda t, i: t.note(t.n.first.weight.grad.norm().clone()), tolerance=1e-6)
copied = (r"first\.weight", "writes into a copy of")
refused("a view is masked", lambda t, i: t.n.first.weight.grad[0].zero_(), refused={2: copied, 3: copied})

test_shown = row.tests()


row = Rows("B3: gradients by hand", __name__)


def frozen():
    """All but the last layer, from the beginning: torch steps what has a gradient, whether it requires one or not."""
    return changed(Net(), lambda net: [part.requires_grad_(False) for part in (net.first, net.blocks)])


def evolve(t, i):
    """The same on every rank, as of an evolution strategy that draws by one seed."""
    with torch.no_grad():
        t.loss(i)
    noise = gpus.generator(i)
    for p in t.n.parameters():
        p.grad = torch.randn(p.shape, generator=noise)


def by_hand(t, i):
    evolve(t, i)
    t.o.step()
    t.o.zero_grad()


def once_by_hand(t, i):
    if i == 1:
        by_hand(t, i)
    else:
        t.update(t.loss(i))


ONE = {"same": {1}, "refused": {2: r"last\.bias .*evolution strategies"}, "net": frozen}
row.of("an evolution strategy trains what is frozen", by_hand, **ONE, optim=momentum)
row.of("an evolution strategy trains what is frozen by Adam", by_hand, **ONE, optim=adam)
row.of("a step by hand comes between two of backward", once_by_hand, **ONE, optim=momentum)


@row(same={1}, refused={2: "evolution strategies"}, net=frozen)
def a_shard_is_given_a_gradient_without_backward(t, i):
    if t.stage == 2:
        for p in t.n.parameters():
            t.o.part(p).grad = torch.ones_like(t.o.part(p))
        t.o.step()
    else:
        by_hand(t, i)


test_by_hand = row.tests()


@pytest.mark.parametrize("how", ["gradients by hand", "unfrozen"])
@ranks.raises(2, ValueError, "parameters that a step changes")
def test_what_one_rank_alone_trains_is_refused_on_every_rank(rank, world, how):
    net = frozen()
    optimizer = zero.OSS(net.parameters(), momentum)
    for i in range(2):
        for p in net.last.parameters():
            p.grad = torch.ones_like(p)
        if i and rank:
            for p in net.first.parameters():
                p.requires_grad_(how == "unfrozen")
                p.grad = torch.ones_like(p)
        optimizer.step()


OWN = r"(?i)shard|unit|FSDP"  # of zero's own errors, not of torch's
LATER = {"or_refused": OWN}


UNITS = {
    "net": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)),
    "options": {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
}
"""Of units alone: the root has no parameters."""


def asked(t, i):
    t.update(t.loss(i).backward(inputs=list(t.m.parameters())))


def asked_under_no_sync(t, i):
    with t.m.no_sync():
        t.loss(i).backward(inputs=list(t.m.parameters()))
    asked(t, 10 + i)


def listed_before(t, i):
    params = list(t.m.parameters())
    t.update(t.loss(i).backward(inputs=params))


def gradients(unused: bool):
    def noted(t, i):
        for gradient in torch.autograd.grad(t.loss(i), [*t.m.parameters()], allow_unused=unused):
            t.note(torch.tensor(torch.nan) if gradient is None else gradient)

    return noted


def weighed(t, i):
    loss = t.loss(i)
    t.update(loss / t.note(torch.autograd.grad(loss, t.n.last.weight, retain_graph=True)[0].norm()))


def seen(t, i):
    hook = register_multi_grad_hook([*t.m.parameters()], lambda all: [t.note(one.norm()) for one in all])
    trains(t, i)
    hook.remove()


def scaled_by_hooks(t, i):
    for p in t.m.parameters() if i == 0 else ():
        p.register_hook(lambda gradient: 0.5 * gradient)
    trains(t, i)


def called_around(t, i):
    t.update(t.note((t.n if t.stage else t.m)(t.batch(i)).square().mean()))


row = Rows("B7: gradients of parameters that are asked for", __name__)
row.of("backward is given all parameters of units", asked, **UNITS, **LATER)
row.of("backward is given those of units and the root", asked, or_refused=OWN)
row.of("backward under no_sync is given all parameters", asked_under_no_sync, **UNITS, **LATER)
row.of(
    "one backward of two losses is given all parameters",
    lambda t, i: t.update(torch.autograd.backward([t.loss(i), t.loss(10 + i)], inputs=list(t.m.parameters()))),
    **UNITS,
    tolerance=1e-6,
    **LATER,
)
row.of("backward is given what was listed before the forward", listed_before, **UNITS, or_refused=OWN)
row.of("gradients of units are asked for, unused or not", gradients(unused=True), **UNITS, steps=1, **LATER)
row.of("gradients of units and root are asked for, unused or not", gradients(unused=True), steps=1, **LATER)
row.of("gradients of all parameters are asked for", gradients(unused=False), steps=1, **LATER)
row.of("a loss is weighed by the last layer's gradient", weighed, or_refused=OWN)
row.of("a hook sees the gradients of units", seen, **UNITS, **LATER)
row.of("a hook sees those of units and root", seen, **LATER)
row.of("a module is called around the wrapper", called_around)
row.of("hooks of parameters scale their gradients", scaled_by_hooks, **UNITS)
test_asked = row.tests()


def every(act):
    return lambda t, i: t.update(t.loss(i), lambda t: [act(p) for p in t.m.parameters()])


def of_each(act, params=lambda t: t.m.parameters()):
    """What is done after backward with the gradients that are on this rank."""
    return lambda t, i: t.update(t.loss(i), lambda t: act(t, [p for p in params(t) if p.grad is not None]))


row = Rows("C4: p.grad is there where a rank owns nothing of a parameter", __name__)
row.of("every gradient is halved", every(lambda p: p.grad.mul_(0.5)))
row.of("every gradient's data is clamped", every(lambda p: p.grad.data.clamp_(-0.01, 0.01)), optim=momentum)
row.of("weight decay is added by hand", every(lambda p: p.grad.add_(p.detach(), alpha=0.1)))
row.of("what is not a number is replaced", every(lambda p: torch.nan_to_num_(p.grad)), optim=adam)
row.of("every gradient is replaced by half a copy", every(lambda p: setattr(p, "grad", 0.5 * p.grad.clone())))
row.of("every gradient has its parameter's shape", every(lambda p: p.grad.reshape(p.shape)))
row.of("norms are logged", of_each(lambda t, params: [t.note(p.grad.norm().clone()) for p in params]), tolerance=1e-6)
row.of("the share of zeros is logged", of_each(lambda t, params: [t.note((p.grad == 0).sum()) for p in params]))
row.of("all are halved at once", of_each(lambda t, _: torch._foreach_mul_([p.grad for p in t.m.parameters()], 0.5)))
row.of(
    "what nobody uses has no gradient",
    of_each(lambda t, _: t.note(torch.tensor([p.grad is None for p in t.m.parameters()]))),
    net=lambda: changed(Net(), lambda n: setattr(n, "unused", nn.Linear(2, 2))),
    ddp={"find_unused_parameters": True},
)
test_none = row.tests()


class Small(nn.Sequential):
    """By default of the shape of the README's own first script: a rank has a slice of one parameter alone."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        layers = [nn.Linear(*pair, bias=bias) for pair in pairwise((WIDTH, *(widths or (32, 3))))]
        super().__init__(*(of_each for layer in layers for of_each in (layer, nn.Tanh())))


def by(factor):
    """Each gradient is multiplied by factor(t, its number)."""
    return lambda t, params: [p.grad.mul_(factor(t, k)) for k, p in enumerate(params)]


NETS = {
    "units": Net,
    "a small net": Small,
    "one matrix": lambda: Small(12, bias=False),
    "one output": lambda: Small(1),
    "biases": lambda: changed(Small(), lambda n: [n[k].weight.requires_grad_(False) for k in (0, 2)]),
    "a net of which half is frozen": lambda: changed(Small(32, 3, 3), lambda n: n[0].requires_grad_(False)),
    "a wide net": lambda: Small(256, 6),
}
"""Of some of which one rank has all."""
TWINS = {"net": lambda: Small(WIDTH, WIDTH)}
SAME, NORM = {"net": Small}, {"net": Small, "tolerance": max(1e-6, gpus.ROUNDING)}
FIRST = lambda t: t.n[0].parameters()  # noqa: E731
row = Rows("B9: torch's clip_grad_norm_", __name__)
for title, net in NETS.items():
    clipped = of_each(lambda t, params: clip_grad_norm_(params, 0.01))
    row.of(f"the norm of {title} is clipped", clipped, **NORM | {"net": net}, optim=momentum)
row.of("the norm is below the limit", of_each(lambda t, params: clip_grad_norm_(params, 1e9)), **NORM)
row.of("every gradient is clipped by value", of_each(lambda t, params: clip_grad_value_(params, 0.01)), **SAME)
row.of("all gradients are halved", of_each(by(lambda t, k: 0.5)), **SAME, optim=adam)
row.of("all gradients but their signs are dropped", of_each(lambda t, params: [p.grad.sign_() for p in params]), **SAME)
row.of("one layer is scaled by hand", of_each(by(lambda t, k: 0.1), FIRST), **SAME)
row.of(
    "each parameter has its factor",
    of_each(lambda t, _: [p.grad.mul_(1 / (2 + k)) for k, p in enumerate(t.m.parameters()) if p.grad is not None]),
    **SAME,
)
row.of("one of two layers is scaled", of_each(by(lambda t, k: 0.1), FIRST), **TWINS)
row.of("the norm is of one layer", of_each(lambda t, params: clip_grad_norm_(params, 0.01), FIRST), **NORM)
row.of("each has its norm", of_each(lambda t, params: [clip_grad_norm_(p, 0.01) for p in params]), **NORM)
row.of("the largest is the norm", of_each(lambda t, params: clip_grad_norm_(params, 0.01, torch.inf)), **NORM)
row.of("it runs foreach", of_each(lambda t, params: clip_grad_norm_(params, 0.01, foreach=True)), **NORM)
test_scaled = row.tests()


# Gradients of backwards under no_sync: what a loop does to them before they are sent, and what keeps them.


edited = Rows("B3: what is done to gradients under no_sync counts, or raises", __name__)


def after_a_backward_under_no_sync(change, t, i):
    t.o.zero_grad()
    with t.m.no_sync():
        t.loss(i).backward()
    change(t, i)
    t.loss(10 + i).backward()
    t.o.step()


def all_gradients(t):
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

edits("gradients are halved", lambda t, i: [grad.mul_(0.5) for grad in all_gradients(t)])
edits("gradients are halved by foreach", lambda t, i: torch._foreach_mul_(all_gradients(t), 0.5))
edits("gradients are halved by their data", lambda t, i: [grad.data.mul_(0.5) for grad in all_gradients(t)])
replaces("halves of gradients are assigned", lambda t, i: replace(t, lambda p: p.grad * 0.5))
replaces("clones of gradients are assigned", lambda t, i: replace(t, lambda p: p.grad.clone()))
replaces("one gradient is halved by *=", halve_one)
replaces("weight decay is added", lambda t, i: replace(t, lambda p: p.grad + 0.1 * p.detach()))
edits("the module zeroes", lambda t, i: t.n.zero_grad(set_to_none=False), optim=momentum)
edits("the optimizer zeroes", lambda t, i: t.o.zero_grad(set_to_none=False), optim=momentum)
edits("gradients are clipped by value", lambda t, i: clip_grad_value_(t.n.parameters(), 0.01))
edits("gradients are clipped by their norm", lambda t, i: clip_grad_norm_(t.n.parameters(), 0.01))
edits("signs are taken", lambda t, i: [grad.sign_() for grad in all_gradients(t)])
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


def after_an_averaged_one(change, t, i):
    """What no_sync adds to an average is written together with that."""
    t.o.zero_grad()
    t.loss(i).backward()
    with t.m.no_sync():
        t.loss(10 + i).backward()
    change(t, i)
    t.loss(20 + i).backward()
    t.o.step()


# Sums of three that are averaged once, and not twice, differ in their last bits.
added = partial(edited.within(after_an_averaged_one), tolerance=1e-6, optim=momentum)
added("an average is added to", lambda t, i: None)
added("an average and what was added are zeroed", lambda t, i: t.o.zero_grad(set_to_none=False))
added("an average and what was added are zeroed by foreach", lambda t, i: torch._foreach_zero_(all_gradients(t)))
added("an average and what was added are dropped", lambda t, i: t.n.blocks[1].zero_grad())
halved = partial(added, same={1, 3}, refused={2: NAME})
halved("an average and what was added are halved", lambda t, i: [grad.mul_(0.5) for grad in all_gradients(t)])
halved("... by their data", lambda t, i: [grad.data.mul_(0.5) for grad in all_gradients(t)])


@edited(tolerance=1e-6)
def gradients_of_inputs_are_asked_for_between_backwards(t, i):
    """They reduce nothing, and leave gradients of parameters as they are, also those that no_sync has left."""
    t.backward(t.loss(i))
    for asked in (torch.autograd.grad, lambda loss, x: loss.backward(inputs=[x])):
        with t.m.no_sync():
            t.backward(t.loss(10 + i))
        inputs = t.batch(20 + i).requires_grad_()
        before = zero.traffic().reduce
        found = asked(t.forward(inputs).square().mean(), inputs)
        assert zero.traffic().reduce == before
        t.note(inputs.grad if found is None else found[0])
    t.update(t.loss(30 + i))


def fails(t, i):
    """A backward that reaches the last block alone, and raises."""

    def raises(*_):
        raise ZeroDivisionError

    handle = t.n.blocks[1].register_forward_pre_hook(lambda _, args: args[0].register_hook(raises) and None)
    loss = t.loss(i)
    handle.remove()
    with pytest.raises(ZeroDivisionError):
        loss.backward()


@edited(optim=momentum)
def a_backward_under_no_sync_fails(t, i):
    with t.m.no_sync():
        t.loss(i).backward()
        fails(t, 10 + i)
    t.loss(20 + i).backward()
    t.update(None)


def fails_and_goes_on(t, i, cleared=False, steps=False):
    with t.m.no_sync():
        t.loss(i).backward()
    fails(t, 10 + i)
    if cleared:
        t.o.zero_grad()
    if not steps:
        t.loss(20 + i).backward()
    t.update(None)


lost = dict.fromkeys((1, 2, 3), "not whole|not reduced|not averaged")
whole = partial(edited.of, steps=1, same=())
whole(
    "a backward that took what was accumulated fails, and another follows", fails_and_goes_on, refused={0: "", **lost}
)
steps = partial(fails_and_goes_on, steps=True)
whole("a backward that took what was accumulated fails, and a step follows", steps, refused=lost)


class Trained:
    """A model at a stage, by the words of a Loop."""

    def __init__(self, rank, stage, optim=momentum):
        torch.manual_seed(0)
        self.n, self._rank = Net(), rank
        self.m, self.o = zero.setup(self.n, optim(self.n.parameters()), stage=stage)

    def loss(self, i):
        return self.m(data(4, WIDTH, rank=self._rank, step=i)).square().mean()

    def weights(self):
        self.o.step()
        return zero.full_state_dict(self.m, to=None)


def freezes_what_has_a_gradient(t):
    t.loss(0).backward()
    t.n.first.weight.requires_grad_(False)
    t.loss(1).backward()


def keeps_a_gradient_of_before(t):
    t.loss(0).backward()
    kept = [(p, p.grad) for p in t.n.first.parameters()]
    t.n.first.zero_grad()
    t.loss(1).backward()
    for p, grad in kept:
        p.grad = p.grad - 0.5 * grad


@pytest.mark.parametrize("program", [freezes_what_has_a_gradient, keeps_a_gradient_of_before])
@ranks.on(2)
def test_gradients_of_before_are_left_alone_at_each_stage_alike(rank, world, program):
    found = []
    for stage in (1, 2, 3):
        program(t := Trained(rank, stage))
        found.append(t.weights())
    for one in found[:-1]:
        for name, weight in one.items():
            assert close(weight, found[-1][name], 1e-6), name


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_a_group_that_is_added_after_no_sync_leaves_gradients_unreduced(rank, world, stage):
    t = Trained(rank, stage)
    with zero.no_sync(t.m):
        t.loss(0).backward()
    t.o.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with torch.no_grad():
        t.loss(1)
    assert "no_sync()" in ranks.refusal(t.o.step)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_after_a_backward_that_failed_the_next_is_right_once_gradients_are_cleared(rank, world, stage):
    found = []
    for failing in (True, False):
        t = Trained(rank, stage)
        if failing:
            with zero.no_sync(t.m):
                t.loss(0).backward()
            fails(t, 1)
            t.o.zero_grad()
        t.loss(2).backward()
        found.append(t.weights())
    same(*found, "the weights")


test_edited = edited.tests()


surviving = Rows("B10: at stage 3 what no_sync accumulated survives a backward through a frozen model", __name__)
through_frozen = surviving.within(after_a_backward_under_no_sync)


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


through_frozen("the model is frozen", lambda t, i: passed(t, t.n))
through_frozen("half of the model is frozen", lambda t, i: passed(t, t.n.first, t.n.blocks[0]))
through_frozen("one block is frozen", lambda t, i: passed(t, t.n.blocks[1]))
through_frozen("the root alone is frozen", lambda t, i: passed(t, t.n.first, t.n.last))
through_frozen("biases are frozen", lambda t, i: passed(t, *(p for p in t.n.parameters() if p.ndim == 1)))
through_frozen("the model is frozen and sends", lambda t, i: passed(t, t.n, sends=True), tolerance=1e-6)
through_frozen("the model is frozen twice", lambda t, i: [passed(t, t.n, i=k) for k in (20, 30)], optim=adam)
through_frozen("the model is frozen before another backward", accumulate_after_it)
through_frozen("the model is frozen for the gradient of its inputs", take_the_gradient_of_inputs)
through_frozen(
    "the module inside is frozen and called", lambda t, i: passed(t, t.n, through=t.n, sends=True), tolerance=1e-6
)

test_kept = surviving.tests()


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
