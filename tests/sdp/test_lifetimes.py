"""Wrappers that come and go, parameters that are frozen meanwhile, and ranks that do not do the same."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import ranks
import zero
from models import take_step
from sidebyside import SideBySide, average_gradients, data

WIDTH = 16


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def sharded(model, optim=SGD, **options):
    optimizer = zero.OSS(model.named_parameters(), optim, lr=0.1)
    return zero.ShardedDDP(model, optimizer, **options), optimizer


def loss_of(model, rank, step):
    return model(data(5, WIDTH, rank=rank, step=step)).square().mean()


def train(model, optimizer, rank, steps=2):
    for step in range(steps):
        take_step(optimizer, loss_of(model, rank, step))


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("dropped", [True, False])
@ranks.on(2)
def test_a_module_that_is_wrapped_again_is_trained_by_the_new_one(rank, world, dropped):
    model, other = net(), net()
    first = sharded(model)
    train(*first, rank)
    if dropped:
        first = None
    again = sharded(model, Adam)
    train(*sharded(other), rank)
    expected = sharded(other, Adam)
    train(*again, rank)
    train(*expected, rank)
    assert equal(weights(model), weights(other)) and not equal(weights(model), weights(net()))
    if first is not None:
        with pytest.raises(RuntimeError, match="replaced by another"):
            loss_of(first[0], rank, 0)


@ranks.on(2)
def test_without_its_wrapper_a_module_is_a_plain_one(rank, world):
    model = net()
    train(*sharded(model), rank)
    gc.collect()
    if rank:  # alone
        loss_of(model, rank, 0).backward()
        assert all(param.grad is not None for param in model.parameters())


@ranks.on(2)
def test_everything_is_freed_when_nobody_has_it(rank, world):
    model = net()
    wrapped, optimizer = sharded(model)
    train(wrapped, optimizer, rank)
    watched = [weakref.ref(one) for one in (model, wrapped, optimizer)]
    del model, wrapped, optimizer
    gc.collect()
    assert [one() for one in watched] == [None] * 3


class Scaled(nn.Module):
    """Returns a parameter beside what it computes, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = net(), nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs):
        return self.inner(inputs), self.scale


@ranks.on(2)
def test_a_parameter_that_is_returned_gathers_no_hooks(rank, world):
    model = Scaled()
    wrapped, optimizer = sharded(model)
    for step in range(5):
        optimizer.zero_grad()
        output, scale = wrapped(data(5, WIDTH, rank=rank, step=step))
        (output * scale).square().mean().backward()
        optimizer.step()
        assert len(model.scale._backward_hooks or ()) == 1


@pytest.mark.parametrize("numbers", [(0,), (4,), (0, 2, 4)])
@ranks.on(2)
def test_freezing_for_a_second_forward_loses_no_gradient(rank, world, numbers):
    """Layers are frozen for a second loss, as discriminators are for a generator's."""

    def loss(model, step):
        first = loss_of(model, rank, step)
        frozen = [getattr(model, "module", model)[number].requires_grad_(False) for number in numbers]
        second = loss_of(model, rank, 10 + step)
        for layer in frozen:
            layer.requires_grad_(True)
        return first + second

    both = SideBySide(net(), "2")
    for step in range(3):
        both.step(partial(loss, step=step))


@ranks.on(2)
def test_what_is_frozen_when_backward_comes_is_not_trained(rank, world):
    model = net()
    wrapped, optimizer = sharded(model)
    before, loss = weights(model), loss_of(wrapped, rank, 0)
    model.requires_grad_(False)
    inputs = data(5, WIDTH, rank=rank, step=1).requires_grad_()
    (loss + wrapped(inputs).square().mean()).backward()
    model.requires_grad_(True)
    optimizer.step()
    assert equal(weights(model), before)
    train(wrapped, optimizer, rank)
    assert not equal(weights(model), before)


@ranks.raises(2, RuntimeError, "out of step", "a comparison of what the ranks were given")
def test_a_rank_that_trains_other_parameters_is_noticed(rank, world):
    model = net()
    wrapped, optimizer = sharded(model)
    train(wrapped, optimizer, rank)
    if rank:
        model[2].requires_grad_(False)
    train(wrapped, optimizer, rank)


class Conjugating(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(200, 200, dtype=torch.complex64))

    def forward(self, inputs):
        product = torch.conj(self.weight) * inputs
        return (product.real + 2 * product.imag).sum()


@ranks.on(2)
def test_conjugated_gradients_arrive_as_they_are(rank, world):
    plain, model = Conjugating(), Conjugating()
    wrapped, optimizer = sharded(model)
    inputs = torch.view_as_complex(data(200, 200, 2, rank=rank))
    plain(inputs).backward()
    average_gradients(plain)
    wrapped(inputs).backward()
    whole = plain.weight.grad.flatten()
    [span] = optimizer.shards.shard_groups[0].spans.values()
    shard = optimizer.part(model.weight).grad.flatten()
    assert torch.equal(shard, whole[span.start : span.stop].resolve_conj())
