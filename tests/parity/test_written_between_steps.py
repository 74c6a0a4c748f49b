"""Weights that are written or loaded between steps count at once; what cannot count is refused, with its remedy.

With masters: oss/test_master.py. Other data at stage 3: fsdp/test_rebound.py.
"""

import copy

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gpus
import ranks
import zero
from rows import Net, Rows, adam, momentum, trains
from zoo import batch

row = Rows("weights that are written between steps", __name__, optim=momentum)


def between_steps(change, t, i):
    if i == 1:
        change(t.n)
    trains(t, i)


def between_backward_and_step(change, t, i):
    t.update(t.loss(i), lambda t: i == 1 and change(t.n))


def other():
    """The weights of another, the same on every rank."""
    return {name: 0.5 * value for name, value in Net().state_dict().items()}


@torch.no_grad()
def fill(net):
    for name, param in net.named_parameters():
        param.copy_(other()[name])


written = row.within(between_steps, same={1, 2})
written("a state dict is loaded", lambda n: n.load_state_dict(other()))
written("a state dict is loaded into one layer", lambda n: n.last.load_state_dict(n.last.state_dict()), optim=adam)
written("each is copied", fill)
written("each one's data is copied", lambda n: [p.data.copy_(other()[name]) for name, p in n.named_parameters()])
written(
    "all are copied by foreach", lambda n: torch._foreach_copy_([p.data for p in n.parameters()], [*other().values()])
)
written("one row is written", lambda n: n.first.weight.data[3].fill_(0.75))
written("the module is moved to where it is", lambda net: net.to(gpus.DEVICE).float().to(torch.float32).eval().train())

MOVED, ASSIGNED = ("moved, cast or given other data", "OSS"), ("assign", "OSS")
lost = row.within(between_backward_and_step, same=(), refused=dict.fromkeys((1, 2), MOVED))
lost("the module is cast", lambda n: n.double())
lost("one layer is cast", lambda n: n.blocks[0].to(torch.bfloat16))
for frame in (between_steps, between_backward_and_step):
    lost = row.within(frame, same=(), refused=dict.fromkeys((1, 2), MOVED))
    lost("the module is cast there and back", lambda n: n.half().float())
    lost("one is given an equal copy", lambda n: setattr(n.last.weight, "data", n.last.weight.detach().clone()))
    lost("one is given other data", lambda n: setattr(n.last.weight, "data", 2 * n.last.weight.detach()))
    lost("a vector is loaded", lambda n: vector_to_parameters(2 * parameters_to_vector(n.parameters()), n.parameters()))
    lost = row.within(frame, same=(), refused=dict.fromkeys((1, 2), ASSIGNED))
    lost("a state dict is assigned", lambda n: n.load_state_dict(other(), assign=True))


row.within(between_steps, same=(), steps=4)(
    "one layer is assigned",
    lambda n: n.last.load_state_dict(copy.deepcopy(n.last).state_dict(), assign=True),
    refused=dict.fromkeys((1, 2), (r"last\.weight", "assign=True")),
)
row.within(between_backward_and_step, same={1, 2}, steps=2)(
    "the module is frozen",
    lambda n: n.requires_grad_(False),  # a plain optimizer steps whatever has a gradient
)
test_rows = row.tests()


row = Rows("B8: writes into optimizer.part(param) raise on every rank", __name__)


def parts(t):
    """At stage 0 the parameters themselves."""
    return [getattr(t.o, "part", lambda p: p)(p) for p in t.n.parameters()]


@torch.no_grad()
def climb(t, by):
    for part in parts(t):
        part.add_(by)


def before_a_forward(change, t, i):
    t.o.zero_grad()
    change(t, i)
    t.loss(i).backward()
    t.o.step()


def initialise(t, i):
    for part in parts(t) if i == 0 else ():
        torch.nn.init.constant_(part, 0.1)


@torch.no_grad()
def clamp_those_kept(t, i):
    if i == 0:
        t.kept.parts = parts(t)
    for part in t.kept.parts:
        part.clamp_(-0.1, 0.1)


def climb_for_a_validation(t, i):
    climb(t, 0.01)
    with torch.no_grad():
        t.loss(10 + i)
    climb(t, -0.01)


def climb_for_a_backward(t, i):
    t.loss(i).backward()
    climb(t, 0.01)
    t.loss(i).backward()
    climb(t, -0.01)


told = {"refused": {2: r"optimizer\.part"}, "same": ()}
before = row.within(before_a_forward, **told)

before("all parts are written", lambda t, i: climb(t, 0.01))
before("one part is written", lambda t, i: parts(t)[0].detach().mul_(0.99), optim=momentum)
before("one rank writes parts", lambda t, i: t.rank == 1 and climb(t, 0.01))
before("parts are written at the third step", lambda t, i: i == 2 and climb(t, 0.01))
before("parts are written by foreach", lambda t, i: torch.no_grad()(torch._foreach_mul_)(parts(t), 0.99))
before("parts are initialised", initialise)
before("parts kept from before training are written", clamp_those_kept)
before("parts are written, and written back after a validation,", climb_for_a_validation)
before("parts are written, and written back after a backward,", climb_for_a_backward)


@row(**told)
def parts_are_written_in_an_accumulation(t, i):
    t.o.zero_grad()
    with t.m.no_sync():
        t.loss(i).backward()
    climb(t, 0.01)
    t.loss(10 + i).backward()
    t.o.step()


@row(same={2})
def parts_are_read(t, i):
    t.o.zero_grad()
    sum(part.detach().sum() for part in parts(t))
    t.loss(i).backward()
    t.o.step()


@row(same={2})
def parts_are_written_between_backward_and_step(t, i):
    """The step gathers what their owners wrote."""
    t.o.zero_grad()
    t.loss(i).backward()
    climb(t, 0.01)
    t.o.step()


test_parts = row.tests()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks.on(2)
def test_a_run_that_diverges_goes_on_as_at_any_stage(rank, world, precision):
    """NaN is unlike itself, and is no write through `.data`."""
    model, optimizer = zero.setup(Net(), momentum, stage=3, precision=precision)
    for step in range(9):
        loss = model(batch(rank, step)).float().square().mean() * (float("nan") if step == 2 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isnan()
