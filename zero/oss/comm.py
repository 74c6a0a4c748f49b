"""Everything that ranks say to one another.

Two operations carry the three stages: `gather` (every segment reaches every rank from its owner) and `reduce` (every
segment, summed over the ranks, reaches its owner). Both go one of two ways:

- by collectives of torch.distributed (collectives.py);
- where the tensors are on the CPU, the backend is Gloo, and all ranks run on one host and may read one another's
  memory: by reading, straight from where the others have it (direct.py over neighbours.py and attach.py). Nobody
  overwrites or frees what others still read, so there `wait` returns when all have read.

Which way it goes is agreed on by all ranks when they first operate together, and makes no difference to the results:
reduce adds up in rank order at the owner, in float32 what travelled with 16 bits.

CPU ms of a rank, medians, two loaded cores, by reading and by Gloo's collectives:

                                        2 ranks             4 ranks
    gather of 4M float32, compared      1.0     4.0         2.0     5.1
    gather of 64 KiB, compared          0.04    0.41        0.08    0.91
    reduce of 4M float32                2.7     4.7         4.0     6.5
    reduce of 64 KiB                    0.07    0.24        0.12    0.33
    agree                               0.03    0.31        0.04    0.74

Reading was less at every size from 4 KiB on, so there is no size from which it is used. What is left of the reduce is
the sum, and the pages of the buffer that it is read into.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero.oss import direct
from zero.oss.collectives import Collectives
from zero.oss.differences import as_text, refuse_differences
from zero.oss.handle import Handle
from zero.oss.neighbours import Neighbours, meet
from zero.oss.sums import sum_in_rank_order, wide
from zero.oss.traffic import Traffic, count, traffic
from zero.oss.wire import BROADCAST, COLLECTION, COMPARISON, GATHER, REDUCTION, SUM, Wire, wire_of

__all__ = ["Comm", "Handle", "Traffic", "agreement_bytes", "traffic"]

_LEAD = 1 << 15
"""Bytes of a segment that travel with its operation's number by collectives; of small segments that is all there is.

With 4 KiB, or 64 bytes, a comparison without a segment took as long within the noise (0.43 CPU ms at 2 ranks, 1.1 at
4), and a segment of 16 to 32 KiB, which then takes a second message, 0.15 to 0.7 ms more.
"""

_NUMBER = 8
"""Bytes of the number of an operation."""

_CPU = torch.device("cpu")


def agreement_bytes(world: int) -> tuple[int, int]:
    """What comparing an operation between ranks takes a rank: bytes held as long as it lasts, and bytes sent.

    Held by collectives; ranks that read one another's memory hold nothing.
    """
    return (_NUMBER + _LEAD) * (1 + world) if world > 1 else 0, _NUMBER * (world - 1)


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
        self._set_group(group)

    def _set_group(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._wire = Wire(self.rank, self.world) if group is None else wire_of(group)
        self._by_collectives = None if group is None else Collectives(group)

    @classmethod
    def alone(cls) -> Comm:
        """This process by itself, whatever torch.distributed knows."""
        comm = cls.__new__(cls)
        comm._set_group(None)
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
            compare = self._launch_lead(None, channel)
            if self._neighbours() is None:
                compare()
            else:
                Handle(compare, self._wire.queue).wait()

    def _launch_lead(self, segment: Tensor | None, channel: int) -> Callable[[], list[Tensor]]:
        """Tells the others which operation this rank has come to, and maybe the first bytes of its segment with it.

        This message has the same length in every operation, so it arrives whatever each rank is doing; all else is
        launched when it has: ranks that are out of step get an error, not a hang or another's data. The result, called,
        raises RuntimeError where they are, or returns the first bytes of every rank's segment, of all the same length.
        """
        number = self._wire.number(channel)
        count(other=_NUMBER * (self.world - 1))
        near = self._neighbours()
        if near is not None:
            hear = self._tell(near, number, 0, None)
            return lambda: [torch.empty(0, dtype=torch.uint8) for _ in range(len(hear()) + 1)]
        self._wire.refuse_if_broken()
        told = torch.zeros(_NUMBER + _LEAD, dtype=torch.uint8)
        told[:_NUMBER].view(torch.int64)[0] = number
        if segment is not None:
            lead = segment[:_LEAD]
            told[_NUMBER : _NUMBER + len(lead)] = lead
        work, heard = self._collectives.launch_exchange(told)

        def compare() -> list[Tensor]:
            self._wait([work], channel, (told, heard))
            numbers = {peer: int(one[:_NUMBER].view(torch.int64)) for peer, one in enumerate(heard)}
            self._wire.refuse_others(number, numbers)
            return [one[_NUMBER:] for one in heard]

        return compare

    def compare(self, what: str, lines: Sequence[str], problem: str | None = None) -> None:
        """Collective. Raises ValueError on every rank if any rank has a `problem`, or if `lines` differ between ranks.

        Costs one exchange of 32 bytes where all is well. lines: what must be the same, one thing a line.
        """
        texts = [as_text(lines, problem)]
        if self.world > 1:
            self.agree(COMPARISON)
            digest = hashlib.sha256(texts[0].encode()).digest()
            digests = self._exchange(torch.tensor(list(digest), dtype=torch.uint8))
            if problem is not None or any(not torch.equal(digests[0], other) for other in digests[1:]):
                texts = self.all_gather_text(texts[0])
            elif problem is None:
                return
        refuse_differences(what, texts)

    def all_gather_text(self, text: str) -> list[str]:
        """Collective. The text of every rank, by rank."""
        if self.world == 1:
            return [text]
        self.agree(COMPARISON)
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = [int(n) for n in torch.cat(self._exchange(torch.tensor([len(data)])))]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(data)] = data
        return [
            bytes(received[:length].numpy()).decode()
            for received, length in zip(self._exchange(padded), lengths, strict=True)
        ]

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        count(other=tensor.nbytes * (self.world - 1))
        return self._collectives.exchange(tensor)

    # ------------------------------------------------------------------------------------- whole tensors

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Collective. Overwrites the tensors by those of rank `source` of the group."""
        if self.world > 1 and any(tensor.numel() for tensor in tensors):
            self.agree(BROADCAST)
            self._collectives.broadcast(tensors, source)

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Collective. Sums (or takes the maximum of) a small tensor over the ranks, in place."""
        if self.world > 1:
            self.agree(SUM)
            self._collectives.all_reduce(tensor, maximum=maximum)

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None:
        """Collective. Brings flat tensors from their owners to rank `to` of the group, or (None) to all.

        transfers: on every rank the same, in the same order, (owner, tensor): what is sent at the owner, what is filled
        at those who receive, None elsewhere.
        """
        if self.world == 1:
            return
        self.agree(COLLECTION)
        for owner, tensor in transfers:
            if tensor is not None and tensor.numel():
                self._collectives.collect(owner, tensor, to)

    # -------------------------------------------------------------------------------------- the segments

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int | None) -> Handle:
        """Collective. Fills the flat `full`: segment [bounds[r], bounds[r + 1]) comes from rank r, which has it there.

        channel: number of the operation, to be compared between ranks: where they differ `wait` raises RuntimeError, on
        every rank. None where an `agree` has just said that all ranks come here.

        `full` must not change until `wait` has returned, which may be when the other ranks have called it too.
        """
        if self.world == 1:
            return Handle(lambda: None)
        segments = [full[low:high] for low, high in pairwise(bounds)]
        own = segments[self.rank]
        count(gather=own.nbytes * (self.world - 1))
        checked = channel is not None and self._checks()
        near = self._neighbours(full.device)
        if near is not None:
            count(other=_NUMBER * (self.world - 1) if checked else 0)
            number = GATHER if channel is None else self._wire.number(channel)
            return self._launch_reading(
                near, number, own.data_ptr(), lambda told: direct.read_segments(near, full, bounds, told), full
            )
        if channel is None or not checked:
            works = self._collectives.launch_gather(full, segments)
            return Handle(lambda: self._wait(works, channel, full))
        as_bytes = [segment.view(torch.uint8) for segment in segments]
        compare = self._launch_lead(as_bytes[self.rank], channel)

        def finish() -> None:
            leads = compare()
            begun = len(leads[0])
            for peer, (segment, lead) in enumerate(zip(as_bytes, leads, strict=True)):
                if peer != self.rank:
                    segment[:begun] = lead[: len(segment)]
            rest = [segment[begun:] for segment in as_bytes]
            self._wait(self._collectives.launch_gather(None, rest), channel, full)

        return Handle(finish, self._wire.queue)

    def reduce(self, messages: Sequence[tuple[Tensor, Sequence[int]]]) -> Handle:
        """Collective. Sums over the ranks what each has for each owner. `wait` returns this rank's sums, flat.

        messages: flat tensors, all of one dtype, and how many elements of each go to each rank of the group, in the
        order of ranks; these numbers are the same on all ranks. The tensors must not change until `wait`, which returns
        a new tensor of the sums of what came here, one message after another; of 16-bit floats in float32. As with
        `gather`, that may be when the other ranks have called it too.
        """
        if self.world == 1:
            return Handle(lambda: wide(torch.cat([message for message, _ in messages])))
        count(reduce=sum((len(message) - counts[self.rank]) * message.element_size() for message, counts in messages))
        near = self._neighbours(messages[0][0].device)
        if near is not None:
            shares = direct.Shares(messages, self.rank)
            return self._launch_reading(
                near, REDUCTION, shares.address, lambda told: shares.sum(near, told), (messages, shares)
            )
        works, received = self._collectives.launch_reduce(messages)

        def finish() -> Tensor:
            self._wait(works, None, (messages, received))
            return sum_in_rank_order([list(rows) for rows in received])

        return Handle(finish)

    # ------------------------------------------------------------------------- reading from one another

    def _neighbours(self, device: torch.device = _CPU) -> Neighbours | None:
        """Collective the first time. The other ranks, where tensors on `device` are read from their memory."""
        by_reading = device.type == "cpu" and self._checks() and self._collectives.backend(device) == "gloo"
        if by_reading and not self._wire.have_met:
            self._wire.have_met = True
            seconds = self._collectives.timeout.total_seconds()
            self._wire.neighbours = meet(self._collectives.exchange_bytes, self.rank, self.world, seconds)
        return self._wire.neighbours if by_reading else None

    def _tell(self, near: Neighbours, number: int, address: int, buffers: object) -> Callable[[], dict[int, int]]:
        """Tells the others which operation this rank has come to, and the address of what they are to read for it.

        The result, called, raises RuntimeError where another has come to another operation, or returns the addresses
        on the others, by rank. It is to be called in the order in which operations were launched.
        """
        self._wire.refuse_if_broken()
        with self._wire.in_vain(number, buffers):
            near.tell(number, address)

        def hear() -> dict[int, int]:
            with self._wire.in_vain(number, buffers):
                heard = near.hear()
            self._wire.refuse_others(number, {peer: told.number for peer, told in heard.items()})
            return {peer: told.address for peer, told in heard.items()}

        return hear

    def _launch_reading(
        self,
        near: Neighbours,
        number: int,
        address: int,
        read: Callable[[dict[int, int]], Any],
        buffers: object,
    ) -> Handle:
        """An operation in which each rank reads from all others. `wait` returns what `read` does, when all have read.

        buffers: what holds the memory that is read, here and by the others.
        """
        hear = self._tell(near, number, address, buffers)

        def finish() -> Any:
            addresses = hear()
            with self._wire.in_vain(number, buffers):
                brought = read(addresses)
                near.finish()()
            return brought

        return Handle(finish, self._wire.queue)

    # -------------------------------------------------------------------------------------------- backends

    def reads(self, device: torch.device) -> bool:
        """Collective the first time. Whether ranks read tensors on the device from one another's memory."""
        return self.world > 1 and self._neighbours(device) is not None

    def runs_beside(self, tensor: Tensor) -> bool:
        """Whether such tensors are sent without taking the processor from what computes."""
        return self.world > 1 and self._collectives.backend(tensor.device) != "gloo"

    @property
    def _collectives(self) -> Collectives:
        assert self._by_collectives is not None, "a process alone sends nothing"
        return self._by_collectives

    def _checks(self) -> bool:
        """Whether operations are compared between ranks: where small tensors on the CPU can be sent."""
        return self._collectives.control_device().type == "cpu"

    def _wait(self, works: Sequence[dist.Work], channel: int | None, buffers: object) -> None:
        with self._wire.in_vain(channel, buffers):
            for work in works:
                work.wait()
