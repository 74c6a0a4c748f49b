"""Norms and clipping of gradients that are sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zero._torch import multiply_all, norms_of
from zero.comm import Comm


def total_norm(
    shards: Sequence[Tensor], comm: Comm, norm_type: float, device: torch.device, dtypes: Iterable[torch.dtype]
) -> Tensor:
    """Collective. Returns the norm of all ranks' shards as one vector, 0-dim.

    shards: of this rank; no two ranks have the same element.
    dtypes: of all ranks' shards. The result is float64 if one of them is, otherwise float32.
    """
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    infinite = math.isinf(norm_type)
    norms = [
        norm
        for (_, of), alike in _alike(shard for shard in shards if shard.numel())
        for norm in norms_of(alike, norm_type, torch.float32 if of in (torch.float16, torch.bfloat16) else None)
    ]
    if not norms:
        local = torch.zeros((), device=device)
    else:
        together = torch.stack([norm.to(device, torch.promote_types(norm.dtype, torch.float32)) for norm in norms])
        local = together.max() if infinite else together.pow(norm_type).sum()
    local = local.double()  # on every rank, whatever it owns
    comm.all_reduce(local, maximum=infinite)
    return (local if infinite else local.pow(1 / norm_type)).to(dtype)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales the gradients, whose norm is `norm`, in place to a norm of at most `max_norm`, as torch does."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (device, dtype), alike in _alike(gradients):
        multiply_all(alike, scale.to(device, dtype))


def _alike(tensors: Iterable[Tensor]) -> Iterator[tuple[tuple[torch.device, torch.dtype], list[Tensor]]]:
    """The tensors by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    yield from kinds.items()
