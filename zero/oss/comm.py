"""Everything that ranks say to one another. No other file of this package calls torch.distributed to send.

Two operations carry the three stages: `gather` (every segment reaches every rank from its owner) and `reduce` (every
segment, summed over the ranks, reaches its owner). How they map to collectives is decided here:

- gather: a broadcast a segment; where segments are equal and the backend is not Gloo, the single-tensor all-gather.
- reduce: all-to-all, from where the gradients were written, then a sum in rank order at the owner, which does not
  depend on timing, and adds up in float32 what travelled with 16 bits.

CPU ms of a rank on two cores over Gloo, 4M float32 at 2 and 4 ranks: a broadcast a segment 3.8, 4.2, all-gather 6.3,
6.4; all-to-all and sum 4.2, 5.6, a reduce a segment 8.7, 7.3, reduce-scatter 12.9, 12.0. Plain messages from each rank
to each other took 3.4, 4.1 and 4.6, 4.1, but small ones stalled for a scheduler's tick (4 ms, half of it spinning)
whenever cores were scarce: Gloo's event loop spins while the sending thread is preempted with its lock held.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_LEAD = 1 << 15
"""Bytes of a segment that travel with the number of the operation; of small segments that is all there is."""

_NUMBER = 8
"""Bytes of the number of an operation."""


def agreement_bytes(world: int) -> tuple[int, int]:
    """What comparing an operation between ranks takes a rank: bytes held as long as it lasts, and bytes sent."""
    return (_NUMBER + _LEAD) * (1 + world) if world > 1 else 0, _NUMBER * (world - 1)


@dataclass(frozen=True)
class Traffic:
    """Bytes of payload that this rank sent. A segment that goes to W - 1 other ranks counts W - 1 times.

    Not counted: what pads the message by which ranks agree where they are to its fixed length, of 32 KiB.
    """

    gather: int = 0
    reduce: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.gather + self.reduce + self.other

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    def __sub__(self, less: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(less, f.name) for f in fields(self)))


_sent = Traffic()


def traffic() -> Traffic:
    """What this process has sent through `zero` so far; subtract two readings to see what lies between.

    What others send, such as the all-reduce of `DistributedDataParallel`, is not in it.
    """
    return _sent


def _count(**sent: int) -> None:
    global _sent
    _sent = _sent + Traffic(**sent)


class Handle:
    """A transfer in flight. It owns the buffers until `wait` returned what the transfer brought.

    queue: the transfers that launch something when they are waited for. These are completed in the order in which they
        were launched, so that what they launch has the same order on every rank whatever each waits for first.
    """

    def __init__(self, finish: Callable[[], Any], queue: list[Handle] | None = None) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._queue = queue
        self._brought: Any = None
        self._waited = False
        if queue is not None:
            queue.append(self)

    def wait(self) -> Any:
        """Blocks until the transfer is complete; to be called once."""
        assert not self._waited, "this transfer was waited for before"
        self._waited = True
        while self._queue and self in self._queue:
            self._queue.pop(0)._complete()
        self._complete()
        brought, self._brought = self._brought, None
        return brought

    def _complete(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._brought = finish()


_BITS = 31
"""Of the number of an operation; the rest are those of what is announced to follow it."""

_COMPARISON, _SUM, _BROADCAST, _COLLECTION = range(4)
"""Operations that every process group knows."""


class _Wire:
    """What all users of one process group share: the numbers given out, and what each stands for."""

    def __init__(self) -> None:
        self.names = [
            "a comparison of what the ranks were given",
            "a sum over the ranks",
            "a broadcast",
            "a collection",
        ]
        self.broken: str | None = None
        self.led: list[Handle] = []
        self.announced = 0
        self.stranded: list[Any] = []

    def channel(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def name(self, number: int) -> str:
        """What an operation is called, and what was announced to follow it."""
        announced, channel = divmod(number, 1 << _BITS)
        name = self.names[channel] if channel < len(self.names) else f"operation number {channel}"
        return f"{name} (next: {self.names[announced]})" if 0 < announced < len(self.names) else name


_wires: WeakKeyDictionary[dist.ProcessGroup, _Wire] = WeakKeyDictionary()


class Comm:
    """One process group, seen from this rank. `rank` and `world` are of the group, never of the whole job.

    group: None is the default group, or this process alone where torch.distributed is not initialised.
    Raises ValueError where this rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} of the job is not in the process group that it was given. "
                "Build the model and its optimizer only on the ranks of the group, or pass each rank its own group."
            )
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._wire = _Wire() if group is None else _wires.setdefault(group, _Wire())

    @classmethod
    def alone(cls) -> Comm:
        """This process by itself, whatever torch.distributed knows."""
        comm = cls.__new__(cls)
        comm.group, comm.rank, comm.world, comm._wire = None, 0, 1, _Wire()
        return comm

    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        return self  # a process group cannot be copied, and a copied module belongs to the same one

    # ------------------------------------------------------------------------------------------- agreeing

    def channel(self, name: str) -> int:
        """A number for one stream of transfers, given out in the same order on every rank; `name` is for errors."""
        return self._wire.channel(name)

    def announce(self, channel: int | None) -> None:
        """Tells with every operation to come, until told otherwise, what this rank is going to do after it.

        What is not compared by itself, such as a reduce, is safe to launch once an operation that announced it passed.
        """
        self._wire.announced = channel or 0

    def agree(self, channel: int) -> None:
        """Collective. Raises RuntimeError on every rank unless all ranks have come to this same point."""
        if self.world > 1 and self._checks():
            self._launch_lead(None, channel)()

    def _launch_lead(self, segment: Tensor | None, channel: int) -> Callable[[], list[Tensor]]:
        """Tells the others which operation this rank has come to, and the first bytes of its segment with it.

        This message has the same length in every operation, so it arrives whatever each rank is doing; all else is
        launched when it has: ranks that are out of step get an error, not a hang or another's data. The result, called,
        raises RuntimeError where they are, or returns the first bytes of every rank's segment.
        """
        if self._wire.broken:
            raise RuntimeError(f"{self._wire.broken} Start the process group anew before going on.")
        told = torch.zeros(_NUMBER + _LEAD, dtype=torch.uint8)
        number = channel + (self._wire.announced << _BITS)
        told[:_NUMBER].view(torch.int64)[0] = number
        if segment is not None:
            lead = segment[:_LEAD]
            told[_NUMBER : _NUMBER + len(lead)] = lead
        heard = told.new_empty(self.world * len(told))
        work = dist.all_gather_single(heard, told, group=self.group, async_op=True)
        _count(other=_NUMBER * (self.world - 1))

        def compare() -> list[Tensor]:
            self._wait([work], channel, (told, heard))
            by_rank = list(heard.view(self.world, -1))
            numbers = [int(one[:_NUMBER].view(torch.int64)) for one in by_rank]
            different = [peer for peer, theirs in enumerate(numbers) if theirs != number]
            if different:
                peers = ", ".join(f"rank {peer} in {self._wire.name(numbers[peer])}" for peer in different)
                self._wire.broken = (
                    f"ranks are out of step: rank {self.rank} is in {self._wire.name(number)}, but {peers}. All ranks "
                    "must run the same modules in the same order and take the same steps. Modules that ranks choose "
                    "between must be gathered together: FSDP(as_one_unit=...)."
                )
                raise RuntimeError(self._wire.broken)
            return [one[_NUMBER:] for one in by_rank]

        return compare

    def compare(self, what: str, lines: Sequence[str], problem: str | None = None) -> None:
        """Collective. Raises ValueError on every rank if any rank has a `problem`, or if `lines` differ between ranks.

        Costs one exchange of 32 bytes where all is well. lines: what must be the same, one thing a line.
        """
        texts = [json.dumps({"problem": problem, "lines": list(lines)})]
        if self.world > 1:
            self.agree(_COMPARISON)
            digest = hashlib.sha256(texts[0].encode()).digest()
            digests = self._all_gather(torch.tensor(list(digest), dtype=torch.uint8))
            if problem is not None or any(not torch.equal(digests[0], other) for other in digests[1:]):
                texts = self.all_gather_text(texts[0])
            elif problem is None:
                return
        told = [json.loads(text) for text in texts]
        problems = [(rank, one["problem"]) for rank, one in enumerate(told) if one["problem"] is not None]
        if problems:
            where = f" (on rank {', '.join(str(rank) for rank, _ in problems)})" if self.world > 1 else ""
            raise ValueError(f"{problems[0][1]}{where}")
        for rank, one in enumerate(told):
            _refuse_difference(what, told[0]["lines"], one["lines"], rank)

    def all_gather_text(self, text: str) -> list[str]:
        """Collective. The text of every rank, by rank."""
        if self.world == 1:
            return [text]
        self.agree(_COMPARISON)
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = [int(n) for n in torch.cat(self._all_gather(torch.tensor([len(data)])))]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(data)] = data
        return [
            bytes(received[:length].numpy()).decode()
            for received, length in zip(self._all_gather(padded), lengths, strict=True)
        ]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        sent = tensor.to(self._control_device())
        received = [torch.empty_like(sent) for _ in range(self.world)]
        dist.all_gather(received, sent, group=self.group)
        _count(other=sent.nbytes * (self.world - 1))
        return [one.cpu() for one in received]

    # ------------------------------------------------------------------------------------- whole tensors

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Collective. Overwrites the tensors by those of rank `source` of the group, few large messages at a time."""
        if self.world == 1 or not any(tensor.numel() for tensor in tensors):
            return
        self.agree(_BROADCAST)
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            for batch in _batches(same, 1 << 24):
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
                dist.broadcast(flat, group=self.group, group_src=source)
                _count(other=flat.nbytes * (self.world - 1) if self.rank == source else 0)
                for tensor, values in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                    tensor.detach().copy_(values.view(tensor.shape))

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Collective. Sums (or takes the maximum of) a small tensor over the ranks, in place."""
        if self.world > 1:
            self.agree(_SUM)
            op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            dist.all_reduce(tensor, op=op, group=self.group)
            _count(other=2 * tensor.nbytes * (self.world - 1) // self.world)

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None:
        """Collective. Brings flat tensors from their owners to rank `to` of the group, or (None) to all.

        transfers: on every rank the same, in the same order, (owner, tensor): what is sent at the owner, what is filled
        at those who receive, None elsewhere.
        """
        if self.world == 1:
            return
        self.agree(_COLLECTION)
        for owner, tensor in transfers:
            if tensor is None or not tensor.numel():
                continue
            if to is None:
                dist.broadcast(tensor, group=self.group, group_src=owner)
            elif self.rank == owner != to:
                dist.send(tensor, group=self.group, group_dst=to)
            elif self.rank == to != owner:
                dist.recv(tensor, group=self.group, group_src=owner)
            if self.rank == owner:
                _count(other=tensor.nbytes * (self.world - 1 if to is None else int(owner != to)))

    # -------------------------------------------------------------------------------------- the segments

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int | None) -> Handle:
        """Collective. Fills the flat `full`: segment [bounds[r], bounds[r + 1]) comes from rank r, which has it there.

        channel: number of the operation, to be compared between ranks: where they differ `wait` raises RuntimeError, on
        every rank. None where an `agree` has just said that all ranks come here.
        """
        if self.world == 1:
            return Handle(lambda: None)
        segments = [full[low:high] for low, high in pairwise(bounds)]
        own = segments[self.rank]
        _count(gather=own.nbytes * (self.world - 1))
        if channel is None or not self._checks():
            works = self._launch_segments(full, segments)
            return Handle(lambda: self._wait(works, channel, full))
        as_bytes = [segment.view(torch.uint8) for segment in segments]
        compare = self._launch_lead(as_bytes[self.rank], channel)

        def finish() -> None:
            leads = compare()
            for peer, (segment, lead) in enumerate(zip(as_bytes, leads, strict=True)):
                if peer != self.rank:
                    segment[:_LEAD] = lead[: len(segment)]
            rest = [segment[_LEAD:] for segment in as_bytes]
            self._wait(self._launch_segments(None, rest), channel, full)

        return Handle(finish, self._wire.led)

    def _launch_segments(self, full: Tensor | None, segments: Sequence[Tensor]) -> list[dist.Work]:
        """Every rank's segment to every rank. `full` is what the segments make up, if they make up one tensor."""
        equal = len({segment.numel() for segment in segments}) == 1
        if full is not None and equal and self._backend(full.device) != "gloo":
            return [dist.all_gather_single(full, segments[self.rank], group=self.group, async_op=True)]
        return [
            dist.broadcast(segment, group=self.group, group_src=owner, async_op=True)
            for owner, segment in enumerate(segments)
            if segment.numel()
        ]

    def reduce(self, messages: Sequence[tuple[Tensor, Sequence[int]]]) -> Handle:
        """Collective. Sums over the ranks what each has for each owner. `wait` returns this rank's sums, flat.

        messages: flat tensors, all of one dtype, and how many elements of each go to each rank of the group, in the
        order of ranks; these numbers are the same on all ranks. The tensors must not change until `wait`, which returns
        a new tensor of the sums of what came here, one message after another; of 16-bit floats in float32.
        """
        if self.world == 1:
            return Handle(lambda: _wide(torch.cat([message for message, _ in messages])))
        _count(reduce=sum((len(message) - counts[self.rank]) * message.element_size() for message, counts in messages))
        received, works = [], []
        for message, counts in messages:
            own = counts[self.rank]
            buffer = message.new_empty(own * self.world)
            received.append(buffer.view(self.world, own))
            works.append(
                dist.all_to_all_single(
                    buffer, message, [own] * self.world, list(counts), group=self.group, async_op=True
                )
            )

        def finish() -> Tensor:
            self._wait(works, None, (messages, received))
            return _sum_in_rank_order(received)

        return Handle(finish)

    # -------------------------------------------------------------------------------------------- backends

    def runs_beside(self, tensor: Tensor) -> bool:
        """Whether such tensors are sent without taking the processor from what computes."""
        return self.world > 1 and self._backend(tensor.device) != "gloo"

    def _backend(self, device: torch.device) -> str:
        assert self.group is not None
        return str(self.group._get_backend(device).name()).lower()

    def _checks(self) -> bool:
        """Whether operations are compared between ranks: where small tensors on the CPU can be sent."""
        return self._control_device().type == "cpu"

    def _control_device(self) -> torch.device:
        """Where small tensors must lie to be sent in this group."""
        assert self.group is not None
        kinds = {device.type for device in self.group._device_types}
        return torch.device("cpu") if "cpu" in kinds else torch.device(kinds.pop())

    def _wait(self, works: Sequence[dist.Work], channel: int | None, buffers: object) -> None:
        """Waits for all, and keeps the buffers alive after an error: messages may still be written into them."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._wire.stranded.append(buffers)
            where = "a transfer" if channel is None else self._wire.name(channel)
            raise RuntimeError(
                f"rank {self.rank} waited in vain in {where}: another rank of the group of {self.world} has stopped, "
                f"or never came here. Look for the first error of any rank. ({error})"
            ) from error


def _sum_in_rank_order(received: Sequence[Tensor]) -> Tensor:
    """The rows of each tensor added up, one tensor after another."""
    sample = received[0]
    total = sample.new_empty(sum(rows.shape[1] for rows in received), dtype=_wide(sample[:0]).dtype)
    low = 0
    for rows in received:
        sums = total[low : low + rows.shape[1]]
        torch.add(_wide(rows[0]), _wide(rows[1]), out=sums)
        for row in rows[2:]:
            sums += row
        low += rows.shape[1]
    return total


def _wide(tensor: Tensor) -> Tensor:
    """16-bit floats as float32, to be added up; all else as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _batches(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    batches: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not batches or size + tensor.nbytes > limit:
            batches.append([])
            size = 0
        batches[-1].append(tensor)
        size += tensor.nbytes
    return batches


def _refuse_difference(what: str, expected: list[str], found: list[str], rank: int) -> None:
    for position in range(max(len(expected), len(found))):
        here = expected[position] if position < len(expected) else "nothing"
        there = found[position] if position < len(found) else "nothing"
        if here != there:
            raise ValueError(
                f"{what} differ between ranks: at position {position}, rank 0 has {here}, rank {rank} has {there}. "
                "Build the same on every rank, in the same order."
            )
