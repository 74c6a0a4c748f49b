"""`zero.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.fsdp import MixedPrecision
from zero.fsdp.prefetch import as_prefetch
from zero.fsdp.torch_options import as_precision
from zero.fsdp.units import Policy, smallest_leaves, unit_modules
from zero.measure.kinds import finding_of, title
from zero.plan.result import Plan
from zero.plan.sizes import Options, Sizes
from zero.plan.stages import STAGES, Job, cost_of
from zero.shards.partition import optimizer_problem, partition_problem

# The stages that take offload.
_OFFLOADED = STAGES[1:]


def plan(
    model: nn.Module,
    *,
    world_size: int | Iterable[int],
    optimizer: Callable[..., Optimizer] = torch.optim.Adam,
    precision: MixedPrecision | None = None,
    auto_wrap_policy: Policy = None,
    memory: int | None = None,
    batch: Sequence[Any] | None = None,
    prefetch: int | None = None,
    options: Options | None = None,
    stages: Sequence[str | int] | None = None,
) -> Plan:
    """What every stage would cost a rank: one rank of each stage is rehearsed on tensors without values.

        model = torch.nn.Transformer(device="meta")
        print(zero.plan(model, world_size=[8, 64], memory=80 * 2**30).table())

    Runs two steps of a copy of the model. Starts no rank, sends nothing, and allocates nothing of the model's size.

    model: a module, also on the meta device.
    world_size: number of ranks, or several.
    optimizer: its class, or a partial of it with options that matter. It reads 0 where it reads a tensor's value.
    precision: as in FSDP. The lower stages are planned with the same: parameters in its param_dtype, masters in the
        parameters' own dtype (OSS's master_dtype).
    auto_wrap_policy, prefetch: as in FSDP.
    memory: bytes that a rank has, to say which stages fit; 8% of it are held back for what is not counted.
    batch: positional arguments of a rank's forward, to measure its activations, but not what kernels hold for a while.
    options: further options of OSS, ShardedDDP and FSDP. By default GPUs are planned, over NCCL.
    stages: those to plan, such as [3] or ["2", "3 kept"]; by default all, or with offload those from 1 on.

    Raises ValueError for what the stages would refuse and a batch that forward does not take, RuntimeError for a batch
    that cannot be measured.
    """
    worlds = [world_size] if isinstance(world_size, int) else list(world_size)
    options = _options(options, precision)
    wanted = _wanted(stages, options)
    if problem := _misfit(model, worlds, wanted, optimizer, options):
        raise ValueError(problem)
    given = as_prefetch(prefetch)
    leaves = smallest_leaves(given, beside=options.backend == "nccl" and max(worlds) > 1)
    sizes = Sizes(model, unit_modules(model, auto_wrap_policy, leaves_from=leaves))
    options = replace(options, master_dtype=options.master_dtype or _stored(model, options.precision.param_dtype))
    job = Job(sizes, worlds[0], optimizer, options, given, batch)
    costs = [cost_of(replace(job, world=world), stage) for world in worlds for stage in wanted]
    return Plan(sizes.numel, tuple(costs), memory, batch is not None)


def _options(options: Options | None, precision: MixedPrecision | None) -> Options:
    options = options or Options(precision=as_precision(precision))
    if precision is not None and options.precision != as_precision(precision):
        raise ValueError("precision was given twice, and differs: by itself and in options. Give it once.")
    return options


def _wanted(stages: Sequence[str | int] | None, options: Options) -> list[str]:
    """The stages to plan, in their own order, and after them any that do not exist."""
    default = _OFFLOADED if options.offload else STAGES
    wanted = {str(stage): None for stage in (default if stages is None else stages)}
    return [*(stage for stage in STAGES if stage in wanted), *(stage for stage in wanted if stage not in STAGES)]


def _stored(model: nn.Module, computed: torch.dtype | None) -> torch.dtype | None:
    """The dtype of the parameters where they are computed with in one of fewer bits."""
    stored = {param.dtype for param in model.parameters() if param.is_floating_point()}
    return next((dtype for dtype in stored if computed is not None and dtype.itemsize > computed.itemsize), None)


def _misfit(
    model: object,
    worlds: Sequence[int],
    stages: Sequence[str],
    optimizer: Callable[..., Optimizer],
    options: Options,
) -> str | None:
    """Why the stages could not train so."""
    if not isinstance(model, nn.Module):
        return f"the model is a {type(model).__name__}. Pass a torch.nn.Module."
    if next(model.parameters(), None) is None:
        return "the model has no parameters: there is nothing to plan."
    if problem := partition_problem(options.partition):
        return problem
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        return f"stages has {unknown[0]!r}. Choose of {', '.join(map(repr, STAGES))}."
    if options.offload and not {*stages} <= {*_OFFLOADED}:
        return f"stages={[*stages]} with offload: only stages {', '.join(_OFFLOADED)} take it. Pass these."
    for world in worlds:
        if world < 1:
            return f"world_size={world}: it is a number of ranks, at least 1."
        if world % options.replicas:
            return f"{world} ranks cannot be divided into {options.replicas} replicas. Choose a divisor of {world}."
    if not worlds:
        return "world_size is empty. Pass a number of ranks, or several."
    return optimizer_problem(title(optimizer), finding_of(optimizer), options.partition)
