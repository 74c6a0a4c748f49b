"""Stages 1 and 2: `optimizer.state` is a live mapping over what the inner optimizer keeps, by the user's parameters."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch

from loops import Rows, adam, momentum

row = Rows("B2: writes into optimizer.state count")

NAME = r"(first|last|blocks\.\d\.\w+)\.(weight|bias)"


def between_steps(change, t, i):
    if i == 0:
        t.kept.state = t.o.state
    t.o.zero_grad()
    t.loss(i).backward()
    t.o.step()
    change(t, i)


between = row.within(between_steps, optim=momentum)
lost = partial(between, fails={1, 2})


@lost()
def all_state_is_cleared(t, i):
    t.o.state.clear()


@lost(optim=adam)
def the_state_of_one_parameter_is_popped(t, i):
    t.o.state.pop(t.n.first.weight, None)


@lost()
def the_state_of_every_bias_is_deleted(t, i):
    for p in t.n.parameters():
        if p.ndim == 1 and p in t.o.state:
            del t.o.state[p]


@lost()
def entries_are_popped_one_by_one(t, i):
    for _ in [*t.o.state]:
        t.o.state.popitem()


@lost()
def state_is_assigned_anew(t, i):
    t.o.state = defaultdict(dict)


@lost(optim=adam)
def state_without_one_layer_is_assigned(t, i):
    last = {*t.n.last.parameters()}
    t.o.state = defaultdict(dict, {p: kept for p, kept in t.o.state.items() if p not in last})


@lost()
def state_is_assigned_by_setstate(t, i):
    t.o.__setstate__({"state": defaultdict(dict), "param_groups": t.o.param_groups})


@lost()
def one_parameter_gets_an_empty_state(t, i):
    t.o.state[t.n.blocks[0].up.weight] = {}


@lost()
def half_of_every_buffer_is_assigned(t, i):
    for p in t.n.parameters():
        t.o.state[p] = {key: value / 2 for key, value in t.o.state.get(p, {}).items()}


@lost(optim=adam)
def every_first_moment_is_assigned_zeros(t, i):
    for p, kept in [*t.o.state.items()]:
        t.o.state[p] = {key: value * 0 if key == "exp_avg" else value for key, value in kept.items()}


@lost()
def one_layer_is_updated_with_empty_states(t, i):
    t.o.state.update({p: {} for p in t.n.last.parameters()})


@lost()
def a_reference_taken_before_training_is_cleared(t, i):
    t.kept.state.clear()


@lost()
def a_reference_taken_before_training_shows_one_entry_less(t, i):
    t.kept.state.pop(t.n.last.weight, None)
    assert t.n.last.weight not in t.o.state


@lost()
def states_are_kept_from_one_step_and_put_back_after_the_next(t, i):
    if i == 0:
        t.kept.first = {p: {key: value.clone() for key, value in kept.items()} for p, kept in t.o.state.items()}
    elif i == 1:
        t.o.state.clear()
        t.o.state.update(t.kept.first)


@lost(same={1, 2})
def every_parameter_has_an_entry(t, i):
    assert [p for p in t.n.parameters() if p in t.kept.state] == [*t.n.parameters()]
    assert {*t.o.state} == {*t.n.parameters()}
    assert len(t.o.state) == len([*t.n.parameters()])


@lost()
def every_entry_is_read(t, i):
    for p in t.n.parameters():
        t.o.state[p].get("momentum_buffer")


@lost()
def a_number_of_the_users_own_is_kept_there(t, i):
    for p in t.n.parameters():
        t.o.state[p]["steps"] = t.o.state[p].get("steps", 0) + 1
    t.note(torch.tensor([t.o.state[p]["steps"] for p in t.n.parameters()]))


@row(optim=momentum, fails={1, 2})
def every_entry_is_read_before_training(t, i):
    t.note(torch.tensor([len(t.o.state[p]) for p in t.n.parameters()] if i == 0 else []))
    t.o.zero_grad()
    t.loss(i).backward()
    t.o.step()


@between()
def every_buffer_is_halved_in_place(t, i):
    for kept in t.o.state.values():
        for value in kept.values():
            value.mul_(0.5)


@between()
def every_buffer_is_replaced_within_its_entry(t, i):
    for kept in t.o.state.values():
        if "momentum_buffer" in kept:
            kept["momentum_buffer"] = kept["momentum_buffer"] / 2


@between(optim=adam)
def a_moment_is_zeroed_within_the_entries_that_have_one(t, i):
    for p in t.n.parameters():
        moment = t.o.state.get(p, {}).get("exp_avg")
        if moment is not None:
            moment.zero_()


@lost(same={3}, refused={1: NAME, 2: NAME})
def buffers_of_full_shape_are_assigned(t, i):
    for p in t.n.parameters():
        t.o.state[p] = {"momentum_buffer": torch.zeros_like(p)}


test_rows = row.tests()
