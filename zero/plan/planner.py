"""`zero.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.fsdp import MixedPrecision, Prefetch
from zero.fsdp.precision import as_precision
from zero.fsdp.prefetch import as_prefetch
from zero.fsdp.wrap import Policy
from zero.measure.kinds import finding_of, title
from zero.oss.partition import optimizer_problem, partition_problem
from zero.plan.result import Plan
from zero.plan.sizes import Options, Sizes
from zero.plan.stages import STAGES, Job, cost_of

_OFFLOADED = ("1", "2")
"""The stages of which plans count offload."""


def plan(
    model: nn.Module | Sizes,
    *,
    world_size: int | Iterable[int],
    optimizer: Callable[..., Optimizer] = torch.optim.Adam,
    precision: MixedPrecision | None = None,
    auto_wrap_policy: Policy = None,
    memory: int | None = None,
    batch: Sequence[Any] | None = None,
    prefetch: Prefetch | None = None,
    options: Options | None = None,
    stages: Sequence[str | int] | None = None,
) -> Plan:
    """What every stage would cost a rank: each is rehearsed, one rank of it, on tensors without values.

        model = torch.nn.Transformer(device="meta")
        print(zero.plan(model, world_size=[8, 64], memory=80 * 2**30).table())

    Runs two steps. Starts no rank, sends nothing, and allocates nothing of the model's size. Takes some seconds.

    model: a module, also on the meta device, or Sizes.
    world_size: number of ranks, or several.
    optimizer: its class, or a partial of it with options that matter. Values that it reads of tensors are 0.
    precision: as of FSDP. The lower stages are planned with the same: parameters in its param_dtype, masters of their
        own dtype (OSS's master_dtype).
    auto_wrap_policy, prefetch: as of FSDP. With Sizes the units are those that they have.
    memory: bytes that a rank has, for what fits.
    batch: positional arguments of one forward of one rank, by which its activations are measured, but for what a kernel
        holds only while it runs. What forward keeps in attributes is forgotten.
    options: what else OSS, ShardedDDP and FSDP would be given.
    stages: those to plan, such as [3] or ["2", "3 kept"]; by default all, or with offload 1 and 2.

    Raises ValueError for what the stages would refuse and a batch that forward does not take, RuntimeError for one
    that cannot be measured.
    """
    worlds = [world_size] if isinstance(world_size, int) else list(world_size)
    options = _options(options, precision)
    every = _OFFLOADED if options.offload else STAGES
    wanted = [str(stage) for stage in (every if stages is None else stages)]
    problem = partition_problem(options.partition, options.granularity) or _misfit(worlds, options, wanted)
    problem = problem or _unfit(optimizer, options)
    if problem:
        raise ValueError(problem)
    prefetch = as_prefetch(prefetch)
    if batch is not None and isinstance(model, Sizes):
        raise ValueError("a batch needs a module to run it: pass the module itself, on the meta device if need be.")
    sizes = _sizes(model, auto_wrap_policy, options.precision, small=prefetch.limit == 1)
    master_dtype = options.master_dtype or _stored(sizes)
    jobs = (Job(sizes, world, optimizer, options, prefetch, master_dtype, batch) for world in worlds)
    costs = [cost_of(job, stage) for job in jobs for stage in STAGES if stage in wanted]
    return Plan(sizes.numel, tuple(costs), memory, activations=batch is not None)


def _options(options: Options | None, precision: MixedPrecision | None) -> Options:
    options = options or Options(precision=as_precision(precision))
    if precision is not None and options.precision != as_precision(precision):
        raise ValueError("precision was given twice, and differs: by itself and in options. Give it once.")
    return options


def _sizes(model: nn.Module | Sizes, policy: Policy, precision: MixedPrecision, *, small: bool) -> Sizes:
    if isinstance(model, nn.Module):
        sizes = Sizes.of_module(model, policy, precision, small=small)
    elif isinstance(model, Sizes):
        sizes = model if precision == MixedPrecision() else replace(model, precision=precision)
    else:
        raise ValueError(f"the model is a {type(model).__name__}. Pass a torch.nn.Module, or Sizes.")
    if not sizes.params:
        raise ValueError("the model has no parameters: there is nothing to plan.")
    return sizes


def _stored(sizes: Sizes) -> torch.dtype | None:
    """The dtype of the parameters where they are computed with in one of fewer bits."""
    computed = sizes.precision.param_dtype
    stored = {param.dtype for param in sizes.module.parameters() if param.is_floating_point()}
    return next((dtype for dtype in stored if computed is not None and dtype.itemsize > computed.itemsize), None)


def _unfit(optimizer: Callable[..., Optimizer], options: Options) -> str | None:
    found = finding_of(optimizer, granularity=options.granularity)
    return optimizer_problem(title(optimizer), found, options.partition, options.granularity)


def _misfit(worlds: Sequence[int], options: Options, stages: Sequence[str]) -> str | None:
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        return f"stages has {unknown[0]!r}. Choose of {', '.join(map(repr, STAGES))}."
    if options.offload and not {*stages} <= {*_OFFLOADED}:
        return f"stages={[*stages]} with offload: plans count it at stages {' and '.join(_OFFLOADED)} only. Pass these."
    for world in worlds:
        if world < 1:
            return f"world_size={world}: it is a number of ranks, at least 1."
        if world % options.replicas:
            return f"{world} ranks cannot be divided into {options.replicas} replicas. Choose a divisor of {world}."
    return None if worlds else "world_size is empty. Pass a number of ranks, or several."
