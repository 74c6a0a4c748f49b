"""A model and its optimizer at stages 0, 1 and 2. Stage 0 is torch alone: what the others are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import zero


def at_stage(
    stage: int,
    model: nn.Module,
    optim: Callable[..., Optimizer],
    group: Any = None,
    *,
    partition: str = "auto",
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    """`options` are OSS's and the optimizer's; at stage 0 they are the optimizer's alone, and nothing is cut."""
    if stage == 0:
        return DistributedDataParallel(model, process_group=group), optim(model.parameters(), **options)
    sharded = zero.OSS(model.parameters(), optim, group, partition=partition, **options)
    if stage == 1:
        return DistributedDataParallel(model, process_group=group), sharded
    return zero.ShardedDDP(model, sharded), sharded


def clip(model: nn.Module, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
    if isinstance(optimizer, zero.OSS):
        return optimizer.clip_grad_norm(max_norm, norm_type)
    some = [param for param in model.parameters() if param.numel()]  # torch refuses the largest of no elements
    return torch.nn.utils.clip_grad_norm_(some, max_norm, norm_type)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, under the names that they have in the inner module."""
    return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def own_elements(optimizer: zero.OSS, param: nn.Parameter) -> Tensor:
    """True at the elements of a parameter that this rank owns, in the parameter's shape."""
    for flat in optimizer.shard_groups:
        for index, each in enumerate(flat.params):
            if each is param:
                mask = torch.zeros_like(param, dtype=torch.bool)
                span = flat.spans.get(index)
                if span is not None:
                    flat.shapes.in_memory_order(index, mask)[span.start : span.stop] = True
                return mask
    raise KeyError("the optimizer does not have this parameter")
