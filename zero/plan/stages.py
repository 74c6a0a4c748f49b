"""A step at each stage, as what comes and goes in the order in which the stages themselves do it.

Every function returns a `Cost`: what a rank holds between backward and step, the peak of a settled step, and what
leaves the rank. Gradients arrive in the order in which they were measured to, otherwise from the last parameter to the
first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby, pairwise

import torch

from zero.plan.job import Job
from zero.plan.layouts import Bucket
from zero.plan.ledger import Ledger
from zero.plan.result import Cost
from zero.plan.traffic import Gathering, Reduction


def data_parallel(job: Job) -> Cost:
    """Stage 0: DistributedDataParallel and the plain optimizer; masters, where there are any, whole beside it."""
    trained = [kept for kept in job.layouts.kept if kept.trained]
    parameters = sum(kept.nbytes for kept in job.layouts.kept) + job.buffers
    masters = sum(kept.numel * kept.stepped.itemsize for kept in trained if kept.mastered)
    numels: dict[torch.dtype, list[int]] = {}
    for kept in trained:
        numels.setdefault(kept.stepped, []).append(kept.numel)
    state, scratch = job.stepping((dtype, sum(each), max(each), len(each)) for dtype, each in numels.items())
    ledger = Ledger(parameters + state + masters, job.activations)
    gradients = _whole_gradients(job, ledger, copies=True)
    ledger.take(masters)  # gradients in the masters' dtype
    ledger.touch(scratch)
    held = {"parameters": parameters, "gradients": gradients, "optimizer": state + masters}
    return Cost("0", job.world, **held, peak=ledger.peak, sent=_all_reduced(job, gradients))


def sharded_state(job: Job) -> Cost:
    """Stage 1: DistributedDataParallel, whose buckets are the gradients, and OSS."""
    parameters, optimizer, scratch = _of_oss(job)
    ledger = Ledger(parameters + optimizer, job.activations)
    gradients = _whole_gradients(job, ledger, copies=False)
    ledger.take(sum(bucket.flat.owned * bucket.stepped.itemsize for bucket in job.buckets if bucket.mastered))
    ledger.touch(max(scratch, _refreshed_masters(job)))
    sent = _all_reduced(job, gradients) + _gather_after_step(job, ledger)
    held = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    return Cost("1", job.world, **held, peak=ledger.peak, sent=sent)


def sharded_gradients(job: Job) -> Cost:
    """Stage 2: ShardedDDP and OSS."""
    parameters, optimizer, scratch = _of_oss(job)
    ledger = Ledger(parameters + optimizer, job.activations)
    ledger.forward()
    gradients = _backward_by_buckets(job, ledger)
    ledger.touch(max(scratch, _refreshed_masters(job)))
    sent = job.agreement[1] + sum(bucket.flat.sent for bucket in job.buckets) + _gather_after_step(job, ledger)
    held = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    return Cost("2", job.world, **held, peak=ledger.peak, sent=sent)


def sharded_parameters(job: Job) -> Cost:
    """Stage 3: FSDP."""
    return _fsdp(job, kept=False)


def sharded_parameters_kept(job: Job) -> Cost:
    """Stage 3 with parameters that stay whole from forward to backward (SHARD_GRAD_OP)."""
    return _fsdp(job, kept=True)


STAGES: dict[str, Callable[[Job], Cost]] = {
    "0": data_parallel,
    "1": sharded_state,
    "2": sharded_gradients,
    "3 kept": sharded_parameters_kept,
    "3": sharded_parameters,
}
"""From the one that keeps most on a rank to the one that keeps least."""


# ---------------------------------------------------------------------------------------------- stages 0 to 2


def _whole_gradients(job: Job, ledger: Ledger, *, copies: bool) -> int:
    """A forward and backward after which every gradient is whole on every rank; their bytes.

    copies: whether DistributedDataParallel's buckets, which are there all the time, are a second copy of the gradients.
    """
    trained = {kept.name: kept.nbytes for kept in job.layouts.kept if kept.trained}
    gradients, alone = sum(trained.values()), job.world == 1
    ledger.take(0 if alone else gradients)
    ledger.forward()
    order = [*job.order(trained)]
    ledger.arrive(order, [trained[name] for name in order], held=alone or copies)
    ledger.end_backward()
    return gradients


def _all_reduced(job: Job, gradients: int) -> int:
    return 2 * (job.world - 1) * gradients // job.world


def _of_oss(job: Job) -> tuple[int, int, int]:
    """Bytes of parameters, of state with masters, and what the step holds for a moment."""
    parameters = sum(bucket.flat.whole for bucket in job.buckets) + job.buffers
    masters = sum(bucket.flat.part for bucket in job.buckets if bucket.mastered)
    state, scratch = job.stepping_parts(job.buckets)
    return parameters, state + masters, scratch


def _refreshed_masters(job: Job) -> int:
    """What OSS holds to find what was written into parameters since its last step: a copy of a master, and a mask."""
    parts = (
        bucket.flat.part + bucket.flat.part // bucket.stepped.itemsize for bucket in job.buckets if bucket.mastered
    )
    return max(parts, default=0)


def _backward_by_buckets(job: Job, ledger: Ledger) -> int:
    """A backward of ShardedDDP; the bytes of the gradients that stay."""
    buckets, reduction = job.buckets, Reduction(ledger)
    place = {name: number for number, bucket in enumerate(buckets) for name in bucket.names}
    gradients = _gradients(buckets)
    largest, largest_bucket = max(gradients.values(), default=0), max(bucket.flat.whole for bucket in buckets)
    taken, launched = [0] * len(buckets), 0

    def make_room(number: int) -> None:
        if job.gloo and (taken[number] + largest) * job.world > largest_bucket:
            reduction.finish()

    for name in job.order(reversed(gradients)):
        number = place[name]
        ledger.arrive([name], [gradients[name]])
        taken[number] += gradients[name]
        make_room(number)
        while launched < len(buckets) and taken[launched] == buckets[launched].flat.taken:
            ledger.touch(0 if launched else job.agreement[0])
            reduction.finish()
            reduction.launch(buckets[launched])
            launched += 1
            if launched < len(buckets):
                make_room(launched)
    ledger.end_backward()
    reduction.finish()
    return reduction.kept


def _gather_after_step(job: Job, ledger: Ledger) -> int:
    """What OSS sends after its step."""
    as_sent = job.layouts.options.broadcast_dtype
    ledger.touch(job.agreement[0])
    sent, copies = job.agreement[1], [0]
    for bucket in job.buckets:
        flat = bucket.flat
        if flat.taken and as_sent is not None and as_sent.itemsize < flat.itemsize and job.world > 1:
            sent += flat.gathered * as_sent.itemsize // flat.itemsize * (job.world - 1)
            copies.append(flat.whole * as_sent.itemsize // flat.itemsize)
        elif flat.taken:
            sent += flat.gathered * (job.world - 1)
            copies.append(0)
    ledger.touch(max(map(sum, pairwise(copies)), default=0))  # those of two buckets are in flight at a time
    return sent


# ---------------------------------------------------------------------------------------------------- stage 3


def _fsdp(job: Job, *, kept: bool) -> Cost:
    buckets = [bucket for unit in job.units.values() for bucket in unit]
    parameters = sum(bucket.flat.part for bucket in buckets) + job.buffers
    state, scratch = job.stepping_parts(buckets)
    ledger = Ledger(parameters + state, job.activations)
    gathering = Gathering(job, ledger, kept=kept)
    for name, unit in job.units.items():
        gathering.unshard(unit)
        ledger.forward()
        if name and not kept:
            gathering.reshard(unit)
    gradients = _backward_by_units(job, ledger, gathering, kept=kept)
    ledger.touch(scratch)
    replicas = job.layouts.options.replicas
    sent = gathering.sent + sum(bucket.flat.sent for bucket in buckets)
    sent += sum(2 * bucket.flat.sums * (replicas - 1) // replicas for bucket in buckets)
    held = {"parameters": parameters, "gradients": gradients, "optimizer": state}
    return Cost("3 kept" if kept else "3", job.world * replicas, **held, peak=ledger.peak, sent=sent)


def _backward_by_units(job: Job, ledger: Ledger, gathering: Gathering, *, kept: bool) -> int:
    """A backward of FSDP; the bytes of the gradients that stay."""
    units, reduction = job.units, Reduction(ledger)
    unit_of = {name: unit for unit, buckets in units.items() for bucket in buckets for name in bucket.names}
    gradients = _gradients(bucket for buckets in units.values() for bucket in buckets)
    order = [*job.order(name for name in job.layouts.sizes.params if name in gradients)]
    missing = Counter(unit_of[name] for name in order)
    entered, pending = {""}, ""

    def launch_pending() -> None:
        reduction.finish()
        for bucket in units[pending] if pending else ():
            reduction.launch(bucket)

    def complete(unit: str) -> None:
        reduction.finish()
        gathering.reshard(units[unit])
        if pending:  # no gather has come since that it could go with
            gathering.agree()
            launch_pending()

    for unit, group in groupby(order, key=unit_of.__getitem__):
        if unit not in entered:
            entered.add(unit)
            if not kept:
                gathering.unshard(units[unit])
                launch_pending()
                pending = ""
        names = [*group]
        ledger.arrive(names, [gradients[name] for name in names])
        missing[unit] -= len(names)
        if unit and not missing[unit]:
            complete(unit)
            pending = unit
    ledger.end_backward()
    complete("")
    gathering.agree()
    reduction.finish()
    for bucket in units[""]:
        reduction.launch(bucket)
    reduction.finish()
    for unit in units.keys() - entered if kept else ():
        gathering.reshard(units[unit])
    return reduction.kept


def _gradients(buckets: Iterable[Bucket]) -> dict[str, int]:
    """Bytes by name, of what is trained."""
    return {
        name: nbytes
        for bucket in buckets
        for name, nbytes in zip(bucket.names, bucket.flat.gradients, strict=True)
        if nbytes
    }
