"""Modules inside an FSDP do not give this rank's parts away as if they were whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stacks import Stack, batch
from torch.optim.swa_utils import AveragedModel

import ranks
import zero

GIVEN: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "state_dict": (lambda model: model.module.state_dict(), ["Linear 'first'", "zero.full_state_dict"]),
    "a block's state_dict": (lambda model: model.blocks[1].state_dict(), ["Linear 'up'", "summon_full_params"]),
    "a copy": (lambda model: copy.deepcopy(model.module), ["cannot be copied", "before wrapping"]),
    "a copy of a block": (lambda model: copy.deepcopy(model.blocks[0]), ["cannot be copied"]),
    "an average": (lambda model: AveragedModel(model.module), ["cannot be copied"]),
}


def given_away(rank: int, world: int, what: str) -> None:
    model = zero.FSDP(Stack())
    model(batch(rank, 0)).sum()  # the root is whole now, but not for long
    GIVEN[what][0](model)


@pytest.mark.parametrize("what", GIVEN)
def test_what_would_be_taken_for_whole_is_refused(what):
    error = RuntimeError if "state_dict" in what else TypeError
    ranks.expect_error(given_away, 2, error, *GIVEN[what][1], args=(what,), timeout=15)


def whole(rank: int, world: int, options: dict[str, Any]) -> None:
    plain = Stack()
    model = zero.FSDP(copy.deepcopy(plain), **options)
    if options or world == 1:
        found = model.module.state_dict()
    else:
        with model.summon_full_params():
            found = {name: value.clone() for name, value in model.module.state_dict().items()}
        assert [*model.module.state_dict(keep_vars=True).values()] == [*model.parameters()]
    expected = plain.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("world", "options"), [(2, {}), (2, {"sharding_strategy": "NO_SHARD"}), (1, {})])
def test_what_is_whole_is_given(world, options):
    ranks.run(whole, world, args=(options,), timeout=15)
