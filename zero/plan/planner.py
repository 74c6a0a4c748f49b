"""`zero.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from zero.fsdp.choice import Policy, smallest_leaves, unit_modules
from zero.fsdp.options import as_prefetch
from zero.measure.kinds import title
from zero.offload import CPUOffload, DiskOffload, offload_of
from zero.plan.rehearsal import Offloaded
from zero.plan.result import Plan
from zero.plan.stages import STAGES, Job, cost_of
from zero.plan.transport import Rehearsed
from zero.shards.partition import Partition, refuse_optimizer, refuse_partition
from zero.wrap.precision import as_precision

if TYPE_CHECKING:
    from zero.wrap.precision import GivenPrecision

_OFFLOADED = STAGES[1:]


def plan(
    model: nn.Module,
    *,
    world_size: int | Iterable[int],
    optimizer: Callable[..., Optimizer] = torch.optim.Adam,
    precision: GivenPrecision = None,
    auto_wrap_policy: Policy = None,
    memory: int | None = None,
    batch: Sequence[Any] | None = None,
    stages: Sequence[str | int] | None = None,
    prefetch: int | None = None,
    partition: Partition = "auto",
    bucket_bytes: int | None = None,
    offload: CPUOffload | DiskOffload | None = None,
    replicas: int = 1,
    backend: Literal["gloo", "nccl"] = "nccl",
    one_host: bool = False,
) -> Plan:
    """What every stage would cost a rank. Two steps of each are rehearsed on tensors without values; nothing is sent.

        print(zero.plan(torch.nn.Transformer(device="meta"), world_size=[8, 64], memory=80 * 2**30).table())

    model: a module, also on the meta device; it stays as it is. world_size: number of ranks, or several.
    optimizer: its class, or a partial of it with options that matter. It reads 0 where it reads a tensor's value.
    precision: as in zero.setup.
    memory: bytes that a rank has, to say which stages fit; 8% of it are held back for what is not counted.
    batch: positional arguments of a rank's forward, to measure its activations, but not what kernels hold for a while.
    stages: those to plan, such as [3] or ["2", "3 kept"]; by default all, or with offload those from 1 on.
    auto_wrap_policy, prefetch, partition, offload: as in FSDP and OSS.
    bucket_bytes: what stages 1 and 2 send at once.
    replicas: how often stage 3 replicates the sharded model (HYBRID_SHARD).
    backend, one_host: by default GPUs over NCCL are planned; "gloo" is of CPUs, which may be of one host.

    Raises ValueError for what the stages refuse or forward does not take, RuntimeError for a forward without values.
    """
    what = model, optimizer, as_precision(precision), as_prefetch(prefetch), batch, partition
    like: Rehearsed = "host memory" if one_host and backend == "gloo" else backend
    offloaded = None if offload is None else Offloaded(offload_of(offload))
    job = Job(*what, bucket_bytes, offloaded, replicas, like)
    return _planned(job, world_size, stages, memory, auto_wrap_policy)


def _planned(
    job: Job, ranks: int | Iterable[int], stages: Sequence[str | int] | None, memory: int | None, policy: Policy
) -> Plan:
    worlds = [ranks] if isinstance(ranks, int) else list(ranks)
    default = _OFFLOADED if job.offload else STAGES
    wanted = [str(stage) for stage in (default if stages is None else stages)]
    _refuse_misfit(job, worlds, wanted, memory)
    leaves = smallest_leaves(job.prefetch, beside=job.like == "nccl" and max(worlds) > 1)
    units = [*unit_modules(job.module, policy, leaves_from=leaves)]
    job = replace(job, units=units)
    costs = [cost_of(replace(job, world=world), one) for world in worlds for one in STAGES if one in wanted]
    return Plan(sum(param.numel() for param in job.module.parameters()), tuple(costs), memory, job.batch is not None)


def _refuse_misfit(job: Job, worlds: Sequence[int], stages: Sequence[str], memory: object) -> None:
    """Raises ValueError if the stages cannot train so."""
    if not isinstance(job.module, nn.Module):
        raise ValueError(f"the model is a {type(job.module).__name__}. Pass a torch.nn.Module.")
    if next(job.module.parameters(), None) is None:
        raise ValueError("the model has no parameters: there is nothing to plan.")
    refuse_partition(job.partition)
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise ValueError(f"stages has {unknown[0]!r}. Choose of {', '.join(map(repr, STAGES))}.")
    if job.offload and not {*stages} <= {*_OFFLOADED}:
        raise ValueError(f"stages={[*stages]} with offload: only stages {', '.join(_OFFLOADED)} take it. Pass these.")
    if not isinstance(memory, (int, float, type(None))):
        raise ValueError(f"memory={memory!r}: pass a number of bytes, such as 24 * 2**30.")
    if not worlds or min(worlds) < 1:
        raise ValueError(f"world_size={worlds}: pass a number of ranks, at least 1, or several.")
    if odd := [world for world in worlds if world % job.replicas]:
        raise ValueError(
            f"{odd[0]} ranks cannot be divided into {job.replicas} replicas. Choose a divisor of {odd[0]}."
        )
    refuse_optimizer(title(job.optim), job.finding, job.partition)
