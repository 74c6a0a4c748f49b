"""`zero.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from zero.plan.course import Course
from zero.plan.job import Job, Needs
from zero.plan.kept import Kept
from zero.plan.layouts import Layouts
from zero.plan.moments import Mark, measure
from zero.plan.result import Cost, Plan
from zero.plan.sizes import Options, Sizes
from zero.plan.stages import STAGES


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
) -> Plan:
    """What every stage would cost a rank, by the arithmetic that the stages themselves lay memory out with.

        model = torch.nn.Transformer(device="meta")
        print(zero.plan(model, world_size=[8, 64], memory=80 * 2**30).table())

    Starts no rank, sends nothing, and allocates nothing of the model's size.

    model: a module, also on the meta device, or Sizes.
    world_size: number of ranks, or several.
    optimizer: its class, or a functools.partial of it with options that matter, such as momentum.
    precision: as of FSDP. The lower stages are planned with the same: parameters in its param_dtype, masters of their
        own dtype (OSS's master_dtype).
    auto_wrap_policy, prefetch: as of FSDP. With Sizes the units are those that they have.
    memory: bytes that a rank has, for what fits.
    batch: positional arguments of one forward of one rank, by which its activations are measured: on tensors without
        values, so what a kernel holds only while it runs is not in it. What forward keeps in attributes is forgotten.
    options: what else OSS, ShardedDDP and FSDP would be given.

    Raises ValueError for what the stages would refuse and for a batch that forward does not take, RuntimeError for a
    forward that cannot be measured.
    """
    worlds = [world_size] if isinstance(world_size, int) else list(world_size)
    options = options or Options(precision=as_precision(precision))
    if precision is not None and options.precision != as_precision(precision):
        raise ValueError("precision was given twice, and differs: by itself and in options. Give it once.")
    problem = partition_problem(options.partition, options.granularity) or _misfit(worlds, options)
    if problem is None:
        found = finding_of(optimizer, granularity=options.granularity)
        name = title(optimizer)
        problem = optimizer_problem(name, found, options.partition, options.granularity)
    if problem:
        raise ValueError(problem)
    prefetch = as_prefetch(prefetch)
    if isinstance(model, nn.Module):
        sizes = Sizes.of_module(model, auto_wrap_policy, options.precision, small=prefetch.limit == 1)
    elif isinstance(model, Sizes):
        sizes = model
    else:
        raise ValueError(f"the model is a {type(model).__name__}. Pass a torch.nn.Module, or Sizes.")
    if not sizes.params:
        raise ValueError("the model has no parameters: there is nothing to plan.")
    kept = Kept(sizes, options.master_dtype)
    course = Course(sizes, kept, _marks(model, sizes, batch, options))
    needs: Needs = {}
    costs: list[Cost] = []
    for world in worlds:
        costs += _costs(Layouts(sizes, kept, course, world, optimizer, options), prefetch, needs)
    return Plan(sizes.numel, tuple(costs), memory, activations=batch is not None)


def _costs(layouts: Layouts, prefetch: Prefetch, needs: Needs) -> Iterator[Cost]:
    """Of each stage on so many ranks, on the rank that needs most."""
    replicas = layouts.options.replicas
    within = layouts if replicas == 1 else replace(layouts, world=layouts.world // replicas)
    jobs: dict[tuple[int, int], Job] = {}
    for stage, cost_of in STAGES.items():
        laid_out = within if stage.startswith("3") else layouts
        by_rank = [
            cost_of(jobs.setdefault((laid_out.world, rank), Job(laid_out, rank, prefetch, needs)))
            for rank in laid_out.fullest(stage)
        ]
        yield max(by_rank, key=lambda cost: cost.peak)


def _marks(model: nn.Module | Sizes, sizes: Sizes, batch: Sequence[Any] | None, options: Options) -> Sequence[Mark]:
    """What a step of the model passes through and holds, where there is a batch to measure it with."""
    if batch is None:
        return ()
    if not isinstance(model, nn.Module):
        raise ValueError("a batch needs a module to run it: pass the module itself, on the meta device if need be.")
    on = "cuda" if options.backend == "nccl" and torch.cuda.is_available() else "cpu"
    return measure(model, sizes.units, batch, options.precision, on)


def _misfit(worlds: Sequence[int], options: Options) -> str | None:
    for world in worlds:
        if world < 1:
            return f"world_size={world}: it is a number of ranks, at least 1."
        if world % options.replicas:
            return f"{world} ranks cannot be divided into {options.replicas} replicas. Choose a divisor of {world}."
    return None if worlds else "world_size is empty. Pass a number of ranks, or several."
