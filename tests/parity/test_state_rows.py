"""Stages 1 and 2: `optimizer.state` is a live mapping over what the inner optimizer keeps, by the user's parameters."""

from collections import defaultdict

import torch

from rows import Rows, adam, momentum

row = Rows("B2: writes into optimizer.state count", __name__)

NAME = r"(first|last|blocks\.\d\.\w+)\.(weight|bias)"


def between_steps(change, t, i):
    if i == 0:
        t.kept.state = t.o.state
    t.o.zero_grad()
    t.loss(i).backward()
    t.o.step()
    change(t, i)


def delete_biases(t, i):
    for p in t.n.parameters():
        if p.ndim == 1 and p in t.o.state:
            del t.o.state[p]


def assign_without_one_layer(t, i):
    last = {*t.n.last.parameters()}
    t.o.state = defaultdict(dict, {p: kept for p, kept in t.o.state.items() if p not in last})


def assign_halves(t, i):
    for p in t.n.parameters():
        t.o.state[p] = {key: value / 2 for key, value in t.o.state.get(p, {}).items()}


def assign_no_first_moment(t, i):
    for p, kept in [*t.o.state.items()]:
        t.o.state[p] = {key: value * 0 if key == "exp_avg" else value for key, value in kept.items()}


def show_one_entry_less(t, i):
    t.kept.state.pop(t.n.last.weight, None)
    assert t.n.last.weight not in t.o.state


def put_back(t, i):
    if i == 0:
        t.kept.first = {p: {key: value.clone() for key, value in kept.items()} for p, kept in t.o.state.items()}
    elif i == 1:
        t.o.state.clear()
        t.o.state.update(t.kept.first)


def have_an_entry_each(t, i):
    assert [p for p in t.n.parameters() if p in t.kept.state] == [*t.n.parameters()]
    assert {*t.o.state} == {*t.n.parameters()}
    assert len(t.o.state) == len([*t.n.parameters()])


def keep_a_number(t, i):
    for p in t.n.parameters():
        t.o.state[p]["steps"] = t.o.state[p].get("steps", 0) + 1
    t.note(torch.tensor([t.o.state[p]["steps"] for p in t.n.parameters()]))


def replace_buffers(t, i):
    for kept in t.o.state.values():
        if "momentum_buffer" in kept:
            kept["momentum_buffer"] = kept["momentum_buffer"] / 2


def assign_full_buffers(t, i):
    for p in t.n.parameters():
        t.o.state[p] = {"momentum_buffer": torch.zeros_like(p)}


between = row.within(between_steps, optim=momentum)

between("state is cleared", lambda t, i: t.o.state.clear())
between("a reference taken before training is cleared", lambda t, i: t.kept.state.clear())
between("the state of one parameter is popped", lambda t, i: t.o.state.pop(t.n.first.weight, None), optim=adam)
between("entries are popped one by one", lambda t, i: [t.o.state.popitem() for _ in [*t.o.state]])
between("the state of biases is deleted", delete_biases)
between("an empty state is assigned", lambda t, i: setattr(t.o, "state", defaultdict(dict)))
between("a state without one layer is assigned", assign_without_one_layer, optim=adam)
between(
    "an empty state is set by setstate",
    lambda t, i: t.o.__setstate__({"state": defaultdict(dict), "param_groups": t.o.param_groups}),
)
between("one entry is assigned", lambda t, i: t.o.state.__setitem__(t.n.first.weight, {}))
between("halves of buffers are assigned", assign_halves)
between("entries without first moments are assigned", assign_no_first_moment, optim=adam)
between("entries are updated", lambda t, i: t.o.state.update({p: {} for p in t.n.last.parameters()}))
between("a reference taken before training shows one entry less", show_one_entry_less)
between("entries of the first step are put back", put_back)
between("all parameters have an entry", have_an_entry_each, same={1, 2})
between("every entry is read", lambda t, i: [t.o.state[p].get("momentum_buffer") for p in t.n.parameters()])
between("a number of the user's own is kept", keep_a_number)
between("buffers of full shape are assigned", assign_full_buffers)
between("buffers are halved", lambda t, i: [kept["momentum_buffer"].mul_(0.5) for kept in t.o.state.values() if kept])
between("buffers are replaced within their entries", replace_buffers)


@row(optim=momentum)
def every_entry_is_read_before_training(t, i):
    t.note(torch.tensor([len(t.o.state[p]) for p in t.n.parameters()] if i == 0 else []))
    t.o.zero_grad()
    t.loss(i).backward()
    t.o.step()


test_rows = row.tests()
