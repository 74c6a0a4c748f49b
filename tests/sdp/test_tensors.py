"""Tensors are found and replaced in whatever a module takes and returns."""

import sys
from dataclasses import dataclass, field

import pytest
import torch

from zero.sdp.tensors import map_tensors, tensors_in

TENSOR = torch.ones(2)


@dataclass(frozen=True)
class Shifted:
    values: torch.Tensor
    calls: list[int] = field(default_factory=list)
    shift: float = field(default=0.0, init=False)

    def __post_init__(self):
        self.calls.append(1)
        object.__setattr__(self, "values", self.values + 1)


def test_dataclasses_are_not_made_anew():
    given = Shifted(TENSOR)
    mapped = map_tensors(lambda tensor: tensor * 3, given)
    assert torch.equal(mapped.values, TENSOR * 6) and torch.equal(given.values, TENSOR * 2)
    assert mapped.calls == [1] and mapped.shift == 0.0


class Linked:
    def __init__(self, *others):
        self.others, self.tensor = list(others), TENSOR


def grid():
    """Objects that can be reached on very many paths."""
    row = [Linked()]
    for _ in range(40):
        row = [Linked(*row), Linked(*row)]
    return row


def chain():
    last = Linked()
    for _ in range(3000):
        last = Linked(last)
    return last


def circle():
    one = Linked()
    one.others.append(Linked(one))
    return one


@pytest.mark.parametrize(("value", "count"), [(grid(), 81), (chain(), 3001), (circle(), 2), ((sys, print, grid), 0)])
def test_objects_are_searched_once(value, count):
    assert sum(1 for _ in tensors_in(value)) == count
