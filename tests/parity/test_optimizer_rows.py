"""Optimizers of a script's own: what their constructors, their attributes and those of parameters say to a step."""

import threading
from functools import partial

import torch
from torch import Tensor
from torch.optim import SGD

from optimizers import ByParameter
from rows import Rows, momentum, trains

row = Rows("B9: an optimizer of the script's own", __name__)


class Scaled(ByParameter):
    """Its steps read what the script, its constructor and its own steps write on it, and on parameters."""

    def __init__(self, params, lr=0.1, decay=0.0, change=None, scales=None):
        super().__init__(params, lr=lr)
        self.keep, self._private, self.change, self.count, self.scales = 1 - decay, 1.0, change, 0, scales
        self.lock = threading.Lock()  # which cannot be copied

    def step(self, closure=None):
        super().step(closure)
        self.count += 1
        return {"steps": self.count}

    def step_one(self, param, state, group):
        change = param.grad if self.change is None else self.change(param.grad)
        scale = self.keep * self._private * getattr(param, "scale", 1.0) / (1 + self.count)
        param.sub_(change, alpha=group["lr"] * scale)


class Public(Scaled):
    scale = 1.0

    def __init__(self, params):
        super().__init__(params)
        self.factor = 1.0

    def step_one(self, param, state, group):
        param.sub_(param.grad, alpha=group["lr"] * self.factor)


def written_before(change, t, i):
    change(t, i)
    trains(t, i)


before = row.within(written_before)
before("the factor of an optimizer is", lambda t, i: setattr(t.o, "factor", 0.5**i), optim=Public)
before("a private attribute is", lambda t, i: setattr(t.o, "_private", 0.5**i), optim=Scaled)
before("the scale of a parameter is", lambda t, i: setattr(t.n.first.weight, "scale", 0.5**i), optim=Scaled)


def once(t, i):
    if i == 0:
        t.n.first.weight.scale = 0.25
    trains(t, i)


row.of("a scale that a parameter has from the first step on", once, optim=Scaled)


def stepped_before(params):
    optimizer = Scaled(params)
    optimizer.count = 3
    return optimizer


for built in (False, True):
    how = "given when it is built" if built else "given as a class"
    row.of(f"an argument of which the constructor makes another, {how}", optim=partial(Scaled, decay=0.3), built=built)
row.of("an optimizer goes on counting", optim=stepped_before, built=True)


def change(gradient: Tensor) -> Tensor:
    return gradient * 1.0


by_element = change


def change(gradient: Tensor) -> Tensor:  # of the same name
    return gradient / gradient.norm()


@row(optim=partial(Scaled, change=by_element))
def two_functions_of_one_name_are_told_apart(t, i):
    """The other one needs whole parameters, and comes after the first was measured."""
    if i == 0:
        t.kept.other = type(t)(_of_norms, t.stage, t.rank, t.folder)
    trains(t, i)
    trains(t.kept.other, i)
    t.note(t.kept.other.n.first.weight.norm().detach())


row.of("functions that need whole parameters", optim=partial(Scaled, change=change))
_of_norms = row.rows[-1]


@row(optim=Scaled)
def what_a_step_returns(t, i):
    t.backward(t.loss(i))
    t.note(torch.tensor(float(t.o.step()["steps"])))
    t.o.zero_grad()


class Nothing(SGD):
    """Clears as torch does, by a method of its own."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


row.of("a class that clears gradients itself", optim=partial(Nothing, lr=0.1, momentum=0.9))


# Gradients that a loop takes away, and puts back: several losses, as of PCGrad.


def of_two_losses(take, t, i):
    """Those of the first layer for each loss, while the others add up."""
    params, aside = [*t.n.first.parameters()], []
    for k in range(2):
        t.loss(2 * i + k).backward()
        aside.append([take(param) for param in params])
        for param in params:
            param.grad = None
    for param, one, two in zip(params, *aside, strict=True):
        param.grad = 0.75 * one + 0.25 * two
    t.update(None)


for name, take in {
    "gradients are kept detached": lambda param: param.grad.detach(),
    "the data of gradients are kept": lambda param: param.grad.data,
    "gradients are kept": lambda param: param.grad,
}.items():
    row.of(name, partial(of_two_losses, take), optim=momentum, tolerance=1e-6)


test_rows = row.tests()
