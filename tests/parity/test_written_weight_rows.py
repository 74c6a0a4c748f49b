"""Weights that are written between a forward and its backward are found by torch, as under DistributedDataParallel."""

import copy
import io
from collections import OrderedDict

import torch
from torch import Tensor

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
between("a full state is loaded", lambda t, i: zero.load_full_state_dict(t.m, zero.full_state_dict(t.m, to=None)))
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


def then(act):
    """Trains after a write into what the wrapper's state_dict() has returned."""

    def program(t, i):
        with torch.no_grad():
            act(t.m.state_dict(), t)
        t.update(t.loss(i))

    return program


def follows(average):
    """An average of dictionaries, as timm and YOLOX keep it. average(t): the model whose state_dict() is written."""

    def program(t, i):
        if i == 0:
            t.kept.average = average(t)
        t.update(t.loss(i))
        new = t.m.state_dict()
        with torch.no_grad():
            for name, value in t.kept.average.state_dict().items():
                value.copy_(0.9 * value + 0.1 * new[f"module.{name.removeprefix('module.')}"])
        t.note(sum(value.double().sum() for value in t.kept.average.state_dict().values()))

    return program


def plain_copy(t):
    copied = Net()
    copied.load_state_dict({name.removeprefix("module."): value for name, value in t.m.state_dict().items()})
    return copied


def wrapped_copy(t):
    return plain_copy(t) if t.stage < 3 else zero.FSDP(plain_copy(t))


def keeps_the_best(t, i):
    """Copies of a dictionary are the user's own."""
    t.update(t.loss(i))
    kept = copy.deepcopy(t.m.state_dict()) if i else {k: v.clone() for k, v in t.m.state_dict().items()}
    for value in kept.values():
        value.mul_(2)
    saved = io.BytesIO()
    torch.save(t.m.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert {type(value) for value in loaded.values()} == {Tensor} and type(loaded) is OrderedDict
    t.note(sum(value.double().sum() for value in (*kept.values(), *loaded.values())))


def weights_of_trained_ones(t, i):
    t.update(t.loss(i))
    kept = {name: value for name, value in t.m.state_dict(keep_vars=True).items() if value.requires_grad}
    t.note(sum(value.double().sum() for value in kept.values()))


@torch.no_grad()
def scaled(weights):
    for value in weights.values():
        value.mul_(0.9)


READ_ONLY = {"or_refused": r"model\.named_parameters"}
row = Rows("what is written into state_dict() counts", __name__, **READ_ONLY)
row.of("each value is scaled", then(lambda w, t: [value.mul_(0.9) for value in w.values()]))
row.of("a list of them is scaled", then(lambda w, t: torch._foreach_mul_([*w.values()], 0.9)))
row.of("one is filled", then(lambda w, t: w["module.last.bias"].fill_(1.0)))
row.of("one is set", then(lambda w, t: w["module.last.weight"].__setitem__(0, 1.0)))
row.of("a view of one is scaled", then(lambda w, t: w["module.last.weight"].view(-1)[1:].mul_(0.5)))
row.of("the data of one is scaled", then(lambda w, t: w["module.last.weight"].data.mul_(0.5)))
row.of("one is the output of a sum", then(lambda w, t: torch.add(w["module.last.bias"], 1, out=w["module.last.bias"])))
row.of("one is added to by an operator", then(lambda w, t: w["module.last.bias"].__iadd__(1)))
row.of("parameters are scaled", lambda t, i: t.update(t.loss(i)) or scaled(t.m.state_dict(keep_vars=True)))
row.of("an average that is wrapped follows", follows(wrapped_copy))
row.of("a plain average follows", follows(plain_copy), or_refused=None)
row.of("the best is kept", keeps_the_best, or_refused=None)
row.of("trained ones are chosen", weights_of_trained_ones, or_refused=None)
test_state_dicts = row.tests()
