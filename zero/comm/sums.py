"""Sums over the ranks, added in rank order, so that they do not depend on timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_in_rank_order(received: Sequence[Sequence[Tensor]], times: float = 1) -> Tensor:
    """Returns `times` the sums over the ranks, flat, one message after another. received: for each message the tensors
    of all ranks, in rank order."""
    total = wide(received[0][0][:0]).new_empty(sum(len(rows[0]) for rows in received))
    low = 0
    for rows in received:
        add_in_order(rows, total[low : low + len(rows[0])], times)
        low += len(rows[0])
    return total


def add_in_order(rows: Sequence[Tensor], into: Tensor, times: float = 1) -> None:
    """Overwrites `into` with `times` the sum of two tensors or more, all of one length."""
    torch.add(wide(rows[0]), wide(rows[1]), out=into)
    for row in rows[2:]:
        into += row
    if times != 1:
        into *= times


def wide(tensor: Tensor) -> Tensor:
    """Returns the tensor in the dtype in which it is summed: float32 for 16-bit floats, else its own."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
