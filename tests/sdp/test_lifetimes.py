"""Wrappers that come and go, parameters that are frozen meanwhile, and ranks that do not do the same."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import ranks
import zero
from rows import Rows, trains
from runs import take_step
from zoo import Stack, loss_on


def sharded(model: nn.Module, optim: Any = SGD) -> tuple[nn.Module, Any]:
    return zero.setup(model, partial(optim, lr=0.1), stage=2)


def train(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(2):
        take_step(optimizer, loss_on(rank, step)(model))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@ranks.on(2)
def test_a_module_that_is_wrapped_again_is_trained_by_the_new_one(rank, world):
    model, other = Stack(), Stack()
    first = sharded(model)
    train(*first, rank)
    with pytest.raises(ValueError, match=r"module\.zero_grad"):
        sharded(model, Adam)
    model.zero_grad()
    again = sharded(model, Adam)
    train(*sharded(other), rank)
    other.zero_grad()
    expected = sharded(other, Adam)
    train(*again, rank)
    train(*expected, rank)
    assert torch.equal(weights(model), weights(other)) and not torch.equal(weights(model), weights(Stack()))
    with pytest.raises(RuntimeError, match="replaced by another"):
        loss_on(rank, 0)(first[0])


@ranks.on(2)
def test_without_its_wrapper_a_module_is_a_plain_one_and_everything_is_freed(rank, world):
    model = Stack()
    wrapped, optimizer = sharded(model)
    train(wrapped, optimizer, rank)
    watched = [weakref.ref(one) for one in (wrapped, optimizer, model)]
    del wrapped, optimizer
    gc.collect()
    if rank:  # alone
        loss_on(rank, 0)(model).backward()
        assert all(param.grad is not None for param in model.parameters())
    assert [one() for one in watched] == [None, None, model]
    del model
    gc.collect()
    assert watched[2]() is None


def freezing(*names: str) -> Any:
    """Layers are frozen for a second loss, as discriminators are for a generator's."""

    def program(t: Any, i: int) -> None:
        first = t.loss(i)
        frozen = [t.n.get_submodule(name).requires_grad_(False) for name in names]
        second = t.loss(10 + i)
        for layer in frozen:
            layer.requires_grad_(True)
        t.update(first + second)

    return program


row = Rows("layers are frozen for a second forward", __name__)


def frozen_when_backward_comes(t: Any, i: int) -> None:
    """Nothing is trained."""
    loss = t.loss(i)
    t.n.requires_grad_(False)
    (loss + t.m(t.batch(10 + i).requires_grad_()).square().mean()).backward()
    t.n.requires_grad_(True)
    t.update(None)
    trains(t, 20 + i)


row.of("the last one", freezing("last"))
row.of("all", freezing("first", "blocks", "last"))
row.of("all, which they still are when backward comes", frozen_when_backward_comes, same={2})
test_rows = row.tests()
