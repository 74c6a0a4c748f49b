"""Everything that ranks say to one another.

Two operations carry the three stages: `gather` (every segment reaches every rank from its owner) and `reduce` (every
segment, summed over the ranks, reaches its owner). Both go one of two ways:

- by collectives of torch.distributed (collectives.py);
- where the tensors are on the CPU, the backend is Gloo, and all ranks run on one host and may read one another's
  memory: by reading, straight from where the others have it (direct.py over neighbours.py and attach.py). Nobody
  overwrites or frees what others still read, so there `wait` returns when all have read.

Which way it goes is agreed on by all ranks when they first operate together, and makes no difference to the results:
reduce adds up in rank order at the owner, in float32 what travelled with 16 bits. Broadcasts and small sums go by
reading too.

On a GPU transfers run beside the computing. There a gather is launched at once and compared while it runs, on the CPU
and before anybody uses what it brings; elsewhere nothing is launched before the ranks are known to agree.

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

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zero.oss import direct
from zero.oss.agreement import NUMBER, Agreement, agreement_bytes
from zero.oss.handle import Handle
from zero.oss.neighbours import Neighbours
from zero.oss.packing import batches, joined, room_for, spread, together
from zero.oss.sums import sum_in_rank_order, wide
from zero.oss.traffic import Traffic, count, traffic
from zero.oss.wire import BROADCAST, COLLECTION, GATHER, REDUCTION, SUM

__all__ = ["Comm", "Handle", "Traffic", "agreement_bytes", "traffic"]


class Comm(Agreement):
    """One process group, seen from this rank. `rank` and `world` are of the group, never of the whole job.

    group: None is the default group, or this process alone where torch.distributed is not initialised.
    Raises ValueError where this rank is not in the group.
    """

    @classmethod
    def alone(cls) -> Comm:
        """This process by itself, whatever torch.distributed knows."""
        comm = cls.__new__(cls)
        comm._set_group(None)
        return comm

    # ------------------------------------------------------------------------------------- whole tensors

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Collective. Overwrites the tensors by those of rank `source` of the group."""
        if self.world == 1:
            return
        for batch in batches(tensors):
            flat = together(batch) if self.rank == source else room_for(batch)
            self._broadcast(flat, source)
            if self.rank == source:
                count(other=flat.nbytes * (self.world - 1))
            else:
                spread(flat, batch)

    def _broadcast(self, flat: Tensor, source: int) -> None:
        near = self._neighbours(flat.device)
        if near is None:
            self.agree(BROADCAST)
            self._collectives.broadcast(flat, source)
            return

        def read(addresses: Mapping[int, int]) -> None:
            if self.rank != source:
                near.read(source, addresses[source], flat.data_ptr(), flat.nbytes)

        count(other=NUMBER * (self.world - 1))
        self._launch_reading(near, BROADCAST, flat.data_ptr(), read, flat).wait()

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False, channel: int = SUM) -> None:
        """Collective. Sums (or takes the maximum of) a small tensor over the ranks, in place.

        channel: number of the operation, which is compared between ranks; by default that of any such sum.
        """
        if self.world == 1:
            return
        count(other=2 * tensor.nbytes * (self.world - 1) // self.world)
        near = self._neighbours(tensor.device) if tensor.nbytes <= direct.PIECE else None
        if near is None:
            self.agree(channel)
            self._collectives.all_reduce(tensor, maximum=maximum)
            return
        count(other=NUMBER * (self.world - 1))
        rows = tensor.new_empty(self.world, tensor.numel())
        rows[self.rank] = tensor.view(-1)
        address = rows[self.rank].data_ptr()
        number = self._wire.number(channel)
        self._launch_reading(near, number, address, lambda told: direct.read_rows(near, rows, told), rows).wait()
        tensor.copy_((rows.amax(0) if maximum else sum_in_rank_order([[*rows]])).view(tensor.shape))

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
        low, high = bounds[self.rank : self.rank + 2]
        size = full.element_size()
        count(gather=(high - low) * size * (self.world - 1))
        near = self._neighbours(full.device)
        if near is not None:
            count(other=0 if channel is None else NUMBER * (self.world - 1))
            number = GATHER if channel is None else self._wire.number(channel)
            address = full.data_ptr() + low * size
            return self._launch_reading(
                near, number, address, lambda told: direct.read_segments(near, full, bounds, told), full
            )
        segments = [full[low:high] for low, high in pairwise(bounds)]
        if channel is None:
            works = self._collectives.launch_gather(full, segments)
            return Handle(lambda: self._wait(works, channel, full))
        if self.runs_beside(full):
            return self._gather_as_compared(full, segments, channel)
        return self._gather_once_compared(full, segments, channel)

    def _gather_as_compared(self, full: Tensor, segments: Sequence[Tensor], channel: int) -> Handle:
        """Runs while it is compared. Waiting for it leaves other gathers alone; only comparing has an order."""
        compared = Handle(self._launch_lead(None, channel), self._wire.queue)
        works = self._collectives.launch_gather(full, segments)

        def finish() -> None:
            compared.wait()
            self._wait(works, channel, full)

        return Handle(finish)

    def _gather_once_compared(self, full: Tensor, segments: Sequence[Tensor], channel: int) -> Handle:
        """The first bytes of each segment travel with what is compared; of small segments that is all."""
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

    def reduce(
        self,
        messages: Sequence[tuple[Tensor, Sequence[int]]],
        *,
        times: float = 1,
        into: Tensor | None = None,
        channel: int | None = None,
    ) -> Handle:
        """Collective. Sums over the ranks what each has for each owner. `wait` returns this rank's sums, flat.

        messages: flat tensors, all of one dtype, and how many elements of each go to each rank of the group, in the
        order of ranks; these numbers are the same on all ranks. The tensors must not change until `wait`, which returns
        a new tensor of the sums of what came here, one message after another; of 16-bit floats in float32. As with
        `gather`, that may be when the other ranks have called it too.

        times: what sums are multiplied by, such as 1 / world for averages: here they are still in the cache.
        into: flat, what is overwritten by the sums, and returned, instead of a new tensor; in its own dtype. It may be
            what this rank has for itself.
        channel: number of the operation, to be compared between ranks where that costs nothing: where they read one
            another's memory. Elsewhere an `agree` before has to do.
        """
        if self.world == 1:
            return Handle(lambda: _put(_alone([message for message, _ in messages], times), into))
        count(reduce=sum((len(message) - counts[self.rank]) * message.element_size() for message, counts in messages))
        near = self._neighbours(messages[0][0].device)
        if near is not None:
            shares = direct.Shares(messages, self.rank)
            return self._launch_reading(
                near,
                REDUCTION if channel is None else self._wire.number(channel),
                shares.address,
                lambda told: shares.sum(near, told, times, into),
                (messages, shares, into),
            )
        works, received = self._collectives.launch_reduce(messages)

        def finish() -> Tensor:
            self._wait(works, None, (messages, received))
            return _put(sum_in_rank_order([list(rows) for rows in received], times), into)

        return Handle(finish)

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

    def reads(self, device: torch.device) -> bool:
        """Collective the first time. Whether ranks read tensors on the device from one another's memory."""
        return self.world > 1 and self._neighbours(device) is not None

    def runs_beside(self, tensor: Tensor) -> bool:
        """Whether such tensors are sent without taking the processor from what computes."""
        return self.world > 1 and self._collectives.backend(tensor.device) != "gloo"


def _alone(messages: Sequence[Tensor], times: float) -> Tensor:
    """What a reduce brings where there is one rank."""
    sums = wide(joined(messages))
    return sums if times == 1 else sums * times


def _put(sums: Tensor, into: Tensor | None) -> Tensor:
    return sums if into is None else into.copy_(sums)
