"""Flat messages of many small tensors, and sums over the ranks.

Sums are added in rank order, so that they do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zero._torch.tensors import wraps_others

_SUPPORTED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
_SUPPORTED |= {torch.int64, torch.int32, torch.int8, torch.uint8}
"""Dtypes that NCCL and Gloo support. Tensors of other dtypes are sent as bytes."""

BATCH = 1 << 24
"""Most bytes of a message that packs several tensors, or is sent in pieces."""


def real(tensor: Tensor) -> Tensor:
    """Returns complex numbers as pairs of real ones, in one more dimension: backends do not support them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_sent(tensor: Tensor) -> Tensor:
    """Returns the tensor, as bytes if backends do not support its dtype. Only for operations that do not compute."""
    return tensor if tensor.dtype in _SUPPORTED else real(tensor).view(torch.uint8)


def lengths(bounds: Sequence[int]) -> list[int]:
    """Returns the lengths of the shards [bounds[r], bounds[r + 1]), by rank."""
    return [high - low for low, high in pairwise(bounds)]


def batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors in batches for one message each, of one dtype and device and of limited size; without those
    that are empty or wrap others."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        if tensor.numel() and not wraps_others(tensor):  # which are frozen, and each rank keeps its own
            same_kind = by_kind.setdefault((tensor.dtype, tensor.device), [[]])
            if same_kind[-1] and sum(batched.nbytes for batched in same_kind[-1]) + tensor.nbytes > BATCH:
                same_kind.append([])
            same_kind[-1].append(tensor)
    return [batch for same_kind in by_kind.values() for batch in same_kind]


def flatten(batch: Sequence[Tensor]) -> Tensor:
    """Returns a flat copy of the tensors, one after another."""
    return concatenate([tensor.detach().reshape(-1) for tensor in batch])


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates flat tensors of one dtype. Plain torch.cat refuses some dtypes under the user's autocast; autocast
    does not apply to torch.cat with `out`."""
    return torch.cat([*tensors], out=tensors[0].new_empty(sum(tensor.numel() for tensor in tensors)))


def empty_flat(batch: Sequence[Tensor]) -> Tensor:
    """Returns an uninitialised tensor of the size of the flattened batch."""
    return batch[0].detach().new_empty(sum(tensor.numel() for tensor in batch))


def copy_into(batch: Sequence[Tensor], flat: Tensor) -> None:
    """Overwrites the tensors with the values of the flattened batch."""
    for tensor, values in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
        tensor.detach().copy_(values.view(tensor.shape))


def sum_in_rank_order(received: Sequence[Tensor], times: float = 1) -> Tensor:
    """Returns `times` the sums over the ranks, flat, one message after another. received: for each message one row a
    rank."""
    numels = [rows[0].numel() for rows in received]
    total = received[0].new_empty(sum(numels), dtype=summed_as(received[0].dtype))
    for rows, into in zip(received, total.split(numels), strict=True):
        add_in_order(rows, into, times)
    return total


def add_in_order(rows: Sequence[Tensor] | Tensor, into: Tensor, times: float = 1) -> None:
    """Overwrites `into` with `times` the sum of tensors of one length."""
    first, *others = rows
    if others and first.dtype == into.dtype:  # else torch.add would round the sum to the dtype of the rows
        torch.add(first, others.pop(0), out=into)
    else:
        into.copy_(first)
    for row in others:
        into += row
    if times != 1:
        into *= times


SIXTEEN_BITS = torch.float16, torch.bfloat16
"""Floats whose sums are float32."""


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which tensors are summed: float32 for 16-bit floats, else their own."""
    return torch.float32 if dtype in SIXTEEN_BITS else dtype
