"""Steps that are given a closure: gradients are looked at after it, each time that it is called."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import ranks
import zero
from sidebyside import data, sgd

WIDTH = 16


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5))


@ranks.raises(2, RuntimeError, "scaled differently", timeout=15)
def test_gradients_that_a_closure_scales_differently_are_refused_in_the_same_step(rank, world):
    """By a rank's own norm, in the first closure."""
    model = zero.FSDP(net())
    optimizer = sgd(model.parameters())

    def closure() -> float:
        loss = model(data(4, WIDTH, rank=rank)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss.item()

    optimizer.step(closure)


@ranks.on(2, timeout=15)
def test_a_closure_may_reduce_what_no_sync_left(rank, world):
    weights = []
    for model in (DistributedDataParallel(net()), zero.FSDP(net())):
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(3):

            def closure(model: nn.Module = model, step: int = step) -> float:
                loss = model(data(4, WIDTH, rank=rank, step=2 * step + 1)).square().mean()
                loss.backward()
                return loss.item()

            optimizer.zero_grad()
            with model.no_sync():
                model(data(4, WIDTH, rank=rank, step=2 * step)).square().mean().backward()
            assert optimizer.step(closure=closure) > 0
        weights.append(zero.full_state_dict(model))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@ranks.raises(2, RuntimeError, r"no_sync\(\)", timeout=15)
def test_a_closure_that_leaves_gradients_unreduced_is_refused(rank, world):
    model = zero.FSDP(net())

    def closure() -> None:
        with model.no_sync():
            model(data(4, WIDTH, rank=rank)).square().mean().backward()

    sgd(model.parameters()).step(closure)
