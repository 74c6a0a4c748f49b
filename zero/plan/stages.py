"""A step at each stage as a list of what comes and goes, in the order in which the stages themselves do it.

Each function returns a `Cost`: what a rank holds between backward and step, and by how much the peak of a settled step
exceeds it. The rank is the one that owns most. Gradients are taken to arrive in the order in which they were measured
to, otherwise from the last parameter to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from zero.oss.comm import agreement_bytes
from zero.oss.partition import Arrangement, arrange, bucket_limit, cut_for
from zero.plan.flat import Flat, size_up
from zero.plan.ledger import Ledger
from zero.plan.needs import Activations, OptimizerNeeds, measure_optimizer
from zero.plan.result import Cost
from zero.plan.sizes import Options, Sizes


class Job:
    """One model, optimizer and set of options at one number of ranks."""

    def __init__(
        self, sizes: Sizes, world: int, optim: Callable[..., Optimizer], options: Options, activations: Activations
    ) -> None:
        self.sizes, self.world, self.options, self.activations = sizes, world, options, activations
        self.optim = optim
        self.cut = cut_for(options.partition, optim, options.granularity)
        self.lead, self.agreement = agreement_bytes(world if options.backend == "gloo" else 1)
        self._needs: dict[torch.dtype, OptimizerNeeds] = {}

    def needs(self, dtype: torch.dtype) -> OptimizerNeeds:
        if dtype not in self._needs:
            self._needs[dtype] = measure_optimizer(self.optim, dtype, self.options.backend)
        return self._needs[dtype]

    def at_world(self, world: int) -> Job:
        """The same on so many ranks; for the parts of a hybrid."""
        job = Job(self.sizes, world, self.optim, self.options, self.activations)
        job._needs = self._needs
        return job

    @cached_property
    def model(self) -> list[_Kept]:
        """Parameters as stages 0 to 2 keep them: of the dtype that is computed with, and what the optimizer steps."""
        computed = {
            param: group.dtype if group.dtype is not None and param.is_floating_point() else param.dtype
            for group in self.sizes.groups
            for param in group.params
        }
        kept = []
        for name, param in self.sizes.params.items():
            dtype = computed.get(param, param.dtype)
            cast = param if dtype is param.dtype else nn.Parameter(param.detach().to("meta", dtype), param.requires_grad)
            master = self.options.master_dtype or (param.dtype if dtype is not param.dtype else None)
            wider = master is not None and master.itemsize > dtype.itemsize and dtype.is_floating_point
            kept.append(_Kept(name, cast, master if wider and master is not None else dtype))
        return kept

    def stepping(self, owned: Sequence[tuple[torch.dtype, int, int, int]]) -> tuple[int, int]:
        """Bytes of state, and what a step holds for a moment. owned: (dtype, elements, largest, tensors), group-wise."""
        state, largest, total = 0.0, 0.0, 0.0
        for dtype, elements, most, tensors in owned:
            if not elements:
                continue
            needs = self.needs(dtype)
            state += needs.states * elements * dtype.itemsize + needs.fixed * tensors
            scratch = needs.scratch * dtype.itemsize
            if needs.at_once:
                total += scratch * elements
            else:
                largest = max(largest, scratch * most)
        return round(state), round(largest + total)


@dataclass(frozen=True)
class _Kept:
    name: str
    param: nn.Parameter
    stepped: torch.dtype


def data_parallel(job: Job) -> Cost:
    """Stage 0: DistributedDataParallel and the plain optimizer, masters beside where there are any."""
    model = job.model
    trained = [kept for kept in model if kept.param.requires_grad]
    gradients = sum(kept.param.nbytes for kept in trained)
    parameters = sum(kept.param.nbytes for kept in model) + job.sizes.buffers
    state, scratch = job.stepping([(kept.stepped, kept.param.numel(), kept.param.numel(), 1) for kept in trained])
    mastered = [kept for kept in trained if kept.stepped is not kept.param.dtype]
    masters = sum(kept.param.numel() * kept.stepped.itemsize for kept in mastered)
    ledger = Ledger(parameters + state + masters + _buckets_of_ddp(job, gradients))
    ledger.touch(job.activations.forward)
    _backward_whole(job, ledger, trained)
    ledger.take(masters)  # gradients in the masters' dtype
    ledger.touch(scratch)
    sent = 2 * (job.world - 1) * gradients // job.world
    return Cost.of("0", "DDP", job.world, parameters, gradients, state + masters, peak=ledger.peak, sent=sent)


def sharded_state(job: Job) -> Cost:
    """Stage 1: DistributedDataParallel and OSS."""
    flats = _buckets(job)
    trained = [kept for kept in job.model if kept.param.requires_grad]
    gradients = sum(kept.param.nbytes for kept in trained)
    parameters = sum(flat.whole for flat, _ in flats) + job.sizes.buffers
    state, masters, scratch = _state_of_oss(job, flats)
    ledger = Ledger(parameters + state + masters + _buckets_of_ddp(job, gradients))
    ledger.touch(job.activations.forward)
    _backward_whole(job, ledger, trained)
    ledger.take(sum(flat.owned * dtype.itemsize for flat, dtype in flats if _mastered(flat, dtype)))
    ledger.touch(scratch)
    sent = 2 * (job.world - 1) * gradients // job.world + _gather_step(job, ledger, flats)
    return Cost.of("1", "OSS", job.world, parameters, gradients, state + masters, peak=ledger.peak, sent=sent)


def sharded_gradients(job: Job) -> Cost:
    """Stage 2: ShardedDDP and OSS."""
    flats = _buckets(job)
    parameters = sum(flat.whole for flat, _ in flats) + job.sizes.buffers
    state, masters, scratch = _state_of_oss(job, flats)
    ledger = Ledger(parameters + state + masters)
    ledger.touch(job.activations.forward)
    reduction = _Reduction(job, ledger)
    ledger.touch(job.lead)
    for flat, dtype in flats:
        taken = 0
        for name, gradient in zip(flat.names, flat.gradients, strict=True):
            ledger.touch(job.activations.before.get(name, 0))
            ledger.take(gradient)
            taken += gradient
            if taken * job.world > 2 * flat.whole:
                reduction.finish()
        reduction.finish()
        if flat.taken:
            reduction.launch(flat, dtype)
    reduction.finish()
    ledger.touch(scratch)
    sent = job.agreement + sum(flat.sent for flat, _ in flats) + _gather_step(job, ledger, flats)
    cost = (parameters, reduction.kept, state + masters)
    return Cost.of("2", "ShardedDDP", job.world, *cost, peak=ledger.peak, sent=sent)


def sharded_parameters(job: Job, *, kept: bool) -> Cost:
    """Stage 3: FSDP. kept: parameters stay from forward to backward."""
    world, replicas = job.world, job.options.replicas
    job = job.at_world(world // replicas)
    units = _units(job)
    flats = [flat for unit in units.values() for flat in unit]
    parameters = sum(flat.part for flat in flats) + job.sizes.buffers
    owned = [(_stored(job, flat), flat.owned, flat.largest, flat.tensors) for flat in flats]
    state, scratch = job.stepping(owned)
    ledger = Ledger(parameters + state)
    gather = _Gather(job, ledger, kept)
    root, *blocks = units
    gather.unshard(units[root])
    for unit in blocks:
        gather.unshard(units[unit])
        ledger.touch(job.activations.forward)
        if not kept:
            gather.reshard(units[unit])
    ledger.touch(job.activations.forward)
    reduction = _Reduction(job, ledger)
    _backward_by_units(job, ledger, units, gather, reduction)
    ledger.touch(scratch)
    sent = gather.sent + job.agreement + sum(flat.sent for flat in flats)
    if replicas > 1:
        sent += sum(2 * flat.sums * (replicas - 1) // replicas for flat in flats)
    title = "FSDP, kept" if kept else "FSDP"
    cost = (parameters, reduction.kept, state)
    return Cost.of("3 kept" if kept else "3", title, world, *cost, peak=ledger.peak, sent=sent)


# ---------------------------------------------------------------------------------------------------- gradients


class _Reduction:
    """What lies on the way to the owners, as in GradBucket: one group, or one unit's, at a time."""

    def __init__(self, job: Job, ledger: Ledger) -> None:
        self._job, self._ledger = job, ledger
        self._in_flight: list[tuple[Flat, torch.dtype, int]] = []
        self.kept = 0

    def launch(self, flat: Flat, stepped: torch.dtype) -> None:
        """The gradients themselves are held already; those that travel alone stay until `finish`."""
        ledger, travels_as_written = self._ledger, self._sent_size(flat) == flat.gradients_itemsize
        copied = 0 if travels_as_written else flat.message - flat.small
        ledger.take(copied)
        ledger.take(flat.small)
        if not travels_as_written:
            ledger.touch(flat.small * flat.gradients_itemsize // self._sent_size(flat))
        gone = flat.taken - (flat.alone if travels_as_written else 0)
        ledger.give(gone)
        ledger.take(flat.received)
        self._in_flight.append((flat, stepped, flat.taken - gone + copied + flat.small + flat.received))
