"""The plan of a model that is wrapped already, at its own stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from zero.comm import Comm
from zero.fsdp.unit import Unit
from zero.interop.from_optimizer import arguments
from zero.measure.param_groups import described_options, params_of
from zero.oss import OSS
from zero.plan import Cost, Options, Sizes, plan
from zero.shards.steps import Steps, steps_of

_CACHED = 16
_planned: dict[tuple[object, ...], Cost | None] = {}
"""A plan takes seconds, and a model is usually reported many times."""


def planned_for(
    stage: str,
    inner: nn.Module,
    optimizers: Sequence[Optimizer],
    units: Sequence[Unit],
    comms: Sequence[Comm],
    device: torch.device,
) -> Cost | None:
    """The planned cost; None for several optimizers, one that cannot be planned, offload, and steps in backward."""
    if len(optimizers) != 1:
        return None
    optimizer = optimizers[0]
    if type(steps_of(optimizer)) is not Steps or (isinstance(optimizer, OSS) and optimizer.shards.home.apart):
        return None
    inside = optimizer.optim if isinstance(optimizer, OSS) else optimizer
    shards, *replicas = comms
    groups = [group for unit in units for group in unit.groups]
    options = Options(
        precision=units[0].precision if units else Options().precision,
        master_dtype=_master_dtype(optimizer),
        replicas=replicas[0].world if replicas else 1,
        optimizer_sharding=groups[0].exchange.optimizer_sharding if groups else "group",
        backend="nccl" if device.type == "cuda" else "gloo",
    )
    world, given = shards.world * options.replicas, arguments(inside)[0]
    sizes = _without_values(units, inner)
    tensors = [*sizes.module.named_parameters(), *sizes.module.named_buffers()]
    shapes = tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in tensors)
    key = stage, world, options, type(inside), described_options(given), shapes
    if key not in _planned:
        if len(_planned) == _CACHED:
            _planned.clear()
        optim = partial(type(inside), **given)
        try:
            found = plan(sizes, world_size=world, optimizer=optim, options=options, stages=[stage])
            _planned[key] = found.cost(stage, world)
        except (ValueError, RuntimeError):  # such as an optimizer whose arguments are not known
            _planned[key] = None
    return _planned[key]


def _without_values(units: Sequence[Unit], inner: nn.Module) -> Sizes:
    """A module with the same parameters, full, and the same buffers and units, so that the model itself, which trains,
    is not touched. Modules that stay in float32 because of their class are planned like the others."""

    def made(shape: torch.Size, param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad)

    params = [[made(param.shape, param) for param in inner.parameters()]]
    if units:
        params = [
            [made(*one) for group in unit.groups for one in zip(group.shapes.full, group.params, strict=True)]
            for unit in units
        ]
    sizes = Sizes.of_params(params, units[0].precision if units else None)
    for number, buffer in enumerate(inner.buffers()):
        sizes.module.register_buffer(f"buffer {number}", torch.empty_like(buffer, device="meta"))
    return sizes


def _master_dtype(optimizer: Optimizer) -> torch.dtype | None:
    if not isinstance(optimizer, OSS) or not optimizer.shards.masters:
        return None
    return optimizer.part(params_of(optimizer)[0]).dtype
