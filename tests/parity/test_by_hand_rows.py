"""Gradients that no backward computes: evolution strategies, formulas, and what is put into a rank's own shard."""

import pytest
import torch

import gpus
import ranks
import zero
from rows import Net, Rows, adam, changed, momentum

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
    """Between steps of backward."""
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


test_rows = row.tests()


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
