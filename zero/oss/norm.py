"""Norms over gradients that lie in shards, one a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero.comm import Comm


def total_norm(
    shards: Sequence[Tensor], comm: Comm, norm_type: float, device: torch.device, dtypes: Iterable[torch.dtype]
) -> Tensor:
    """Collective. The norm of all ranks' shards together, as if they were one vector; 0-dim.

    shards: this rank's; no element may be with two ranks.
    dtypes: of all ranks' shards. The result is of float64 if one of them is, otherwise of float32.
    """
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    infinite = math.isinf(norm_type)
    norms = [torch.linalg.vector_norm(shard, norm_type, dtype=_wide(shard)) for shard in shards if shard.numel()]
    if not norms:
        local = torch.zeros((), device=device)
    else:
        together = torch.stack([norm.to(device, torch.promote_types(norm.dtype, torch.float32)) for norm in norms])
        local = together.max() if infinite else together.pow(norm_type).sum()
    local = local.double()  # on every rank, whatever it owns
    comm.all_reduce(local, maximum=infinite)
    return (local if infinite else local.pow(1 / norm_type)).to(dtype)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales the gradients in place so that `norm`, which is theirs, becomes `max_norm` at most; as torch does it."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))


def _wide(shard: Tensor) -> torch.dtype | None:
    return torch.float32 if shard.dtype in (torch.float16, torch.bfloat16) else None
