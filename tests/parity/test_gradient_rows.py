"""Gradients of parameters that are asked for, looped over, and clipped."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gpus
import ranks
import zero
from assertions import close
from rows import WIDTH, Net, Rows, adam, changed, momentum, trains
from zoo import data

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


def asked_of_two(t, i):
    losses = [t.loss(i), t.loss(10 + i)]
    t.update(torch.autograd.backward(losses, inputs=list(t.m.parameters())))


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


row = Rows("B7: gradients of parameters that are asked for", __name__)
row.of("backward is given all parameters of units", asked, **UNITS, **LATER)
row.of("backward is given those of units and the root", asked, or_refused=OWN)
row.of("backward under no_sync is given all parameters", asked_under_no_sync, **UNITS, **LATER)
row.of("one backward of two losses is given all parameters", asked_of_two, **UNITS, tolerance=1e-6, **LATER)
row.of("backward is given what was listed before the forward", listed_before, **UNITS, or_refused=OWN)
row.of("gradients of units are asked for, unused or not", gradients(unused=True), **UNITS, steps=1, **LATER)
row.of("gradients of units and root are asked for, unused or not", gradients(unused=True), steps=1, **LATER)
row.of("gradients of all parameters are asked for", gradients(unused=False), steps=1, **LATER)
row.of("a loss is weighed by the last layer's gradient", weighed, or_refused=OWN)
row.of("a hook sees the gradients of units", seen, **UNITS, **LATER)
row.of("a hook sees those of units and root", seen, **LATER)
row.of("hooks of parameters scale their gradients", scaled_by_hooks, **UNITS)
test_asked = row.tests()


def every(act):
    """What is done with each parameter after backward."""
    return lambda t, i: t.update(t.loss(i), lambda t: [act(p) for p in t.m.parameters()])


def each(act, params=lambda t: t.m.parameters()):
    """What is done after backward with the gradients that are on this rank."""
    return lambda t, i: t.update(t.loss(i), lambda t: act(t, [p for p in params(t) if p.grad is not None]))


row = Rows("C4: p.grad is there where a rank owns nothing of a parameter", __name__)
row.of("every gradient is halved", every(lambda p: p.grad.mul_(0.5)))
row.of("every gradient's data is clamped", every(lambda p: p.grad.data.clamp_(-0.01, 0.01)), optim=momentum)
row.of("weight decay is added by hand", every(lambda p: p.grad.add_(p.detach(), alpha=0.1)))
row.of("what is not a number is replaced", every(lambda p: torch.nan_to_num_(p.grad)), optim=adam)
row.of("every gradient is replaced by half a copy", every(lambda p: setattr(p, "grad", 0.5 * p.grad.clone())))
row.of("every gradient has its parameter's shape", every(lambda p: p.grad.reshape(p.shape)))
row.of("norms are logged", each(lambda t, params: [t.note(p.grad.norm().clone()) for p in params]), tolerance=1e-6)
row.of("the share of zeros is logged", each(lambda t, params: [t.note((p.grad == 0).sum()) for p in params]))
row.of("all are halved at once", each(lambda t, _: torch._foreach_mul_([p.grad for p in t.m.parameters()], 0.5)))
row.of(
    "what nobody uses has no gradient",
    each(lambda t, _: t.note(torch.tensor([p.grad is None for p in t.m.parameters()]))),
    net=lambda: changed(Net(), lambda n: setattr(n, "unused", nn.Linear(2, 2))),
    ddp={"find_unused_parameters": True},
)
test_none = row.tests()


B9 = "B9: torch's clip_grad_norm_"


class Small(nn.Sequential):
    """By default of the shape of the README's own first script: a rank has a slice of one parameter alone."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        layers = [nn.Linear(*pair, bias=bias) for pair in pairwise((WIDTH, *(widths or (32, 3))))]
        super().__init__(*(each for layer in layers for each in (layer, nn.Tanh())))


NETS = {
    "units": Net,
    "small": Small,
    "one matrix": lambda: Small(12, bias=False),
    "one output": lambda: Small(1),
    "biases": lambda: changed(Small(), lambda n: [n[k].weight.requires_grad_(False) for k in (0, 2)]),
    "half is frozen": lambda: changed(Small(32, 3, 3), lambda n: n[0].requires_grad_(False)),
    "one is unused": lambda: changed(Small(), lambda n: n.register_parameter("unused", nn.Parameter(torch.zeros(20)))),
    "wide": lambda: Small(256, 6),
    "two alike": lambda: Small(WIDTH, WIDTH),
}


def clipped(rank, net, partition, stage):
    torch.manual_seed(0)
    model, optimizer = zero.setup(NETS[net](), momentum, stage=stage, partition=partition)
    for i in range(6):
        model(data(4, WIDTH, rank=rank, step=i)).square().sum().backward()
        assert clip_grad_norm_(model.parameters(), 0.01) > 0.01
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(model, to=None)


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("net", NETS)
@ranks.on("world")
def test_torchs_clip_grad_norm_is_that_of_stage_0(rank, world, net, partition):
    """Also where one rank has all."""
    # DistributedDataParallel does not train what is unused by itself.
    expected = clipped(rank, net, "auto", 1 if net == "one is unused" else 0)
    for stage in (2, 3):
        found = clipped(rank, net, partition, stage)
        for name, value in expected.items():
            assert close(found[name], value, 1e-5), f"{name} at stage {stage}"


def by(factor):
    """Each gradient is multiplied by factor(t, its number)."""
    return lambda t, params: [p.grad.mul_(factor(t, k)) for k, p in enumerate(params)]


SAME, NORM = {"net": Small}, {"net": Small, "tolerance": max(1e-6, gpus.ROUNDING)}
FIRST = lambda t: t.n[0].parameters()  # noqa: E731
row = Rows(B9, __name__)
row.of("the norm is below the limit", each(lambda t, params: clip_grad_norm_(params, 1e9)), **NORM)
row.of("every gradient is clipped by value", each(lambda t, params: clip_grad_value_(params, 0.01)), **SAME)
row.of("all gradients are halved", each(by(lambda t, k: 0.5)), **SAME, optim=adam)
row.of("all gradients but their signs are dropped", each(lambda t, params: [p.grad.sign_() for p in params]), **SAME)
row.of("one layer is scaled by hand", each(by(lambda t, k: 0.1), FIRST), **SAME)
row.of(
    "each parameter has its factor",
    each(lambda t, _: [p.grad.mul_(1 / (2 + k)) for k, p in enumerate(t.m.parameters()) if p.grad is not None]),
    **SAME,
)
row.of("one of two layers is scaled", each(by(lambda t, k: 0.1), FIRST), **SAME | {"net": NETS["two alike"]})
row.of("the norm is of one layer", each(lambda t, params: clip_grad_norm_(params, 0.01), FIRST), **NORM)
row.of("each has its norm", each(lambda t, params: [clip_grad_norm_(p, 0.01) for p in params]), **NORM)
row.of("the largest is the norm", each(lambda t, params: clip_grad_norm_(params, 0.01, torch.inf)), **NORM)
row.of("it runs foreach", each(lambda t, params: clip_grad_norm_(params, 0.01, foreach=True)), **NORM)
test_scaled = row.tests()
