"""A step of each stage, rehearsed: the wrappers and optimizers that train, on tensors without values."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import filterfalse
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.comm.packing import batches
from zero.comm.traffic import traffic
from zero.fsdp import FSDP, MixedPrecision
from zero.fsdp.fsdp import running_model
from zero.measure.kinds import Finding, assumed, finding_of
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.oss.optimizer import set_bucket_size
from zero.plan.meter import nbytes
from zero.plan.rehearsal import (
    BesideComputing,
    Offloaded,
    Rehearsal,
    cast,
    explaining,
    faked,
    on_host,
    rehearsing,
    run_forward,
    walk,
)
from zero.plan.result import Cost
from zero.plan.transport import Rehearsed, rehearsed
from zero.sdp import AveragingDDP, ShardedDDP
from zero.shards.partition import Partition, cut_for
from zero.shards.shard_group import ShardGroup
from zero.state import leaves
from zero.wrap.gradients import held_here
from zero.wrap.tensors import map_tensors

# From the one that keeps most on a rank to the one that keeps least.
STAGES = ("0", "1", "2", "3 kept", "3")


@dataclass(frozen=True)
class Job:
    """The arguments of zero.plan for one number of ranks, and the names of the model's units."""

    module: nn.Module
    optim: Callable[..., Optimizer]
    precision: MixedPrecision
    prefetch: int | None
    batch: Sequence[Any] | None
    partition: Partition
    bucket_bytes: int | None
    offload: Offloaded | None
    replicas: int
    like: Rehearsed
    units: Sequence[str] = ()
    world: int = 1

    @property
    def device(self) -> str:
        return "cuda" if self.like == "nccl" and torch.cuda.is_available() else "cpu"

    @property
    def finding(self) -> Finding:
        return finding_of(self.optim)

    @property
    def unit_modules(self) -> dict[str, nn.Module]:
        return {name: self.module.get_submodule(name) for name in self.units}

    def optimizer(self) -> Callable[..., Optimizer]:
        """The optimizer's class; over NCCL as on CUDA, where torch's step all parameters at once."""
        parameters = inspect.signature(self.optim).parameters
        fused = "fused" in parameters and parameters["fused"].default  # which torch takes alone
        with_all = self.like == "nccl" and "foreach" in parameters and not fused
        return partial(self.optim, foreach=True) if with_all else self.optim


def _built(job: Job, stage: str, rank: int) -> tuple[nn.Module, Optimizer]:
    """What trains at a stage. Masters at stage 0 are those of an OSS on one rank: full, besides the parameters."""
    if stage.startswith("3"):
        return _sharded_parameters(job, rank, kept=stage == "3 kept")
    cast(job.module, job.precision)
    if stage in ("1", "2"):
        optimizer = _oss(job, rank, job.world)
        kind = ShardedDDP if stage == "2" else AveragingDDP
        return kind(job.module, optimizer, precision=MixedPrecision(reduce_dtype=job.precision.reduce_dtype)), optimizer
    if job.world > 1:
        _give_buckets(job.module)
    return job.module, _oss(job, 0, 1) if job.precision.param_dtype else job.optimizer()(job.module.parameters())


def _groups_of(model: nn.Module, optimizer: Optimizer) -> list[ShardGroup]:
    if isinstance(model, FSDP):
        return running_model(model).index.groups
    return optimizer.shards.shard_groups if isinstance(optimizer, OSS) else []


def _oss(job: Job, rank: int, world: int) -> OSS:
    comm: Any = rehearsed(rank, world, job.like)
    optimizer = OSS(
        job.module.named_parameters(),
        job.optimizer(),
        comm,
        partition=job.partition,
        precision=MixedPrecision(job.precision.param_dtype),
        rounded={},  # the model is cast already
        offload=job.offload,
    )
    if job.bucket_bytes is not None:
        set_bucket_size(optimizer, job.bucket_bytes // max(param.itemsize for param in job.module.parameters()))
    return optimizer


def _sharded_parameters(job: Job, rank: int, *, kept: bool) -> tuple[nn.Module, Optimizer]:
    """Stage 3: FSDP. kept: parameters stay unsharded from forward to backward (SHARD_GRAD_OP)."""
    hybrid = job.replicas > 1
    comms = rehearsed(rank, job.world // job.replicas, job.like), rehearsed(0, job.replicas, job.like)
    strategies = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2") if hybrid else ("FULL_SHARD", "SHARD_GRAD_OP")
    units = {*job.unit_modules.values()}
    model = FSDP(
        job.module,
        process_group=comms if hybrid else comms[0],
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in units,
        partition=cut_for(job.partition, job.finding),
        sharding_strategy=strategies[kept],
        precision=job.precision,
        prefetch=job.prefetch,
        offload=job.offload,
    )
    return model, job.optimizer()(model.parameters())


def _give_buckets(module: nn.Module) -> None:
    """Has gradients be copied into the buckets of DistributedDataParallel, which needs a process group: they are never
    freed."""
    for param in module.parameters():
        if param.requires_grad:
            place = torch.zeros_like(param, requires_grad=False)
            param.register_post_accumulate_grad_hook(partial(_take, place))


def _take(place: Tensor, param: Tensor) -> None:
    """place: in a bucket, for the parameter's gradient."""
    assert param.grad is not None
    place.copy_(param.grad)


def cost_of(job: Job, stage: str) -> Cost:
    """The cost on the rank that needs most."""
    first, fullest = _rehearsed(job, stage, 0)
    costs = [first, *(_rehearsed(job, stage, rank)[0] for rank in dict.fromkeys(fullest) if rank)]
    sent = max(cost.sent for cost in costs)  # the first rank sends most, because it sends the buffers
    return replace(max(costs, key=lambda cost: cost.peak), sent=sent)


def _rehearsed(job: Job, stage: str, rank: int) -> tuple[Cost, list[int]]:
    """The cost on one rank, and the ranks, besides the first, that may need most."""
    with assumed(job.finding), rehearsing(job.module, job.device) as (module, rehearsal):
        job, rehearsal.of_cpus = replace(job, module=module), job.like != "nccl"
        if job.batch is None:
            walk(module, job.unit_modules)
            wanted = next(module.parameters()).requires_grad
            inputs: Sequence[Any] = [torch.zeros((), device=job.device, requires_grad=wanted).clone()]
        else:
            inputs = map_tensors(lambda tensor: faked(tensor, job.device), tuple(job.batch))
        model, optimizer = _built(job, stage, rank)
        groups = _groups_of(model, optimizer)
        for group in groups if job.offload else ():
            if group.offload.active or group.overlaps:
                group.streams = BesideComputing()
        if not stage.startswith("3"):
            inputs = job.precision.cast_inputs(module, inputs, root=True)
        step = partial(_step, job, model, optimizer, inputs, rehearsal)
        step()  # creates the optimizer's state, and records the order of the units
        before = traffic().total
        rehearsal.reset_peak()
        held = step()
        sent = traffic().total - before + _sent_by_ddp(job, stage, held["gradients"])
        return Cost(stage, job.world, **held, peak=rehearsal.peak(), sent=sent), _fullest(job, groups)


def _step(
    job: Job, model: nn.Module, optimizer: Optimizer, inputs: Sequence[Any], rehearsal: Rehearsal
) -> dict[str, int]:
    """Returns bytes between backward and step."""
    with explaining(job.module, inputs, job.device):
        loss = run_forward(model, inputs, rehearsal)
    if loss is not None:
        loss.backward()
        del loss
    held = resident(model, [optimizer])
    held["host"] += _brought_by_step(optimizer)
    if held["gradients"] + held["host"]:
        optimizer.step()
    optimizer.zero_grad()
    return held


def _brought_by_step(optimizer: Optimizer) -> int:
    """Bytes of gradients of shards that a step brings to the host at stage 1, where `param.grad` is full before, and of
    those in 16 bits that it widens at a time."""
    if not isinstance(optimizer, OSS) or optimizer.gradients.are_sharded:
        return 0
    brought, widened = 0, Counter[ShardGroup]()
    for param, shard in optimizer.shards.items():
        gradient = param.grad
        if gradient is not None and on_host(shard):
            brought += shard.numel() * min(gradient.element_size(), shard.itemsize)
            if gradient.element_size() < shard.itemsize:
                widened[optimizer.shards.places[param].group] += shard.nbytes
    if not optimizer.shards.steps_by_group(optimizer.optim, {}):
        return brought + widened.total()
    at_once = {one: one.offload.at_once() for one in widened if isinstance(one.offload, Offloaded)}
    return brought + max((min(widened[one], n * one.main.itemsize) for one, n in at_once.items()), default=0)


def resident(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Bytes by kind. A storage counts once, however many tensors view it."""
    groups = [group for one in optimizers if isinstance(one, OSS) for group in one.shards.shard_groups]
    inner = [one.optim if isinstance(one, OSS) else one for one in optimizers]
    stepped = [param for one in inner for param in params_of(one)]
    params: list[Tensor] = [*model.parameters()]
    params += [group.full for group in groups if group.full.untyped_storage().nbytes()]
    both = [*params, *stepped]
    gradients = [gradient for param in both if (gradient := held_here(param.grad)) is not None]
    entries = [leaves.opened(dict(of_param)) for one in inner for of_param in one.state.values()]
    state = [leaf for one in entries for leaf in one.values() if isinstance(leaf, Tensor)]
    here = partial(filterfalse, on_host)
    return {
        "parameters": nbytes([*here(params), *model.buffers()]),
        "gradients": nbytes(here(gradients)),
        "optimizer": nbytes(here(state)) + nbytes(here(both)) - nbytes(here(params)),
        "host": nbytes(filter(on_host, [*stepped, *gradients, *state])),
    }


def _sent_by_ddp(job: Job, stage: str, gradients: int) -> int:
    """Bytes that DistributedDataParallel sends: gradients by all ranks, buffers by the first."""
    if stage != "0":
        return 0
    buffers = sum(buffer.nbytes for batch in batches([*job.module.buffers()]) for buffer in batch)
    return (job.world - 1) * buffers + 2 * (job.world - 1) * gradients // job.world


def _fullest(job: Job, groups: Sequence[ShardGroup]) -> list[int]:
    """See _rehearsed. Two ranks are both rehearsed if they differ, as in the buffers that add up 16-bit gradients."""
    owned = [np.diff(group.layout.bounds) * group.shard.itemsize for group in groups]
    sent = [job.precision.reduce_dtype, *(group.full.dtype for group in groups)]
    widened = any(dtype is not None and dtype.itemsize < torch.float32.itemsize for dtype in sent)
    if not widened and not any(np.ptp(of_each) for of_each in owned):
        return []
    if len(owned[0]) <= 2:
        return [*range(len(owned[0]))]
    return [int(np.argmax(sum(owned))), int(np.argmax(np.max(owned, axis=0)))]
