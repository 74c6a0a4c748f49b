"""The interface of all transports, and the transport of a group of one rank.

Code above does not know which transport runs. `channel` is the number of an operation (oplog.py). Ranks compare it, so
that all raise when they are out of step.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import lru_cache, reduce
from itertools import chain, islice, pairwise, repeat
from operator import or_
from threading import RLock
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from zero._torch.process_groups import coalesced, collectives_of_one_tensor, in_stream_order
from zero._torch.tensors import wraps_others
from zero.comm.oplog import COMPARISON, OF_BACKENDS, TAIL, Log

# ------------------------------------------------------------------------------------------------------------- messages
#
# Flat messages of many small tensors, and sums over the ranks.
#
# Sums are added in rank order, so that they do not depend on timing.


_SUPPORTED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
_SUPPORTED |= {torch.int64, torch.int32, torch.int8, torch.uint8}
"""Dtypes that NCCL and Gloo support. Tensors of other dtypes are sent as bytes."""

BATCH = 1 << 24
"""Most bytes of a message that packs several tensors, or is sent in pieces."""


def real(tensor: Tensor) -> Tensor:
    """Returns complex numbers as pairs of real ones, in one more dimension: backends do not support them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_sent(tensor: Tensor) -> Tensor:
    """Returns the tensor, as bytes if backends do not support its dtype. Only for operations that do not compute."""
    return tensor if tensor.dtype in _SUPPORTED else real(tensor).view(torch.uint8)


def lengths(bounds: Sequence[int]) -> list[int]:
    """Returns the lengths of the shards [bounds[r], bounds[r + 1]), by rank."""
    return [high - low for low, high in pairwise(bounds)]


def batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors in batches for one message each, of one dtype and device and of limited size; without those
    that are empty or wrap others."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}  # of the last batch of each kind
    for tensor in tensors:
        if tensor.numel() and not wraps_others(tensor):  # which are frozen, and each rank keeps its own
            kind = tensor.dtype, tensor.device
            same_kind = by_kind.setdefault(kind, [])
            size = sizes.get(kind, BATCH) + tensor.nbytes
            if size > BATCH:
                same_kind.append([])
                size = tensor.nbytes
            sizes[kind] = size
            same_kind[-1].append(tensor)
    return [batch for same_kind in by_kind.values() for batch in same_kind]


def flatten(batch: Sequence[Tensor]) -> Tensor:
    """Returns a flat copy of the tensors, one after another."""
    return concatenate([tensor.detach().reshape(-1) for tensor in batch])


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates flat tensors of one dtype. Plain torch.cat refuses some dtypes under the user's autocast; autocast
    does not apply to torch.cat with `out`."""
    return torch.cat([*tensors], out=tensors[0].new_empty(sum(tensor.numel() for tensor in tensors)))


def as_flat(tensor: Tensor) -> Tensor | None:
    """Returns the tensor's own memory, flat; None where its elements are not there one after another as they are."""
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.detach().view(-1) if plain else None


def empty_flat(batch: Sequence[Tensor]) -> Tensor:
    """Returns an uninitialised tensor of the size of the flattened batch."""
    return batch[0].detach().new_empty(sum(tensor.numel() for tensor in batch))


def copy_into(batch: Sequence[Tensor], flat: Tensor) -> None:
    """Overwrites the tensors with the values of the flattened batch."""
    for tensor, values in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
        tensor.detach().copy_(values.view(tensor.shape))


def sum_in_rank_order(received: Sequence[Tensor], times: float = 1) -> Tensor:
    """Returns `times` the sums over the ranks, flat, one message after another. received: for each message one row a
    rank."""
    numels = [rows[0].numel() for rows in received]
    total = received[0].new_empty(sum(numels), dtype=summed_as(received[0].dtype))
    for rows, into in zip(received, total.split(numels), strict=True):
        add_in_order(rows, into, times)
    return total


def add_in_order(rows: Sequence[Tensor] | Tensor, into: Tensor, times: float = 1) -> None:
    """Overwrites `into` with `times` the sum of tensors of one length."""
    first, *others = rows
    if others and first.dtype == into.dtype:  # else torch.add would round the sum to the dtype of the rows
        torch.add(first, others.pop(0), out=into)
    else:
        into.copy_(first)
    for row in others:
        into += row
    if times != 1:
        into *= times


SIXTEEN_BITS = torch.float16, torch.bfloat16
"""Floats whose sums are float32."""


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which tensors are summed: float32 for 16-bit floats, else their own."""
    return torch.float32 if dtype in SIXTEEN_BITS else dtype


# ----------------------------------------------------------------------------------------------------------------- work
#
# Transfers in flight, and the context in which a part of one may fail.
#
#     Work        of any transport. Each kind has a `wait` of its own, and holds no method of its own: an object that
#                 does is a cycle, and its buffers would live until garbage is collected where nobody waits for it
#     GroupWork   collectives of a process group
#     SumWork     sums of what an all-to-all brings
#
# StreamWork is in streams.py, QueuedWork in host_memory.py, ReplicaWork in zero/shards/shard_group.py.


# Times between looks at the other ranks while a rank waits; the last one is repeated.
_INTERVALS = [timedelta(seconds=seconds) for seconds in (0.25, 0.25, 0.25, 0.25, 0.5, 1, 2, 4)]


class Work:
    """A transfer in flight, which owns its buffers until `wait` has returned; by itself, one that is complete."""

    before: Work | None = None
    """What may be waited for earlier, where this one goes on with its result."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait_for_sent(self) -> bool:
        """Waits for what this rank has sent, and frees it. Returns whether `wait` then has more to do than to return;
        otherwise has done nothing."""
        before, self.before = self.before, None
        if before is None:
            return False
        before.wait()
        return True

    def wait(self) -> Any:
        """Waits for the transfer and returns its result, or raises its error. Must not be called after it returned."""
        return self._result


class Operation:
    """A context for a part of an operation that can fail: its launch, or the wait for it. Keeps the buffers alive if it
    does, as what is in flight may still write into them. A class, as a context of contextlib takes as long as a launch.

    channel: None before ranks have channels. of_others: classes of the errors by which the transport tells of others.
    Raises RuntimeError for errors of these, and if an earlier transfer has failed.
    """

    def __init__(
        self,
        log: Log,
        channel: int | None,
        buffers: object,
        of_others: tuple[type[BaseException], ...] = OF_BACKENDS,
    ) -> None:
        self._log, self._channel, self._buffers, self._of_others = log, channel, buffers, of_others

    def __enter__(self) -> None:
        if self._log.failure.broken:
            self._log.failure.refuse_if_broken(self._buffers)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._log.failure.of_transfer(self._channel, self._buffers, error, self._of_others)


class GroupWork(Work):
    """Collectives of a process group that were launched. `wait` returns `times` the result.

    blocks: whether a wait blocks the host, which looks meanwhile whether another rank is known to be missing.
    works: of torch; None for what NCCL runs on the current stream, where there is nothing to wait for.
    """

    def __init__(
        self,
        log: Log,
        blocks: bool,
        channel: int,
        buffers: object,
        works: Sequence[dist.Work | None],
        result: Any = None,
        times: float = 1,
    ) -> None:
        self._log, self._channel, self._buffers = log, channel, buffers
        self._works, self._result, self._times, self._blocks = works, result, times, blocks

    def wait(self) -> Any:
        if self._log.failure.broken:
            self._log.failure.refuse_if_broken(self._buffers)
        try:  # not `Operation`, which costs two calls in each wait
            for work in filter(None, self._works):
                if self._blocks:
                    wait_watching(work, self._log)
                else:
                    work.wait()
        except BaseException as error:
            self._log.failure.of_transfer(self._channel, self._buffers, error)
            raise
        self._buffers, self._works = None, ()  # what was sent is freed before the result gets memory
        return self._result if self._times == 1 else self._result.mul_(self._times)


def wait_watching(work: dist.Work, log: Log) -> None:
    """Waits in intervals, and looks in between whether another rank is known to be missing."""
    for interval in chain(_INTERVALS, repeat(_INTERVALS[-1])):
        try:
            work.wait(interval)
            return
        # A wait that runs out raises it, too, and may be tried again: of a collective of Gloo it leaves all as it was.
        # (Of a `send` or `recv` it closes all connections: there are none here. tests/comm/test_comm.py)
        except RuntimeError:
            if work.is_completed():
                break
            log.failure.refuse_if_broken()
    work.wait()  # raises why it failed; nothing if it was completed just after the interval


class SumWork(Work):
    """add: of a transport, sums what `received` brings, with a factor."""

    def __init__(self, add: Callable[[Sequence[Tensor], float], Tensor], received: Work, times: float) -> None:
        self._add, self._received, self._times = add, received, times

    def wait_for_sent(self) -> bool:
        self._received = Work(self._received.wait())
        return True

    def wait(self) -> Tensor:
        return self._add(self._received.wait(), self._times)


# ----------------------------------------------------------------------------------------------------------- transports


Message = tuple[Tensor, Sequence[int]]
"""A flat tensor, and the number of its elements that go to each rank, in rank order."""


class Transport(ABC):
    """Sends tensors on one type of device between the ranks of one group.

    All methods are collective. The tensors passed in must not change until the call, or `wait` of the returned work,
    has returned. Ranks compare each call as oplog.py says; where they differ, it raises RuntimeError on every rank.
    """

    name: str
    """The name shown in logs."""
    overlaps: bool
    """Whether transfers run beside the computing, without taking the processor from it. The number of kernels of a
    reduce of one message then does not depend on the number of ranks."""

    reads_memory = False
    """Whether ranks read from one another's memory."""

    @abstractmethod
    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        """Fills the flat `full`. Rank r sends elements [bounds[r], bounds[r + 1]), which its own `full` holds."""

    @abstractmethod
    def reduce(self, messages: Sequence[Message], times: float, channel: int) -> Work:
        """Sums over the ranks the elements sent to this rank, of which all ranks have the same counts. `wait` returns
        `times` the sums, flat, one message after another, of 16-bit floats in float32, on the CPU in rank order."""

    def exchange(self, into: Tensor, sent: Message, counts_in: Sequence[int], channel: int) -> Work:
        """Sends other ranks their elements of the flat `sent`, and fills the flat `into` by what they send to this one,
        both in rank order. Each rank has counts of its own, of which the one for itself is 0. Only of transports that
        do not overlap: NCCL makes a connection for each two ranks, which takes memory beside torch's."""
        raise NotImplementedError

    @abstractmethod
    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        """Overwrites the contiguous tensor with `times` the sum, or with the maximum, over the ranks. `wait` returns
        its elements."""

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns the data of every rank, by rank. All ranks pass the same number of bytes, at least one."""

    @abstractmethod
    def compare(self, channel: int, *, flags: int = 0) -> int:
        """Compares between ranks this operation and the logs. Returns the flags, up to two bits, that any rank has."""


class Local(Transport):
    """The transport of a group of one rank."""

    name, overlaps = "this process alone", False

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        return Work()

    def reduce(self, messages: Sequence[Message], times: float, channel: int) -> Work:
        # A sum over one row is a copy: `times` must not change the gradients that were sent.
        return SumWork(sum_in_rank_order, Work([message.unsqueeze(0) for message, _ in messages]), times)

    def exchange(self, into: Tensor, sent: Message, counts_in: Sequence[int], channel: int) -> Work:
        return Work()

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        return Work(tensor)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def compare(self, channel: int, *, flags: int = 0) -> int:
        return flags


def refuse_differing_logs(transport: Transport, log: Log) -> None:
    """Collective. Raises RuntimeError on every rank, after their logs were found to differ."""
    length, tail = log.history
    # Filled up: all ranks must pass as many bytes, however long their logs are.
    received = transport.all_gather_bytes(array("q", [length, *tail, *[0] * (TAIL - len(tail))]).tobytes())
    histories = {}
    for rank, history in enumerate(received):
        length, *channels = array("q", history)
        histories[rank] = length, channels[: min(length, TAIL)]
    log.out_of_step(log.difference(histories))


# ------------------------------------------------------------------------------------------------------- process groups
#
# Transports over torch.distributed's process groups: Gloo, and backends that overlap with computing, such as NCCL.
#
#             Gloo                                    backends that overlap
# gather      one broadcast a shard                   one all-gather; shards of unequal length by one broadcast each,
#                                                     launched as one operation where the backend can
# reduce      one all-to-all from where the           one reduce-scatter of equal shards, others by one reduce
#             gradients lie, of a large message       each, launched as one operation; within a host, 16-bit floats
#             two (below), and a sum in             by one all-to-all, and sums in float32
#             rank order


_ALL_GATHER = in_stream_order(AllgatherOptions())
ALL_TO_ALL = in_stream_order(dist.AllToAllOptions())
_REDUCE_SCATTER = in_stream_order(dist.ReduceScatterOptions())
_SUM, _MAXIMUM = (in_stream_order(dist.AllreduceOptions()) for _ in range(2))
_SUM.reduceOp, _MAXIMUM.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM), dist.ReduceOp(dist.ReduceOp.MAX)

_DIFFER = 4
"""A flag of a comparison beside those of its caller: ranks are out of step."""

# Seconds for which an abort waits for a launch.
_CONNECTS = 1.0


class ProcessGroupTransport(Transport):
    """The common base of both transports.

    group: a ProcessGroup, or a Backend such as ProcessGroupGloo.
    blocks: whether waiting blocks the host, which looks meanwhile whether another rank is known to be missing.
    """

    def __init__(self, log: Log, group: Any, rank: int, world: int, *, blocks: bool) -> None:
        self.log, self._group, self._rank, self._world = log, group, rank, world
        self._blocks = blocks
        # By name, and looked up in each call: a bound method would keep the group alive, which its link does not.
        self._reduces_by, self._to_reduce = group, collectives_of_one_tensor(group)
        self._to_gather = self._to_reduce.all_gather
        # Groups by which ranks compare what they do, one after another.
        self._levels = [group]
        self._launching: AbstractContextManager[object] = nullcontext()
        if blocks:
            log.failure.at_failure.append(lambda _: never_drop(group))

    def reduce(self, messages: Sequence[Message], times: float, channel: int) -> Work:
        return SumWork(self.sum, self.all_to_all(messages, channel), times)

    sum = staticmethod(sum_in_rank_order)
    """Adds what `all_to_all` has received."""

    def all_to_all(self, messages: Sequence[Message], channel: int) -> Work:
        """Sends each rank its elements. `wait` returns for each message the elements from all ranks, one row a rank."""
        received = [message.new_empty(self._world, counts[self._rank]) for message, counts in messages]
        self.log.append(channel, sum(message.nbytes for message, _ in messages), self.compare)
        return self._launch(channel, (messages, received), self._exchange, messages, received, result=received)

    def _exchange(self, messages: Sequence[Message], received: Sequence[Tensor]) -> list[dist.Work | None]:
        collective, works = getattr(self._reduces_by, self._to_reduce.all_to_all), []
        for rows, (message, counts) in zip(received, messages, strict=True):
            into, sent, own = real(rows.view(-1)), real(message), [counts[self._rank]] * self._world
            # Without counts NCCL uses its own all-to-all, which takes equal parts.
            given = ([], []) if [*counts].count(counts[0]) == len(counts) else (own, [*counts])
            works.append(collective(into, sent, *given, ALL_TO_ALL))
        return works

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        given = [real(tensor)], _MAXIMUM if maximum else _SUM
        self.log.append(channel, tensor.nbytes, self.compare)
        return self._launch(channel, tensor, self._group.allreduce, *given, result=tensor, times=times)

    def _lane(self, owner: int) -> Any:
        """The group by which a rank broadcasts its own."""
        return self._group

    def _launch(
        self,
        channel: int,
        buffers: object,
        collective: Callable[..., Any],
        *args: Any,
        result: Any = None,
        times: float = 1,
    ) -> GroupWork:
        """Launches what has been appended to the log. collective: returns torch's work, or a list of it. buffers: are
        kept alive if it fails, as what is in flight may still write into them."""
        try:
            with self._launching:
                launched = collective(*args)
        except BaseException as error:
            self.log.failure.of_transfer(channel, buffers, error)
            raise
        works = launched if isinstance(launched, list) else [launched]
        return GroupWork(self.log, self._blocks, channel, buffers, works, result, times)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self._world)]
        self._launch(COMPARISON, (received, sent), self._group.allgather, [received], [sent]).wait()
        return [row.numpy().tobytes() for row in received]

    def compare(self, channel: int, *, flags: int = 0) -> int:
        self.log.record(channel)
        own, rows = (channel, self.log.digest), []
        for group in self._levels:
            rows = self._signatures(group, own, flags)
            # Lists and sets: a generator is entered once for each rank.
            flags = reduce(or_, [row[2] for row in rows], flags)
            if {(channel, digest) for channel, digest, _ in rows} != {own}:
                flags |= _DIFFER
        if flags & _DIFFER:  # on some ranks, as all know by now
            if len(self._levels) > 1:
                rows = self._signatures(self._group, own, flags)
            self.log.refuse_differing(channel, {rank: row[0] for rank, row in enumerate(rows)})
            refuse_differing_logs(self, self.log)
        self.log.clear()
        return flags

    def _signatures(self, group: Any, own: tuple[int, int], flags: int) -> list[list[int]]:
        """The operation, the digest of the log and the flags of each rank of a group."""
        # The device is named, as the user may have set another by torch.set_default_device.
        sent = torch.tensor([*own, flags], device="cpu")
        received = sent.new_empty(group.size() * len(sent))
        given = getattr(group, self._to_gather), received, sent, _ALL_GATHER
        self._launch(own[0], (sent, received), *given).wait()
        return received.view(-1, len(sent)).tolist()

    def _broadcast_shards(self, full: Tensor, bounds: Sequence[int]) -> list[dist.Work | None]:
        shards = [full[low:high] for low, high in pairwise(bounds)]
        owned = [(owner, as_sent(shard)) for owner, shard in enumerate(shards) if shard.numel()]
        # One alone meets no other on its way: it needs no lane.
        lane = self._lane if len(owned) > 1 else lambda _: self._group
        return [lane(owner).broadcast([shard], _from(owner)) for owner, shard in owned]


class Overlapping(ProcessGroupTransport):
    """The transport for a backend that overlaps with computing, such as NCCL. It runs on the current stream
    (streams.py): neither a launch nor a wait blocks the host.

    checks: the transport on the CPU by which the ranks compare their operations.
    one_host: whether all ranks are on one. Between hosts an all-to-all of 16 bits would have each rank send to each of
        another host by itself, which takes 4 times as long as a ring of float32, and more with more ranks a host.
    second: makes a process group for reductions alone, with the first of them, so that they need not wait for gathers;
        None, or what it returns, stands for `group`.
    abort: aborts the launched operations of groups after a failure: others on the device would wait for them.
    """

    overlaps = True

    def __init__(
        self,
        log: Log,
        group: Any,
        rank: int,
        world: int,
        *,
        blocks: bool,
        checks: Transport,
        name: str,
        one_host: bool = True,
        second: Callable[[], Any] | None = None,
        abort: Callable[[list[Any]], object] | None = None,
    ) -> None:
        super().__init__(log, group, rank, world, blocks=blocks)
        self._checks, self.name, self._one_host, self._second = checks, name, one_host, second
        # A list: the function below then also aborts the second group, which is made later.
        self._groups = groups = [group]
        if abort is not None:
            self._launching = launching = RLock()
            log.failure.at_failure.append(lambda _: _abort(launching, lambda: abort(groups)))

    def compare(self, channel: int, *, flags: int = 0) -> int:
        return self._checks.compare(channel, flags=flags)

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        sent, own = as_sent(full), as_sent(full[bounds[self._rank] : bounds[self._rank + 1]])
        self.log.append(channel, full.nbytes, self.compare)
        if _are_equal(tuple(bounds)):
            return self._launch(channel, full, getattr(self._group, self._to_gather), sent, own, _ALL_GATHER)
        return self._launch(channel, full, self._broadcast_as_one, full, bounds)

    def _broadcast_as_one(self, full: Tensor, bounds: Sequence[int]) -> list[dist.Work | None]:
        works: list[dist.Work | None] = []
        with coalesced(self._group, full.device, works):
            works += self._broadcast_shards(full, bounds)
        return works

    def reduce(self, messages: Sequence[Message], times: float, channel: int) -> Work:
        if self._second is not None:  # not where the group is made: replicas only average, and reduce nothing
            second, self._second = self._second, None
            if (made := second()) is not None:
                self._reduces_by, self._to_reduce = made, collectives_of_one_tensor(made)
                self._groups.append(made)
                # Where the link ends: torch ends the groups that it has made. Not at exit, where others may be gone.
                finalize(self, made.shutdown).atexit = False
        if len(messages) != 1 or (self._one_host and messages[0][0].dtype in SIXTEEN_BITS):
            return super().reduce(messages, times, channel)
        message, counts = messages[0]
        if [*counts].count(counts[0]) != len(counts):
            self.log.append(channel, message.nbytes, self.compare)
            shares = message.split([*counts])
            reduction = self._launch(channel, message, self._reduce_as_one, shares, message.device)
            return _OwnShare(reduction, shares[self._rank], times)
        sums = message.new_empty(counts[0])
        received, sent = real(sums), real(message)
        self.log.append(channel, message.nbytes, self.compare)
        collective = getattr(self._reduces_by, self._to_reduce.reduce_scatter)
        given = received, sent, _REDUCE_SCATTER
        if sums.dtype in SIXTEEN_BITS:
            reduction = self._launch(channel, (message, sums), collective, *given)
            return _OwnShare(reduction, sums, times)
        return self._launch(channel, (message, sums), collective, *given, result=sums, times=times)

    def _reduce_as_one(self, shares: Sequence[Tensor], device: torch.device) -> list[dist.Work | None]:
        """Each share in place, at its owner alone."""
        works: list[dist.Work | None] = []
        with coalesced(self._reduces_by, device, works):
            for owner, share in enumerate(shares):
                if share.numel():
                    works.append(self._reduces_by.reduce([real(share)], _towards(owner)))
        return works

    @staticmethod
    def sum(received: Sequence[Tensor], times: float = 1) -> Tensor:
        """Sums by one kernel a message, whatever the number of ranks."""
        sums = [rows.sum(0, dtype=summed_as(rows.dtype)) for rows in received]
        total = sums[0] if len(sums) == 1 else concatenate(sums)
        return total if times == 1 else total.mul_(times)


@lru_cache(maxsize=1024)
def _from(source: int) -> dist.BroadcastOptions:
    options: dist.BroadcastOptions = in_stream_order(dist.BroadcastOptions())
    options.rootRank, options.rootTensor = source, 0
    return options


@lru_cache(maxsize=1024)
def _towards(owner: int) -> dist.ReduceOptions:
    options: dist.ReduceOptions = in_stream_order(dist.ReduceOptions())
    options.rootRank, options.rootTensor = owner, 0
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    return options


class _OwnShare(Work):
    """This rank's share of a message that was reduced in place, or in 16 bits. `wait` copies it: a view would keep the
    message."""

    def __init__(self, reduction: Work, share: Tensor, times: float) -> None:
        self._reduction, self._share, self._times = reduction, share, times

    def wait(self) -> Tensor:
        self._reduction.wait()
        sums = self._share.to(summed_as(self._share.dtype), copy=True)
        return sums if self._times == 1 else sums.mul_(self._times)


@lru_cache(maxsize=64)  # similar units have the same bounds, and there may be thousands of ranks
def _are_equal(bounds: tuple[int, ...]) -> bool:
    return len(set(lengths(bounds))) == 1


def _abort(launching: RLock, abort: Callable[[], object]) -> None:
    """Not while another thread launches a collective, unless that takes long: NCCL connects the ranks in the first."""
    launched = launching.acquire(timeout=_CONNECTS)
    abort()
    if launched:
        launching.release()


def never_drop(group: object) -> None:
    """Keeps the group for the life of the process, after a failure: dropping it would wait for launched transfers,
    which may never complete, and Gloo cannot abort them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


# ----------------------------------------------------------------------------------------------------------------- Gloo
#
# The transport over Gloo, for tensors on the CPU between hosts.
#
# CPU ms of a rank on two cores over Gloo, 4M float32 at 2 and 4 ranks: a broadcast a shard 3.8, 4.2, all-gather 6.3,
# 6.4 (as much as one of 1 KiB to 128 KiB); all-to-all and sum 4.2, 5.6, a reduce a shard 8.7, 7.3, reduce-scatter 12.9,
# 12.0. Point-to-point messages between all ranks took 3.4, 4.1 and 4.6, 4.1, but small ones stalled for a scheduler's
# tick (4 ms, half of it spinning) whenever cores were scarce: Gloo's event loop spins while the sending thread is
# preempted with its lock held. With all-gathers of small messages a step of 64 small units takes 0.89 to 0.98 of the
# time, but Gloo ends the process where one meets a comparison, an all-gather of another length, of a rank that is out
# of step.
#
# A lane is a group of its own, with its own connections. Gloo sends a message once the receiver has said that it is
# ready, and what says so waits behind all that the receiver itself sends on the same connection: two ranks that send
# one another large messages take turns. Where each connection carries them one way they do not. Over links of 1 Gbit/s,
# at 2, 4 and 8 ranks of 109 MB together, of which the links take 438, 657, 766 ms: a gather on one lane 912, 1,580,
# 2,615, on a lane an owner 458, 700, 811; one all-to-all 889, 870, 838, two 463, 690, 808. A gather of 8 KiB a rank,
# CPU ms at 2 and 4 ranks: 0.24, 0.90 on one lane, 0.21, 0.53 on one an owner.


LANES = 8
"""Most lanes of a group."""

_OF_A_LEVEL = 8  # ranks
_FEW = 1 << 12
"""Bytes up to which a sum goes by levels, as what ranks count does: as many hops as a comparison, where Gloo's own goes
around twice."""
# Bytes from which an all-to-all goes to higher and to lower ranks on lanes of their own. The second one takes 0.05 ms
# of CPU time; to take turns takes as long as half of this many bytes are on the wire, 1 ms at 1 Gbit/s.
_LARGE = 1 << 18


def levels(rank: int, world: int) -> list[list[int]]:
    """Groups of ranks, each with `rank`, of at most _OF_A_LEVEL where the number of all can be divided so. What goes
    around in one after another has reached all ranks. Gloo's all-gather is a ring, of a hop for each further rank: 14
    hops at 64 ranks in place of 63, 22 at 1,024 in place of 1,023. Neighbours, as of a host, are in the first."""
    sizes, left, factor = list[int](), world, 2
    while left > 1:
        if left % factor:
            factor += 1
            continue
        left //= factor
        if sizes and sizes[-1] * factor <= _OF_A_LEVEL:
            sizes[-1] *= factor
        else:
            sizes.append(factor)
    found, stride = [], 1
    for size in sizes:
        first = rank - rank // stride % size * stride
        found.append([*range(first, first + size * stride, stride)])
        stride *= size
    return found


class Gloo(ProcessGroupTransport):
    """lanes: makes groups of the same ranks, such as ProcessGroupGloo, each collectively. All but the first are made
    when shards or large messages are first sent: ranks that only compare operations need none. level: makes a group of
    some of the ranks, of those that pass the same."""

    name, overlaps = "gloo", False

    def __init__(
        self, log: Log, lanes: Iterator[Any], rank: int, world: int, level: Callable[[list[int]], Any] | None = None
    ) -> None:
        self._made = made = [next(lanes)]
        super().__init__(log, made[0], rank, world, blocks=True)
        if level is not None and len(of_ranks := levels(rank, world)) > 1:
            self._levels = by_level = [*map(level, of_ranks)]
            log.failure.at_failure.append(lambda _: never_drop(by_level))
        self._others = islice(lanes, min(world, LANES) - 1)
        # The list: it also has the lanes that are made later. Not `self`, which the log would keep.
        log.failure.at_failure.append(lambda _: never_drop(made))

    @property
    def _lanes(self) -> Sequence[Any]:
        """Collective the first time, after ranks have compared what they do."""
        self._made += self._others  # of which then none are left
        return self._made

    def _lane(self, owner: int) -> Any:
        lanes = self._lanes
        return lanes[owner % len(lanes)]

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        self.log.append(channel, full.nbytes, self.compare)
        return self._launch(channel, full, self._broadcast_shards, full, bounds)

    def _exchange(self, messages: Sequence[Message], received: Sequence[Tensor]) -> list[dist.Work | None]:
        # The size first: to ask for `_lanes` connects them all, which small messages alone do not need.
        if sum(message.nbytes for message, _ in messages) < _LARGE or len(lanes := self._lanes) == 1:
            return super()._exchange(messages, received)
        rank, works = self._rank, []
        for rows, (message, counts) in zip(received, messages, strict=True):
            into, sent, from_each = real(rows.view(-1)), real(message), [counts[rank]] * self._world
            end, start = (rank + 1) * counts[rank], sum(counts[:rank])
            upwards = into[:end], sent[start:], _below(rank + 1, from_each), _lane_of(rank, counts)
            downwards = into[end:], sent[:start], _lane_of(rank + 1, from_each), _below(rank, counts)
            for lane, given in ((lanes[0], upwards), (lanes[-1], downwards)):
                works.append(getattr(lane, self._to_reduce.all_to_all)(*given, ALL_TO_ALL))
        return works

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        if len(self._levels) == 1 or tensor.nbytes > _FEW:
            return super().all_reduce(tensor, channel, times, maximum=maximum)
        self.log.append(channel, tensor.nbytes, self.compare)
        flat = real(tensor).view(-1)
        for group in self._levels:
            rows = flat.new_empty(group.size(), len(flat))
            given = getattr(group, self._to_gather), rows.view(-1), flat, _ALL_GATHER
            self._launch(channel, (rows, flat), *given).wait()
            flat.copy_(rows.amax(0) if maximum else sum_in_rank_order([rows]))
        return Work(tensor if times == 1 else tensor.mul_(times))

    def exchange(self, into: Tensor, sent: Message, counts_in: Sequence[int], channel: int) -> Work:
        # Not by `send` and `recv` of Gloo: it closes the connections of all ranks where a wait for these runs out, and
        # `wait_watching` waits in intervals (tests/comm/test_comm.py).
        self.log.append(channel, 0, self.compare)
        size, collective = into.element_size(), getattr(self._group, self._to_reduce.all_to_all)
        counts = [[count * size for count in each] for each in (counts_in, sent[1])]
        flats = into.view(torch.uint8), sent[0].view(torch.uint8)  # backends do not support all dtypes
        return self._launch(channel, (into, sent), collective, *flats, *counts, ALL_TO_ALL)


def _below(rank: int, counts: Sequence[int]) -> list[int]:
    """Returns the counts of lower ranks, and zeros for the others."""
    return [*counts[:rank], *[0] * (len(counts) - rank)]


def _lane_of(rank: int, counts: Sequence[int]) -> list[int]:
    """Returns the counts from this rank on, and zeros for those below."""
    return [*[0] * rank, *counts[rank:]]
