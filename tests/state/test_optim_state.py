"""The state of an optimizer at stage 3: whole in the plain optimizer's format, and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import matrix
import ranks
import zero
from sidebyside import SideBySide, close, data, sgd, stage_3

WIDTH = 7

adam = partial(Adam, lr=1e-2)
no_cuts: dict[str, Any] = {"partition": "whole"}


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    model[0].bias.requires_grad_(False)
    return model


def loss(rank: int, step: int) -> Any:
    x = data(4, WIDTH, rank=rank, step=step)
    return lambda model: (model(x) - x).square().mean()


def trained(rank: int, optim: Any, steps: int = 3, **options: Any) -> SideBySide:
    both = SideBySide(net(), partial(stage_3, **options), optim, tolerance=1e-5)
    for step in range(steps):
        both.step(loss(rank, step))
    return both


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert found["state"][number].keys() == entries.keys()
        for key, value in entries.items():
            there = found["state"][number][key]
            assert close(there, value, 1e-5) if isinstance(value, torch.Tensor) else there == value


def whole(rank: int, world: int, optim: Any, options: dict[str, Any]) -> None:
    both = trained(rank, optim, **options)
    for to in (0, world - 1, None):
        found = both.model.optim_state_dict(both.optimizer, to=to)
        if to in (None, rank):
            assert_same_state(found, both.plain_optimizer.state_dict())
            optim(net().parameters()).load_state_dict(found)
        else:
            assert found is None


@matrix.combined("world, optim, options", [1, 2, 3], [sgd, adam], [{}, no_cuts])
def test_the_whole_state_is_the_plain_optimizers(optim, options, world):
    ranks.run(whole, world, args=(optim, options))


@pytest.mark.parametrize("options", [{}, no_cuts], ids=["even", "whole"])
@pytest.mark.parametrize("optim", [sgd, adam], ids=["sgd", "adam"])
@ranks.on(2)
def test_training_goes_on_from_a_plain_state(rank, world, optim, options):
    both = trained(rank, optim)
    again = SideBySide(net(), partial(stage_3, **options), optim, tolerance=1e-5)
    again.model.load_state_dict(both.plain.state_dict())
    again.plain.load_state_dict(both.plain.state_dict())
    state = both.plain_optimizer.state_dict()
    again.model.load_optim_state_dict(again.optimizer, state)
    again.plain_optimizer.load_state_dict(state)
    for step in range(3, 5):
        again.step(loss(rank, step))
    again.compare()


@ranks.on(2)
def test_parameters_outside_and_other_optimizers_are_kept_apart(rank, world):
    """An optimizer also holds a parameter that is not sharded, and another optimizer one of the same unit."""
    model = net()
    wrapped = zero.FSDP(model, ignored_parameters=[model[3].weight])
    first = SGD([model[0].weight, model[3].weight], lr=0.1, momentum=0.9)
    second = adam([model[2].weight, model[2].bias])
    wrapped(data(4, WIDTH, rank=0)).sum().backward()
    first.step(), second.step()
    found = wrapped.optim_state_dict(first, to=None)
    assert [found["state"][number]["momentum_buffer"].shape for number in (0, 1)] == [(14, 7), (7,)]
    assert torch.equal(found["state"][1]["momentum_buffer"], first.state[model[3].weight]["momentum_buffer"])
    before = first.state[model[3].weight]["momentum_buffer"].clone()
    first.state[model[3].weight]["momentum_buffer"].zero_()
    wrapped.load_optim_state_dict(first, found)
    assert torch.equal(first.state[model[3].weight]["momentum_buffer"], before)
    others = wrapped.optim_state_dict(second, to=None)
    assert [others["state"][number]["exp_avg"].shape for number in (0, 1)] == [(7, 14), (7,)]


@ranks.raises(2, ValueError, "'0.weight'|0.weight", "has 'exp_avg' of shape", timeout=15)
def test_state_of_other_shapes_is_refused_on_every_rank(rank, world):
    model = zero.FSDP(net())
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer, other = adam(model.parameters()), adam(plain.parameters())
    plain(torch.ones(2, 3)).sum().backward()
    other.step()
    model.load_optim_state_dict(optimizer, other.state_dict())


@ranks.on(2)
def test_an_optimizer_that_was_registered_takes_full_state_before_its_first_step(rank, world):
    net = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 1))
    plain = torch.optim.Adam(net.parameters(), lr=0.1)
    net(data(4, 8, rank=0)).sum().backward()
    plain.step()
    full = plain.state_dict()
    model = zero.FSDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.register_optimizer(optimizer)
    optimizer.load_state_dict(full)
    for param, state in optimizer.state.items():
        assert state["exp_avg"].shape == param.shape
    found = model.optim_state_dict(optimizer, to=None)
    for number, state in full["state"].items():
        assert torch.equal(found["state"][number]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize("to", [2, -1])
@ranks.raises(2, ValueError, "is no rank of the group of 2: choose 0 to 1, or None")
def test_what_is_no_rank_is_refused_on_every_rank(rank, world, to):
    model = zero.FSDP(net())
    model.optim_state_dict(SGD(model.parameters(), lr=0.1), to=to)
