"""`zero.plan`: a step of each stage, rehearsed by the wrappers and optimizers that train, on tensors without values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.modules import parameters_of
from zero.comm.comm import traffic
from zero.comm.transport import SIXTEEN_BITS, batches
from zero.fsdp import FSDP, MixedPrecision
from zero.fsdp.choice import Policy, smallest_leaves, unit_modules
from zero.fsdp.fsdp import running_model
from zero.fsdp.options import as_prefetch
from zero.measure.kinds import Finding, assumed, finding_of, title
from zero.measure.param_groups import params_of
from zero.offload import CPUOffload, DiskOffload, offload_of
from zero.oss import OSS
from zero.plan.meter import nbytes
from zero.plan.rehearsal import BesideComputing, Offloaded, Rehearsed, faked, on_host, rehearsed, rehearsing, run, walk
from zero.plan.result import COMMUNICATOR, PEER, UNITS, WITH_OFFLOAD, Cost, Plan, number_in
from zero.precision import compute_under_autocast
from zero.sdp import AveragingDDP, ShardedDDP
from zero.shards.partition import Partition, cut_for, refuse_optimizer, refuse_partition
from zero.shards.shard_group import ShardGroup
from zero.state import leaves
from zero.wrap.gradients import held_here
from zero.wrap.precision import as_precision
from zero.wrap.tensors import map_tensors

if TYPE_CHECKING:
    from zero.wrap.precision import GivenPrecision

# From the one that keeps most on a rank to the one that keeps least.
STAGES = ("0", "1", "2", "3 kept", "3")

_OFFLOADED = STAGES[1:]


def plan(
    model: nn.Module,
    *,
    world_size: int | Iterable[int],
    optimizer: Callable[..., Optimizer] | Optimizer = torch.optim.Adam,
    precision: GivenPrecision = None,
    auto_wrap_policy: Policy = None,
    memory: int | str | None = None,
    batch: Sequence[Any] | None = None,
    stages: Sequence[str | int] | None = None,
    prefetch: int | None = None,
    partition: Partition = "auto",
    offload: CPUOffload | DiskOffload | None = None,
    backend: Literal["gloo", "nccl"] = "nccl",
    one_host: bool = False,
) -> Plan:
    """What every stage would cost a rank. Two steps of each are rehearsed on tensors without values; nothing is sent.

        print(zero.plan(torch.nn.Transformer(device="meta"), world_size=[8, 64], memory="80GiB").table())

    model: a module, also on the meta device; it stays as it is. world_size: number of ranks, or several.
    optimizer: its class, a partial of it with options that matter, or one that exists, of which class and defaults are
        taken. It reads 0 where it reads a tensor's value.
    precision: as in zero.setup.
    memory: what a rank has, in bytes or as text such as "80GiB", to say which stages fit; 8% of it are held back for
        what is not counted. Where none fits, one with `offload` is planned, too.
    batch: positional arguments of a rank's forward, to measure its activations, but not what kernels hold for a while.
    stages: those to plan, such as [3] or ["2", "3 kept"]; by default all, or with offload those from 1 on.
    auto_wrap_policy, prefetch, partition, offload: as in FSDP and OSS.
    backend, one_host: by default GPUs over NCCL are planned; "gloo" is of CPUs, which may be of one host.

    Raises ValueError for what the stages refuse or forward does not take, RuntimeError for a forward without values.
    """
    computed, ahead = as_precision(precision), as_prefetch(prefetch)
    like: Rehearsed = "host memory" if one_host and backend == "gloo" else backend
    offloaded = None if offload is None else Offloaded(offload_of(offload))
    worlds = [*world_size] if isinstance(world_size, Iterable) else [world_size]
    default = _OFFLOADED if offloaded else STAGES
    wanted = [str(stage) for stage in (default if stages is None else [stages] if isinstance(stages, int) else stages)]
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}. Pass a torch.nn.Module.")
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters: there is nothing to plan.")
    refuse_partition(partition)
    if unknown := [stage for stage in wanted or ["none"] if stage not in STAGES]:
        raise ValueError(f"stages has {unknown[0]!r}. Choose of {', '.join(map(repr, STAGES))}.")
    if offloaded and not {*wanted} <= {*_OFFLOADED}:
        raise ValueError(f"stages={wanted} with offload: only stages {', '.join(_OFFLOADED)} take it. Pass these.")
    if isinstance(memory, str):
        memory = round(number_in(UNITS, memory))
    if not isinstance(memory, (int, float, type(None))):
        raise ValueError(f"memory={memory!r}: pass a number of bytes, or text such as '24GiB'.")
    if not worlds or not all(isinstance(world, int) and world > 0 for world in worlds):
        raise ValueError(f"world_size={worlds}: pass a number of ranks, at least 1, or several.")
    if isinstance(optimizer, Optimizer):
        taken = inspect.signature(type(optimizer)).parameters
        defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
        optimizer = partial(type(optimizer), **defaults)
    finding = finding_of(optimizer)
    refuse_optimizer(title(optimizer), finding, partition)

    leaves_from = smallest_leaves(ahead, beside=like == "nccl" and max(worlds) > 1)
    units = [*unit_modules(model, auto_wrap_policy, leaves_from=leaves_from)]
    device = "cuda" if like == "nccl" and torch.cuda.is_available() else "cpu"
    what = model, units, optimizer, finding, computed, ahead, batch, partition

    def planned(world: int, stages: Sequence[str], offloaded: Offloaded | None) -> Plan:
        costs, job = [], Job(*what, offloaded, like, device, world)
        for stage in (one for one in STAGES if one in stages):
            first, fullest = _rehearsed(job, stage, 0)
            each = [first, *(_rehearsed(job, stage, rank)[0] for rank in dict.fromkeys(fullest) if rank)]
            sent = max(cost.sent for cost in each)  # the first rank sends most, because it sends the buffers
            costs.append(replace(max(each, key=lambda cost: cost.peak), sent=sent))
        return Plan(sum(param.numel() for param in model.parameters()), tuple(costs), memory, batch is not None)

    costs = list[Cost]()
    for world in worlds:
        costs += (found := planned(world, wanted, offloaded)).costs
        if offload is None and stages is None and found.recommended(world) is None:
            tried = planned(world, ("2", "3"), Offloaded(CPUOffload()))
            best = tried.recommended(world) or min(tried.costs, key=lambda cost: cost.peak)
            costs.append(replace(best, stage=f"{best.stage}{WITH_OFFLOAD}"))
    return replace(found, costs=tuple(costs))


@dataclass(frozen=True)
class Job:
    """What zero.plan was asked for, for one number of ranks. units: the names of the model's units."""

    module: nn.Module
    units: Sequence[str]
    optim: Callable[..., Optimizer]
    finding: Finding
    precision: MixedPrecision
    prefetch: int | None
    batch: Sequence[Any] | None
    partition: Partition
    offload: Offloaded | None
    like: Rehearsed
    device: str
    world: int


def _rehearsed(job: Job, stage: str, rank: int) -> tuple[Cost, list[int]]:
    """The cost on one rank, and the ranks, besides the first, that may need most."""
    with assumed(job.finding), rehearsing(job.module, job.device) as (module, rehearsal):
        job, rehearsal.of_cpus = replace(job, module=module), job.like != "nccl"
        if job.batch is None:
            walk(module, {name: module.get_submodule(name) for name in job.units})
            wanted = next(module.parameters()).requires_grad
            inputs: Sequence[Any] = [torch.zeros((), device=job.device, requires_grad=wanted).clone()]
        else:
            inputs = map_tensors(lambda tensor: faked(tensor, job.device), tuple(job.batch))
        model, optimizer = _built(job, stage, rank)
        groups: list[ShardGroup] = []
        if isinstance(model, FSDP):
            groups = running_model(model).index.groups
        elif isinstance(optimizer, OSS):
            groups = optimizer.shards.shard_groups
        for group in groups if job.offload else ():
            if group.offload.active or group.overlaps:
                group.streams = BesideComputing()
        if stage in ("1", "2"):
            inputs = job.precision.cast_inputs(module, inputs, root=True)
        for _ in range(2):  # the first step creates the optimizer's state, and records the order of the units
            before = traffic().total
            rehearsal.reset_peak()
            loss = run(model, module, inputs, rehearsal, job.device)
            if loss is not None:
                loss.backward()
            del loss
            held = resident(model, [optimizer])
            if isinstance(optimizer, OSS) and not optimizer.gradients.are_sharded:
                # At stage 1 a step brings the gradients of the shards that are on the host.
                offloaded = ((param, shard) for param, shard in optimizer.shards.items() if on_host(shard))
                held["host"] += sum(shard.nbytes for param, shard in offloaded if param.grad is not None)
            if held["gradients"] + held["host"]:
                optimizer.step()
            optimizer.zero_grad()
        sent = traffic().total - before
        if stage == "0":  # DistributedDataParallel sends gradients by all ranks, buffers by the first
            buffers = sum(buffer.nbytes for batch in batches([*module.buffers()]) for buffer in batch)
            sent += (job.world - 1) * buffers + 2 * (job.world - 1) * held["gradients"] // job.world
        cost = Cost(stage, job.world, **held, peak=rehearsal.peak(), sent=sent, beside=_beside(job, stage))
        # Two ranks are both rehearsed if they differ, as in the buffers that add up 16-bit gradients.
        owned = [np.diff(group.layout.bounds) * group.shard.itemsize for group in groups]
        dtypes = [job.precision.reduce_dtype, *(group.full.dtype for group in groups)]
        widened = any(dtype is not None and dtype.itemsize < torch.float32.itemsize for dtype in dtypes)
        if not widened and not any(np.ptp(of_each) for of_each in owned):
            return cost, []
        if len(owned[0]) <= 2:
            return cost, [*range(len(owned[0]))]
        return cost, [int(np.argmax(sum(owned))), int(np.argmax(np.max(owned, axis=0)))]


def _beside(job: Job, stage: str) -> int:
    """What NCCL takes, where all ranks that shard are of one host."""
    if job.like != "nccl" or job.world == 1:
        return 0
    to_each = stage != "0" and job.precision.reduce_dtype in SIXTEEN_BITS
    return COMMUNICATOR + PEER * (job.world - 1) * to_each


def _built(job: Job, stage: str, rank: int) -> tuple[nn.Module, Optimizer]:
    """What trains at a stage."""
    optim, parameters = job.optim, inspect.signature(job.optim).parameters
    fused = "fused" in parameters and parameters["fused"].default  # which torch takes alone
    if job.like == "nccl" and "foreach" in parameters and not fused:  # on CUDA torch's step all parameters at once
        optim = partial(job.optim, foreach=True)
    if stage.startswith("3"):
        units = {job.module.get_submodule(name) for name in job.units}
        model = FSDP(
            job.module,
            process_group=rehearsed(rank, job.world, job.like),
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in units,
            partition=cut_for(job.partition, job.finding),
            sharding_strategy="SHARD_GRAD_OP" if stage == "3 kept" else "FULL_SHARD",
            precision=job.precision,
            prefetch=job.prefetch,
            offload=job.offload,
        )
        return model, optim(model.parameters())
    if stage == "0":
        if job.precision.param_dtype is not None:
            compute_under_autocast(job.module, job.precision.param_dtype)
        for param in job.module.parameters() if job.world > 1 else ():
            if param.requires_grad:
                # Gradients are copied into the buckets of DistributedDataParallel, which are never freed. It needs a
                # process group itself.
                place = torch.zeros_like(param, requires_grad=False)
                param.register_post_accumulate_grad_hook(partial(_copy_gradient, place))
        return job.module, optim(job.module.parameters())
    for holder in job.module.modules():  # in the dtypes that they are computed with, as FSDP gathers them
        dtype = job.precision.dtype_of(holder)
        for param in parameters_of(holder, recurse=False):
            if dtype is not None and param.is_floating_point():
                param.data = param.data.to(dtype)
    job.precision.prepare(job.module.modules())
    comm: Any = rehearsed(rank, job.world, job.like)
    optimizer = OSS(
        job.module.named_parameters(),
        optim,
        comm,
        partition=job.partition,
        precision=MixedPrecision(job.precision.param_dtype),
        rounded={},  # the model is cast already
        offload=job.offload,
    )
    kind = ShardedDDP if stage == "2" else AveragingDDP
    return kind(job.module, optimizer, precision=MixedPrecision(reduce_dtype=job.precision.reduce_dtype)), optimizer


def _copy_gradient(place: Tensor, param: Tensor) -> None:
    assert param.grad is not None
    place.copy_(param.grad)


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
