"""Steps that are taken slice by slice: the numbers of whole ones, bit for bit, with less held in between."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Adam

import ranks
from reference import ELEMENTWISE, MyAdam, pair, same, same_weights, train
from zero.plan.meter import Meter
from zero.shards import slices
from zero.shards.slices import step_in_slices


@pytest.fixture
def short(monkeypatch):
    """Slices of 64 elements, so that small parameters are long."""
    monkeypatch.setattr(slices, "SLICE", 64)


def parameters():
    """Long ones, the last slice of one shorter; a short one, one without a gradient, and one that is not contiguous."""
    torch.manual_seed(0)
    shapes = [(500,), (16, 8), (3,), (200,)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes] + [nn.Parameter(torch.randn(30, 10).t())]


def steps(optimizer, step, count=5):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        for index, param in enumerate(params):
            param.grad = (
                None if index == 3 else torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
            )
        optimizer.param_groups[0]["lr"] *= 0.9
        step(optimizer)
    return params


def two_groups(optim, options):
    first, *others = parameters()
    return optim([{"params": [first], "lr": 0.02}, {"params": others}], **options)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_bit_is_that_of_a_whole_step(name, short):
    sliced, whole = (two_groups(*ELEMENTWISE[name]) for _ in range(2))
    found, expected = steps(sliced, step_in_slices), steps(whole, lambda optimizer: optimizer.step())
    same(found, expected)
    assert sliced.param_groups[0]["params"][0] is found[0]
    assert [*sliced.state] == [param for param in found if param in sliced.state]
    assert len(sliced.state) == len(whole.state)
    for param, reference in zip(found, expected, strict=True):
        same(sliced.state.get(param, {}), whole.state.get(reference, {}))
    same(sliced.state_dict(), whole.state_dict())


def lengths(monkeypatch, optimizer, count=2):
    """By step, the lengths of what the optimizer was given to step."""
    seen = []
    stepped = torch.optim.Adam.step

    def step(self, closure=None):
        seen.append([param.numel() for group in self.param_groups for param in group["params"]])
        return stepped(self, closure)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    steps(optimizer, step_in_slices, count)
    return seen


def test_only_long_contiguous_parameters_with_state_are_cut(short, monkeypatch):
    first, second = lengths(monkeypatch, Adam(parameters()))
    assert first == [500, 128, 3, 200, 300], "an optimizer makes the state of a full parameter"
    assert second == [64] * 7 + [52, 64, 64, 3, 200, 300]


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_groups_that_are_stepped_at_once_are_not_cut(option, short, monkeypatch):
    optimizer = two_groups(Adam, {})
    optimizer.param_groups[1][option] = True
    _, second = lengths(monkeypatch, optimizer)
    assert second == [64] * 7 + [52, 128, 3, 200, 300]


def test_other_optimizers_are_not_cut(short, monkeypatch):
    _, second = lengths(monkeypatch, MyAdam(parameters()))
    assert second == [500, 128, 3, 200, 300]


def test_a_step_that_fails_leaves_groups_and_state(short, monkeypatch):
    optimizer = Adam(parameters())
    params = steps(optimizer, step_in_slices, 2)
    before = copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        step_in_slices(optimizer)
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], params, strict=True))
    same(optimizer.state_dict(), before)


def test_what_a_step_holds_in_between_is_of_a_slice():
    param = nn.Parameter(torch.zeros(8 * slices.SLICE))
    optimizer = Adam([param])
    steps(optimizer, step_in_slices, 2)
    standing = [param, param.grad, *optimizer.state[param].values()]
    with Meter(apart=standing) as meter:
        step_in_slices(optimizer)
    assert 0 < meter.peak() < 4 * param[: slices.SLICE].nbytes


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW amsgrad"])
@ranks.on(2)
def test_oss_steps_as_the_plain_optimizer_beside_ddp(rank, world, name):
    optim, options = ELEMENTWISE[name]
    (reference, plain), (model, sharded) = pair(optim, **options)
    with mock.patch.object(slices, "SLICE", 64):
        same(train(model, sharded, rank), train(reference, plain, rank))
    same_weights(model, reference)
