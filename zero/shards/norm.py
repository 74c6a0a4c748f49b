"""Norms and clipping of gradients that are sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from zero._torch.tensors import multiply_all, norms_of
from zero.comm import NORM, Comm
from zero.shards.offload import Offload
from zero.tensor_parallel import parts


def total_norm(
    gradients: Iterable[tuple[nn.Parameter, Tensor | None]],
    comm: Comm,
    norm_type: float,
    device: torch.device,
    dtypes: Iterable[torch.dtype],
    offload: Offload,
) -> Tensor:
    """Collective. Returns the norm of all ranks' shards as one vector, 0-dim.

    gradients: this rank's shard of the gradient of each parameter, if it has one; no two ranks of `comm` have the same
        element. Elements that ranks outside of it have (zero/tensor_parallel) are counted, too.
    dtypes: of all ranks' shards. The result is float64 if one of them is, otherwise float32.
    offload: where the gradients lie; it may know norms of them.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type!r}: pass 1, 2, any p > 0, or float('inf').")
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    infinite = math.isinf(norm_type)
    shards: dict[Comm | None, list[Tensor]] = {None: []}
    for param, gradient in gradients:
        # An entry also without a gradient: the all-reduce over `others` below is collective.
        shards.setdefault(parts.others(param), []).extend([] if gradient is None else [gradient])
    local = _powers(shards.pop(None), norm_type, device, offload)
    for others, own in shards.items():
        assert others is not None
        powers = _powers(own, norm_type, device, offload)
        others.all_reduce(powers, maximum=infinite)
        local = torch.maximum(local, powers) if infinite else local + powers
    comm.all_reduce(local, maximum=infinite, channel=NORM)
    return (local if infinite else local.pow(1 / norm_type)).to(dtype)


def _powers(shards: Iterable[Tensor], norm_type: float, device: torch.device, offload: Offload) -> Tensor:
    """Returns the sum of the powers of all elements, or for inf the largest, 0-dim, in float64."""
    own = [shard for shard in shards if shard.numel()]
    known = offload.known_norms(own, norm_type)
    norms = [
        *known.values(),
        *(
            norm
            for (_, of), alike in _alike(shard for position, shard in enumerate(own) if position not in known)
            for norm in norms_of(alike, norm_type, torch.float32 if of in (torch.float16, torch.bfloat16) else None)
        ),
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack([norm.to(device, torch.promote_types(norm.dtype, torch.float32)) for norm in norms])
    return (together.max() if math.isinf(norm_type) else together.pow(norm_type).sum()).double()


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float, *, offloaded: bool) -> None:
    """Scales the gradients, whose norm is `norm`, in place to a norm of at most `max_norm`, as torch does.

    offloaded: they may lie elsewhere than on the device.
    """
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (device, dtype), alike in _alike(gradients):
        factor = scale.to(device, dtype)
        # By 1 they need not be multiplied, which in the memory of the CPU takes a third of the time of a step. Of a
        # device nobody asks for the number, for which the host would wait.
        if not offloaded or device.type != "cpu" or float(factor) != 1:
            multiply_all(alike, factor)


def _alike(tensors: Iterable[Tensor]) -> Iterator[tuple[tuple[torch.device, torch.dtype], list[Tensor]]]:
    """The tensors by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    yield from kinds.items()
