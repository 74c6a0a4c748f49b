"""Steps on gradients that are not, or not yet, those of all ranks: refused on every rank, or right."""

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero
from rows import Net, Rows, changed, momentum
from runs import average_gradients
from zoo import WIDTH, data

row = Rows("step() on gradients that were not averaged", __name__, optim=momentum)


def within(register):
    """register(t, hook): a hook that is called within each backward."""

    def stepped(t, i):
        if i == 0:
            register(t, lambda *_: t.o.step())
        t.update(t.loss(i))

    return stepped


REFUSED = {"same": (), "refused": {1: "within a backward.*has returned", 2: "within a backward.*has returned"}}
row.of(
    "a hook after a gradient steps",
    within(lambda t, hook: t.n.first.weight.register_post_accumulate_grad_hook(hook)),
    **REFUSED,
)
row.of("a hook of a module steps", within(lambda t, hook: t.n.last.register_full_backward_hook(hook)), **REFUSED)
row.of("a hook of a tensor steps", within(lambda t, hook: t.n.first.weight.register_hook(lambda g: hook())), **REFUSED)


def unsent(t, i):
    t.update(t.loss(i))
    with zero.no_sync(t.m):
        t.loss(10 + i).backward()
    t.o.step()


def around(t, i):
    t.update(t.n(t.batch(i)).square().mean())


def around_parts(t, i):
    t.update(t.n.last(t.n.first(t.batch(i))).square().mean())


def twice(t, i):
    losses = t.loss(i), t.loss(10 + i)
    losses[0].backward()
    t.update(losses[1])


def again(t, i):
    loss = t.loss(i)
    loss.backward(retain_graph=True)
    t.update(loss)


def unfrozen(t, i):
    t.n.first.requires_grad_(i > 0)
    t.update(t.loss(i))


def frozen():
    return changed(Net(), lambda net: net.first.requires_grad_(False))


row.of("the last backward is under no_sync", unsent, same=(), refused={1: r"no_sync\(\)", 2: r"no_sync\(\)"})


def inner_calls(t, i):
    """Of which no gradient is left."""
    loss = t.loss(i)
    t.note(torch.autograd.grad(t.n(t.batch(10 + i)).square().mean(), t.n.last.weight)[0])
    with torch.no_grad():
        t.note(t.n(t.batch(20 + i)))
    loss.backward()
    t.n(t.batch(30 + i))
    t.m(t.batch(30 + i))
    t.update(None)


def dropped(t, i):
    with zero.no_sync(t.m):
        t.loss(10 + i).backward()
    t.n(t.batch(i)).square().mean().backward()
    t.n.zero_grad()
    t.update(t.loss(i))


row.of("the inner module is called for other things", inner_calls, same={1, 2})
row.of("gradients that were not averaged are dropped", dropped, same={1})
test_rows = row.tests()


def unused(t, i):
    """A layer that no rank uses in one step, and one rank alone in another."""
    x = t.n.first(t.batch(i))
    t.update((x if i == 0 or (i == 1 and t.rank == 0) else t.n.last(x)).square().mean())


def accumulated(t, i):
    """Averages of before count on, whether or not a backward reaches them again."""
    t.loss(i).backward()
    t.m(t.batch(10 + i)).square().mean().backward()
    t.update(t.n.first(t.batch(20 + i)).square().mean())


class Trained:
    """The net at a stage; at stage 0 each rank has its own gradients, which are averaged by hand before a step."""

    def __init__(self, net: nn.Module, stage: int) -> None:
        self.n, self.stage, self.rank = net, stage, torch.distributed.get_rank()
        self.m, self.o = net, momentum(net.parameters())
        if stage:
            self.m, self.o = zero.setup(net, self.o, stage=stage)

    def run(self, act: Callable[[Any, int], None], step: int) -> None:
        act(self, step)
        if not self.stage:
            average_gradients(self.n)
        self.o.step()
        self.o.zero_grad()

    def batch(self, i):
        return data(4, WIDTH, rank=self.rank, step=i)

    def loss(self, i):
        return self.m(self.batch(i)).square().mean()

    def update(self, loss):
        loss.backward()


@ranks.on(2)
def test_averages_are_added_to_where_they_lie_and_freed_with_the_gradients(rank, world):
    model, optimizer = zero.setup(Net(), momentum, stage=1)
    lying = []
    for step in range(2):
        model(data(4, WIDTH, rank=rank, step=step)).square().mean().backward()
        lying.append([param.grad.data_ptr() for param in model.parameters()])
    assert lying[0] == lying[1]
    buffer = weakref.ref(next(model.parameters()).grad.untyped_storage())
    optimizer.zero_grad()
    while buffer() is not None:  # until the run's time is up: Gloo's threads keep it for a moment
        time.sleep(0.001)


ACTS = around, around_parts, twice, again, unfrozen, unused, accumulated


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
@ranks.on("world")
def test_the_mean_over_the_ranks_is_stepped(rank, world, stage, act):
    build = frozen if act is unfrozen else Net
    both = [Trained(build(), at) for at in (0, stage)]
    for step in range(4):
        for one in both:
            one.run(act, step)
    expected, found = (one.n.state_dict() for one in both)
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())


@ranks.on(2)
def test_a_forward_under_no_sync_within_an_averaged_backward_counts(rank, world):
    net = nn.Linear(WIDTH, WIDTH)
    model, optimizer = zero.setup(net, momentum, stage=1)
    with zero.no_sync(model):
        inner = model(data(4, WIDTH, rank=rank))
    model(inner).square().mean().backward()
    mine, others = net.weight.grad, net.weight.grad.clone()
    torch.distributed.broadcast(others, 0)
    assert torch.equal(mine, others)
    optimizer.step()
