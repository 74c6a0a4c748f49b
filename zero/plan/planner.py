"""`zero.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.features import missing
from zero.fsdp import MixedPrecision, Prefetch
from zero.fsdp.precision import as_precision
from zero.fsdp.prefetch import as_prefetch
from zero.fsdp.units import Policy
from zero.measure.kinds import finding_of, title
from zero.plan.hardware import Hardware, as_hardware
from zero.plan.result import Cost, Plan
from zero.plan.sizes import Options, Sizes
from zero.plan.stages import STAGES, Job, cost_of
from zero.plan.timeline import Timing, prefetches, timed
from zero.plan.trace import Trace
from zero.shards.partition import optimizer_problem, partition_problem

_OFFLOADED = STAGES[1:]
"""The stages that take offload."""


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
    hardware: Hardware | str | Path | None = None,
    tokens: int | None = None,
) -> Plan:
    """What every stage would cost a rank: one rank of each stage is rehearsed on tensors without values.

        model = torch.nn.Transformer(device="meta")
        print(zero.plan(model, world_size=[8, 64], memory=80 * 2**30).table())

    Runs two steps of a copy of the model. Starts no rank, sends nothing, and allocates nothing of the model's size.

    model: a module, also on the meta device, or Sizes.
    world_size: number of ranks, or several.
    optimizer: its class, or a partial of it with options that matter. It reads 0 where it reads a tensor's value.
    precision: as in FSDP. The lower stages are planned with the same: parameters in its param_dtype, masters in the
        parameters' own dtype (OSS's master_dtype).
    auto_wrap_policy, prefetch: as in FSDP. Sizes have their own units.
    memory: bytes that a rank has, to say which stages fit.
    batch: positional arguments of a rank's forward, to measure its activations, but not what kernels hold for a while.
    options: further options of OSS, ShardedDDP and FSDP.
    stages: those to plan, such as [3] or ["2", "3 kept"]; by default all, or with offload those from 1 on.
    hardware: "h100-8", "a100-8", "cpu", a TOML file or a Hardware, to time steps on. It decides the backend.
    tokens: of a rank's step, to time it without a batch: each parameter is multiplied with so many.

    Raises ValueError for what the stages would refuse and a batch that forward does not take, RuntimeError for a batch
    that cannot be measured.
    """
    worlds = [world_size] if isinstance(world_size, int) else list(world_size)
    timed_on = None if hardware is None else as_hardware(hardware)
    options = _options(options, precision, timed_on)
    wanted = _wanted(stages, options)
    if problem := _misfit(worlds, wanted, optimizer, options) or _unrun(model, hardware, batch, tokens, options):
        raise ValueError(problem)
    given = as_prefetch(prefetch)
    sizes = partial(_sizes, model, auto_wrap_policy, options.precision)
    options = replace(options, master_dtype=options.master_dtype or _stored(sizes(given)))
    job = Job(sizes(given), worlds[0], optimizer, options, given, batch, tokens, Trace(wanted=False))
    costs, timings = _rehearsed(job, sizes, [*product(worlds, wanted)], timed_on)
    return _with_remedies(job, Plan(job.sizes.numel, tuple(costs), memory, batch is not None, tuple(timings)))


def _with_remedies(job: Job, found: Plan) -> Plan:
    """See Plan.recomputing and those after it. Nothing is rehearsed where something fits."""
    worlds = [world for world in found.worlds if not job.options.offload and found.recommended(world) is None]

    def costs(job: Job, possible: bool) -> tuple[Cost, ...]:
        return tuple(cost_of(replace(job, world=world), "3") for world in worlds if possible)

    recomputes, offloads = job.batch is not None, not missing("offload", "offload")
    offloaded = replace(job, options=replace(job.options, offload=True))
    return replace(
        found,
        recomputing=costs(replace(job, recompute=True), recomputes),
        offloaded=costs(offloaded, offloads),
        offloaded_recomputing=costs(replace(offloaded, recompute=True), offloads and recomputes),
    )


def _rehearsed(
    job: Job, sizes: Callable[[Prefetch], Sizes], cases: list[tuple[int, str]], hardware: Hardware | None
) -> tuple[list[Cost], list[Timing]]:
    """Rehearses a step of each case, a number of ranks and a stage; with hardware also of other prefetches."""
    costs: list[Cost] = []
    timings: list[Timing] = []
    for world, stage in cases:
        for name, one in [(None, job.prefetch)] if hardware is None else prefetches(stage, job.prefetch):
            trace = Trace(wanted=hardware is not None)
            cost = cost_of(replace(job, sizes=sizes(one), world=world, prefetch=one, trace=trace), stage)
            if one == job.prefetch:
                costs.append(cost)
            if hardware is not None:
                timings.append(timed(trace, hardware, stage, name, world))
    return costs, timings


def _options(options: Options | None, precision: MixedPrecision | None, hardware: Hardware | None) -> Options:
    options = options or Options(precision=as_precision(precision))
    if precision is not None and options.precision != as_precision(precision):
        raise ValueError("precision was given twice, and differs: by itself and in options. Give it once.")
    return options if hardware is None else replace(options, backend=hardware.backend)


def _wanted(stages: Sequence[str | int] | None, options: Options) -> list[str]:
    """The stages to plan, in their own order, and after them any that do not exist."""
    default = _OFFLOADED if options.offload else STAGES
    wanted = {str(stage): None for stage in (default if stages is None else stages)}
    return [*(stage for stage in STAGES if stage in wanted), *(stage for stage in wanted if stage not in STAGES)]


def _sizes(model: nn.Module | Sizes, policy: Policy, precision: MixedPrecision, prefetch: Prefetch) -> Sizes:
    if isinstance(model, nn.Module):
        sizes = Sizes.of_module(model, policy, precision, small=prefetch.limit == 1)
    elif isinstance(model, Sizes):
        sizes = model if precision == MixedPrecision() else replace(model, precision=precision)
    else:
        raise ValueError(f"the model is a {type(model).__name__}. Pass a torch.nn.Module, or Sizes.")
    if next(sizes.module.parameters(), None) is None:
        raise ValueError("the model has no parameters: there is nothing to plan.")
    return sizes


def _stored(sizes: Sizes) -> torch.dtype | None:
    """The dtype of the parameters where they are computed with in one of fewer bits."""
    computed = sizes.precision.param_dtype
    stored = {param.dtype for param in sizes.module.parameters() if param.is_floating_point()}
    return next((dtype for dtype in stored if computed is not None and dtype.itemsize > computed.itemsize), None)


def _unrun(model: object, hardware: object, batch: object, tokens: int | None, options: Options) -> str | None:
    """Why no step can be run, or timed."""
    if tokens is not None and tokens < 1:
        return f"tokens={tokens}: it is a number of tokens, at least 1."
    if hardware is not None and options.offload:
        return "the time of a step with offload is not planned. Leave out one of hardware and offload."
    if hardware is None and tokens is not None:
        return "tokens are for the time of a step: pass hardware too, such as 'h100-8'."
    if hardware is not None and (batch is None) == (tokens is None):
        return "the time of a step is that of a batch, or of a number of tokens a rank: pass one of batch and tokens."
    if batch is not None and isinstance(model, Sizes):
        return "a batch needs a module to run it: pass the module itself, on the meta device if need be."
    return None


def _misfit(
    worlds: Sequence[int], stages: Sequence[str], optimizer: Callable[..., Optimizer], options: Options
) -> str | None:
    """Why the stages could not train so."""
    if problem := partition_problem(options.partition, options.granularity):
        return problem
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        return f"stages has {unknown[0]!r}. Choose of {', '.join(map(repr, STAGES))}."
    if options.offload and not {*stages} <= {*_OFFLOADED}:
        return f"stages={[*stages]} with offload: only stages {', '.join(_OFFLOADED)} take it. Pass these."
    if options.offload and (problem := missing("offload", "offload")):
        return problem
    if options.one_host and options.backend == "gloo" and (problem := missing("host_memory", "one_host=True")):
        return problem
    for world in worlds:
        if world < 1:
            return f"world_size={world}: it is a number of ranks, at least 1."
        if world % options.replicas:
            return f"{world} ranks cannot be divided into {options.replicas} replicas. Choose a divisor of {world}."
    if not worlds:
        return "world_size is empty. Pass a number of ranks, or several."
    found = finding_of(optimizer, granularity=options.granularity)
    return optimizer_problem(title(optimizer), found, options.partition, options.granularity)
