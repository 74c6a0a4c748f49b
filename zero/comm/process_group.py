"""Sending by torch.distributed's process groups: Gloo, and backends that overlap, such as NCCL.

A gather is a broadcast a shard over Gloo; elsewhere, where shards are equal, the single-tensor all-gather. A reduce is
an all-to-all, from where gradients were written, and a sum at the owner.

CPU ms of a rank on two cores over Gloo, 4M float32 at 2 and 4 ranks: a broadcast a shard 3.8, 4.2, all-gather 6.3, 6.4;
all-to-all and sum 4.2, 5.6, a reduce a shard 8.7, 7.3, reduce-scatter 12.9, 12.0. Plain messages from each rank to each
other took 3.4, 4.1 and 4.6, 4.1, but small ones stalled for a scheduler's tick (4 ms, half of it spinning) whenever
cores were scarce: Gloo's event loop spins while the sending thread is preempted with its lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero._torch import all_gather_of_one_tensor, all_to_all_of_one_tensor
from zero.comm.handle import Handle
from zero.comm.order import BROADCAST, COLLECTION, Order
from zero.comm.sums import sum_in_rank_order
from zero.comm.transport import Message, Transport

NUMBER = 8
"""Bytes of the number of an operation."""

LEAD = 1 << 15
"""Bytes of a shard that travel with its operation's number over Gloo; of small shards that is all there is.

With 4 KiB, or 64 bytes, a comparison without a shard took as long within the noise (0.43 CPU ms at 2 ranks, 1.1 at
4), and a shard of 16 to 32 KiB, which then takes a second message, 0.15 to 0.7 ms more.
"""


class ProcessGroupTransport(Transport):
    """What both have in common. group: a ProcessGroup, or a Backend such as ProcessGroupGloo."""

    def __init__(self, order: Order, group: Any, rank: int, world: int) -> None:
        self._order, self._group, self._rank, self._world = order, group, rank, world

    def reduce(self, messages: Sequence[Message], times: float, into: Tensor | None, operation: int | None) -> Handle:
        own = [counts[self._rank] for _, counts in messages]
        received = [message.new_empty(self._world, n) for n, (message, _) in zip(own, messages, strict=True)]
        works = self._launch(
            None,
            (messages, received),
            lambda: [
                all_to_all_of_one_tensor(
                    self._group, _real(rows.view(-1)), _real(message), [n] * self._world, [*counts]
                )
                for n, rows, (message, counts) in zip(own, received, messages, strict=True)
            ],
        )

        def finish() -> Tensor:
            self._wait(works, None, (messages, received))
            sums = sum_in_rank_order([[*rows] for rows in received], times)
            return sums if into is None else into.copy_(sums)

        return Handle(finish)

    def broadcast(self, flat: Tensor, source: int) -> None:
        self.agree(BROADCAST).wait()
        self._run(BROADCAST, flat, lambda: self._broadcast(flat, source))

    def all_reduce(self, tensor: Tensor, operation: int, *, maximum: bool) -> None:
        self.agree(operation).wait()
        how = dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
        self._run(operation, tensor, lambda: self._group.allreduce([_real(tensor)], how))

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None:
        self.agree(COLLECTION).wait()
        for owner, tensor in transfers:
            if tensor is not None and tensor.numel():
                self._collect(owner, tensor, to)

    def _collect(self, owner: int, tensor: Tensor, to: int | None) -> None:
        if to is None:
            self._run(COLLECTION, tensor, lambda: self._broadcast(tensor, owner))
        elif self._rank == owner != to:
            self._run(COLLECTION, tensor, lambda: self._group.send([_real(tensor)], to, 0))
        elif self._rank == to != owner:
            self._run(COLLECTION, tensor, lambda: self._group.recv([_real(tensor)], owner, 0))

    def exchange(self, data: bytes) -> list[bytes]:
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = [torch.empty_like(given) for _ in range(self._world)]
        self._run(None, (received, given), lambda: self._group.allgather([received], [given]))
        return [one.numpy().tobytes() for one in received]

    def _broadcast(self, flat: Tensor, source: int) -> dist.Work:
        how = dist.BroadcastOptions()
        how.rootRank, how.rootTensor = source, 0
        return self._group.broadcast([_real(flat)], how)  # type: ignore[no-any-return]

    def _broadcasts(self, shards: Sequence[Tensor]) -> list[dist.Work]:
        """Every rank's shard to every rank."""
        return [self._broadcast(shard, owner) for owner, shard in enumerate(shards) if shard.numel()]

    def _launch(
        self, number: int | None, buffers: object, launch: Callable[[], Sequence[dist.Work]]
    ) -> Sequence[dist.Work]:
        with self._order.transfer(number, buffers):
            return launch()

    def _run(self, number: int | None, buffers: object, launch: Callable[[], dist.Work]) -> None:
        self._wait(self._launch(number, buffers, lambda: [launch()]), number, buffers)

    def _wait(self, works: Sequence[dist.Work], number: int | None, buffers: object) -> None:
        with self._order.transfer(number, buffers):
            for work in works:
                work.wait()


class Gloo(ProcessGroupTransport):
    """Of tensors on the CPU, between hosts. Nothing is launched before the ranks are known to agree."""

    name, overlaps = "gloo", False

    def agree(self, operation: int) -> Handle:
        compare = self._launch_comparison(operation, None)
        return Handle(lambda: compare() and None)

    def gather(self, full: Tensor, bounds: Sequence[int], operation: int | None) -> Handle:
        shards = [full[low:high] for low, high in pairwise(bounds)]
        if operation is None:
            works = self._launch(None, full, lambda: self._broadcasts(shards))
            return Handle(lambda: self._wait(works, None, full))
        # The first bytes of each shard travel with what is compared; of small shards that is all.
        as_bytes = [shard.view(torch.uint8) for shard in shards]
        compare = self._launch_comparison(operation, as_bytes[self._rank])

        def finish() -> None:
            leads = compare()
            for peer, (shard, lead) in enumerate(zip(as_bytes, leads, strict=True)):
                if peer != self._rank:
                    shard[:LEAD] = lead[: len(shard)]
            rest = [shard[LEAD:] for shard in as_bytes]
            self._wait(self._launch(operation, full, lambda: self._broadcasts(rest)), operation, full)

        return Handle(finish, self._order.queue)

    def _launch_comparison(self, number: int, shard: Tensor | None) -> Callable[[], list[Tensor]]:
        """Says which operation this rank has come to, maybe with the first bytes of its shard.

        This message has the same length in every operation, so it arrives whatever each rank is doing. The result,
        called, raises RuntimeError where ranks are out of step, or returns the first bytes of every rank's shard.
        """
        said = torch.zeros(NUMBER + LEAD, dtype=torch.uint8)
        said[:NUMBER].view(torch.int64).fill_(number)
        if shard is not None:
            lead = shard[:LEAD]
            said[NUMBER : NUMBER + len(lead)] = lead
        heard = said.new_empty(self._world * len(said))
        works = self._launch(number, heard, lambda: [all_gather_of_one_tensor(self._group, heard, said)])

        def compare() -> list[Tensor]:
            self._wait(works, number, (said, heard))
            rows = [*heard.view(self._world, -1)]
            numbers = {peer: int(row[:NUMBER].view(torch.int64)) for peer, row in enumerate(rows)}
            self._order.refuse_others(number, numbers)
            return [row[NUMBER:] for row in rows]

        return compare


class Overlapping(ProcessGroupTransport):
    """By a backend that sends beside the computing, on streams of its own, such as NCCL: neither launching nor waiting
    keeps the host. A gather is launched at once; what ranks compare is on the CPU.

    checks: the transport by which the ranks compare what they do.
    """

    overlaps = True

    def __init__(
        self, order: Order, group: dist.ProcessGroup, rank: int, world: int, checks: Transport, name: str
    ) -> None:
        super().__init__(order, group, rank, world)
        self._checks, self.name = checks, name

    def agree(self, operation: int) -> Handle:
        return self._checks.agree(operation)

    def gather(self, full: Tensor, bounds: Sequence[int], operation: int | None) -> Handle:
        """Waiting for it leaves other gathers alone; only comparing has an order."""
        compared = None if operation is None else self._checks.agree(operation)
        shards = [full[low:high] for low, high in pairwise(bounds)]
        equal = len({len(shard) for shard in shards}) == 1
        works = self._launch(operation, full, lambda: self._whole(full, shards) if equal else self._broadcasts(shards))

        def finish() -> None:
            if compared is not None:
                compared.wait()
            self._wait(works, operation, full)

        return Handle(finish)

    def _whole(self, full: Tensor, shards: Sequence[Tensor]) -> list[dist.Work]:
        return [all_gather_of_one_tensor(self._group, _real(full), _real(shards[self._rank]))]


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, in one more dimension: backends know none."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
