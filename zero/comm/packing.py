"""Tensors put together into few messages, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero._torch import wraps_others

_BATCH = 1 << 24
"""Bytes of a message that is put together from several tensors."""


def batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """What can travel together: of one dtype and device, and not much.

    Left out are empty tensors, and those that wrap others: frozen ones that each rank keeps as it has them.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        if tensor.numel() and not wraps_others(tensor):
            of_kind = kinds.setdefault((tensor.dtype, tensor.device), [[]])
            if of_kind[-1] and sum(one.nbytes for one in of_kind[-1]) + tensor.nbytes > _BATCH:
                of_kind.append([])
            of_kind[-1].append(tensor)
    return [batch for of_kind in kinds.values() for batch in of_kind]


def together(batch: Sequence[Tensor]) -> Tensor:
    """One after another, flat, as a copy."""
    return joined([tensor.detach().reshape(-1) for tensor in batch])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Flat tensors of one dtype, one after another. As torch.cat, which refuses some dtypes under the user's autocast.

    What torch.cat writes into `out` autocast leaves alone.
    """
    return torch.cat([*tensors], out=tensors[0].new_empty(sum(one.numel() for one in tensors)))


def room_for(batch: Sequence[Tensor]) -> Tensor:
    """A tensor like that, of whatever values."""
    return batch[0].detach().new_empty(sum(tensor.numel() for tensor in batch))


def spread(flat: Tensor, batch: Sequence[Tensor]) -> None:
    """Overwrites the tensors by what was put together."""
    for tensor, values in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
        tensor.detach().copy_(values.view(tensor.shape))
