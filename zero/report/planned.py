"""The plan of a model that is wrapped already: what zero.plan says of the stage that it is at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from zero.comm import Comm
from zero.fsdp.unit import Unit
from zero.oss import OSS
from zero.oss.from_optimizer import arguments
from zero.plan import Cost, Options, Sizes, plan


def planned_for(
    stage: str,
    inner: nn.Module,
    optimizers: Sequence[Optimizer],
    units: Sequence[Unit],
    comms: Sequence[Comm],
    device: torch.device,
) -> Cost | None:
    """None where there are several optimizers, or one that cannot be planned."""
    if len(optimizers) != 1:
        return None
    optimizer = optimizers[0]
    inside = optimizer.optim if isinstance(optimizer, OSS) else optimizer
    shards, *replicas = comms
    options = Options(
        precision=units[0].precision if units else Options().precision,
        master_dtype=_master_dtype(optimizer),
        replicas=replicas[0].world if replicas else 1,
        backend="nccl" if device.type == "cuda" else "gloo",
    )
    sizes = _of_units(units, inner) if units else Sizes.of_module(inner)
    world = shards.world * options.replicas
    optim = partial(type(inside), **arguments(inside)[0])
    try:
        return plan(sizes, world_size=world, optimizer=optim, options=options).cost(stage, world)
    except (ValueError, RuntimeError):  # of an optimizer that was built in a way that cannot be told
        return None


def _of_units(units: Sequence[Unit], inner: nn.Module) -> Sizes:
    """With full shapes, which the parameters do not have at rest. What is kept in float32 by its module's class is
    planned as the rest."""
    root = nn.Module()
    modules = {"": root}
    for number, unit in enumerate(units):
        if number:
            modules[f"unit {number}"] = nn.Module()
            root.add_module(f"unit {number}", modules[f"unit {number}"])
        within = modules[f"unit {number}" if number else ""]
        for flat in unit.groups:
            for shape, param in zip(flat.shapes.whole, flat.params, strict=True):
                full = torch.empty(shape, dtype=flat.part.dtype, device="meta")
                made = nn.Parameter(full, requires_grad=param.requires_grad)
                within.register_parameter(f"parameter {len([*within.parameters(recurse=False)])}", made)
    for number, buffer in enumerate(inner.buffers()):
        root.register_buffer(f"buffer {number}", torch.empty_like(buffer, device="meta"))
    return Sizes(root, modules, units[0].precision)


def _master_dtype(optimizer: Optimizer) -> torch.dtype | None:
    if not isinstance(optimizer, OSS) or not optimizer.keeps_masters:
        return None
    return next(optimizer.part(param).dtype for group in optimizer.param_groups for param in group["params"])
