"""A step at each stage, as what comes and goes in the order in which the stages themselves do it.

Every function returns a `Cost`: what a rank holds between backward and step, the peak of a settled step, and what
leaves the rank. In which order gradients come, and what the model itself holds meanwhile, says the Course.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from zero.plan.job import Job
from zero.plan.ledger import Ledger
from zero.plan.result import Cost
from zero.plan.traffic import Reduction
from zero.plan.units import Step


def data_parallel(job: Job) -> Cost:
    """Stage 0: DistributedDataParallel and the plain optimizer; masters, where there are any, whole beside it."""
    trained = [kind for kind in job.kept.kinds if kind.trained]
    parameters = job.kept.nbytes + job.buffers
    masters = sum(sum(kind.numels) * kind.stepped.itemsize for kind in trained if kind.mastered)
    state, scratch = job.stepping(
        (kind.stepped, sum(kind.numels), max(kind.numels), len(kind.numels)) for kind in trained
    )
    ledger = Ledger(parameters + state + masters)
    gradients = _whole_gradients(job, ledger, copies=True)
    ledger.take(masters)  # gradients in the masters' dtype
    ledger.touch(scratch)
    held = {"parameters": parameters, "gradients": gradients, "optimizer": state + masters}
    return Cost("0", job.world, **held, peak=ledger.peak, sent=_sent_by_ddp(job, gradients))


def sharded_state(job: Job) -> Cost:
    """Stage 1: DistributedDataParallel, whose buckets are the gradients, and OSS."""
    parameters, optimizer, scratch = _of_oss(job)
    ledger = Ledger(parameters + optimizer)
    gradients = _whole_gradients(job, ledger, copies=False)
    ledger.take(sum(bucket.owned * bucket.stepped.itemsize for bucket in job.buckets if bucket.mastered))
    ledger.touch(max(scratch, _refreshed_masters(job)))
    sent = _sent_by_ddp(job, gradients) + _gather_after_step(job, ledger)
    held = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    return Cost("1", job.world, **held, peak=ledger.peak, sent=sent)


def sharded_gradients(job: Job) -> Cost:
    """Stage 2: ShardedDDP and OSS."""
    parameters, optimizer, scratch = _of_oss(job)
    ledger = Ledger(parameters + optimizer)
    sent = _broadcast_buffers(job, ledger, [job.world])
    ledger.touch(job.course.forward)
    gradients = _backward_by_buckets(job, ledger)
    ledger.touch(max(scratch, _refreshed_masters(job)))
    sent += job.agreement[1] + sum(bucket.sent for bucket in job.buckets) + _gather_after_step(job, ledger)
    held = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    return Cost("2", job.world, **held, peak=ledger.peak, sent=sent)


def sharded_parameters(job: Job) -> Cost:
    """Stage 3: FSDP."""
    return _fsdp(job, stays=False)


def sharded_parameters_kept(job: Job) -> Cost:
    """Stage 3 with parameters that stay whole from forward to backward (SHARD_GRAD_OP)."""
    return _fsdp(job, stays=True)


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
    gradients, alone = sum(job.kept.gradients), job.world == 1
    ledger.take(0 if alone else gradients)
    ledger.touch(job.course.forward)
    for moment in job.course.gradients():
        ledger.compute(moment.before, moment.after)
        if alone or copies:
            ledger.take(sum(moment.gradients))
        else:
            ledger.touch(max(moment.gradients))  # each goes into its bucket as it comes
    ledger.end_backward()
    return gradients


def _sent_by_ddp(job: Job, gradients: int) -> int:
    """Buffers from the first rank, and gradients to all."""
    return (job.world - 1) * sum(job.messages) + 2 * (job.world - 1) * gradients // job.world


def _of_oss(job: Job) -> tuple[int, int, int]:
    """Bytes of parameters, of state with masters, and what the step holds for a moment."""
    parameters = sum(bucket.whole for bucket in job.buckets) + job.buffers
    masters = sum(bucket.part for bucket in job.buckets if bucket.mastered)
    state, scratch = job.stepping_in_slices(job.buckets)
    return parameters, state + masters, scratch


def _refreshed_masters(job: Job) -> int:
    """What OSS holds to find what was written into parameters since its last step: a copy of a master, and a mask."""
    parts = (bucket.part + bucket.part // bucket.stepped.itemsize for bucket in job.buckets if bucket.mastered)
    return max(parts, default=0)


def _backward_by_buckets(job: Job, ledger: Ledger) -> int:
    """A backward of ShardedDDP; the bytes of the gradients that stay."""
    buckets, reduction = job.buckets, Reduction(ledger)
    room = _room(job)
    taken, launched = [0] * len(buckets), 0

    def complete(number: int) -> bool:
        return taken[number] == buckets[number].taken

    for _, home, gradients, before, after in job.layouts.gradients_in_buckets():
        ledger.compute(before, after)
        sums = [*accumulate(gradients, initial=taken[home])]
        taken[home] = sums[-1]
        beside = bisect_right(sums, room, 1)
        ledger.take(sum(gradients[:beside]))
        if beside < len(sums):
            reduction.finish()
            ledger.take(sum(gradients[beside:]))
        while complete(home) and launched < len(buckets) and complete(launched):
            ledger.touch(0 if launched else job.agreement[0])
            reduction.finish()
            reduction.launch(buckets[launched])
            launched += 1
            if launched < len(buckets) and taken[launched] > room:
                reduction.finish()
    ledger.end_backward()
    reduction.finish()
    return reduction.kept


def _room(job: Job) -> float:
    """Bytes of gradients that may fill a bucket while those of another are on their way."""
    if not job.gloo:
        return math.inf
    largest = max(job.kept.gradients)
    return max(bucket.whole for bucket in job.buckets) // job.world - largest


def _gather_after_step(job: Job, ledger: Ledger) -> int:
    """What OSS sends after its step."""
    as_sent = job.layouts.options.broadcast_dtype
    ledger.touch(job.agreement[0])
    sent, copies = job.agreement[1], [0]
    for flat in job.buckets:
        if flat.taken and as_sent is not None and as_sent.itemsize < flat.computed.itemsize and job.world > 1:
            sent += flat.gathered * as_sent.itemsize // flat.computed.itemsize * (job.world - 1)
            copies.append(flat.whole * as_sent.itemsize // flat.computed.itemsize)
        elif flat.taken:
            sent += flat.gathered * (job.world - 1)
            copies.append(0)
    ledger.touch(max(map(sum, pairwise(copies)), default=0))  # those of two buckets are in flight at a time
    return sent


# --------------------------------------------------------------------------------------------- stages 2 and 3


def _broadcast_buffers(job: Job, ledger: Ledger, worlds: Sequence[int]) -> int:
    """Before the forward, within groups of so many ranks, one after another; what leaves the first of a group, which
    sends most."""
    sent = 0
    for world in worlds:
        for message in job.messages if world > 1 else ():
            ledger.touch(message)
            sent += message * (world - 1)
    return sent


# ---------------------------------------------------------------------------------------------------- stage 3


def _fsdp(job: Job, *, stays: bool) -> Cost:
    flats = [flat for unit in job.units for flat in unit]
    parameters = sum(flat.part for flat in flats) + job.buffers
    state, scratch = job.stepping_parts(flats)
    replicas = job.layouts.options.replicas
    ledger = Ledger(parameters + state)
    sent = _broadcast_buffers(job, ledger, [job.world, replicas])
    step = Step(job, ledger, stays=stays)
    step.run()
    ledger.touch(scratch)
    sent += step.sent + sum(flat.sent for flat in flats)
    sent += sum(2 * flat.sums * (replicas - 1) // replicas for flat in flats)
    held = {"parameters": parameters, "gradients": step.gradients, "optimizer": state}
    return Cost("3 kept" if stays else "3", job.world * replicas, **held, peak=ledger.peak, sent=sent)
