"""Digests tell any write, and cost a GPU little beside the copies of a step."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero.offload import digest

NUMEL = 1001


def written(to: Tensor, how: str) -> None:
    """How many elements are written, and that some sums over them stay the same."""
    if how == "the last":
        to[-1:].neg_()
    elif how == "two signs":
        to[[5, 900]] = -to[[5, 900]]
    else:
        first, second = (0, 1) if how == "neighbours" else (3, 703)
        to[[first, second]] = to[[second, first]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("how", ["the last", "two signs", "neighbours", "far apart"])
def test_any_write_is_told(dtype, how):
    """Also where neither beginning nor end is that of a word, and in chunks."""
    flat = torch.randn(NUMEL + 3, dtype=dtype)[3:]
    with mock.patch("zero.offload._CHUNK", 64 * flat.element_size()):
        before = digest(flat)
        assert digest(flat.clone()) == before
        written(flat, how)
        assert digest(flat) != before


class Moved(TorchDispatchMode):
    """Bytes that operators read and write."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view:
            self.nbytes += sum(one.nbytes for one in tree_leaves((args, result)) if isinstance(one, Tensor))
        return result


def test_a_digest_moves_26_times_the_bytes_of_its_tensor():
    flat = torch.ones(8000, dtype=torch.bfloat16)
    with Moved() as moved:
        digest(flat)
    assert moved.nbytes == pytest.approx(26 * flat.nbytes, rel=0.01)
