"""The transport between the ranks of one Linux host, which read one another's memory (attach.py).

Every operation begins with a note to each other rank (peers.py): the channel, and the address of the data to read. So
ranks compare operations at no further cost. An operation ends when all ranks have read: until then no rank overwrites
or frees data that others still read. Reads happen in `wait`, so they do not overlap with computing.

It took less CPU time than Gloo (process_group.py) at every size from 4 KiB on, a tenth at 64 KiB and a quarter at 16 MB
of a gather (two loaded cores of an AMD EPYC, November 2026), so it is used at all sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import Any

import torch
from torch import Tensor

from zero.comm.host_memory.peers import Peers
from zero.comm.oplog import BROADCAST, COLLECTION, COMPARISON, Log
from zero.comm.packing import add_in_order, lengths, sum_in_rank_order, summed_as
from zero.comm.process_group import refuse_differing_logs
from zero.comm.transport import Message, Transport
from zero.comm.work import Operation, Work

CHUNK = 1 << 18
"""Bytes that are read from each rank before they are added up, while they are still in the cache."""

_DIGEST_MASK = (1 << 62) - 1

Addresses = Mapping[int, int]
"""The address of the data to read, by rank, for each other rank."""


class QueuedWork(Work):
    """A transfer that compares operations in `wait`. finish: does all the rest of it, and returns its result.
    queue: all that are in flight. They are completed in the order of their launches, so that this order is the same on
    every rank, whichever work a rank waits for first."""

    def __init__(self, finish: Callable[[], Any], queue: list[QueuedWork]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self._error: BaseException | None = None
        self._queue = queue
        queue.append(self)

    def wait(self) -> Any:
        """Also raises the error of the transfer if it came up in the `wait` of another work."""
        while self in self._queue:
            self._queue.pop(0)._complete()
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None
        return result

    def _complete(self) -> None:
        finish, self._finish = self._finish, None  # with its buffers
        assert finish is not None, "each work is in the queue once"
        try:
            self._result = finish()
        except BaseException as error:
            self._error = error
            raise


class HostMemory(Transport):
    """The transport for tensors on the CPU, within one host."""

    name, overlaps, reads = "host memory", False, True

    def __init__(self, log: Log, peers: Peers, rank: int, world: int) -> None:
        self._log, self._peers, self._rank, self._world = log, peers, rank, world
        self._queue: list[QueuedWork] = []
        peers.waits_for, close = log.waits_for, peers.close
        # The other ranks wait for this rank to read: it will not. `close` does not keep the peers, which keep the log.
        log.at_failure.append(lambda _: close())

    def _launch(self, channel: int, address: int, read: Callable[[Addresses], Any], buffers: object) -> Work:
        """Announces an operation. `wait` returns the result of `read` after all ranks have read. buffers: the owners of
        the memory that any rank reads or writes."""
        self._announce(channel, address, buffers)
        return QueuedWork(partial(self._read_all, channel, read, buffers), self._queue)

    def _read_all(self, channel: int, read: Callable[[Addresses], Any], buffers: object) -> Any:
        addresses = self._notes(channel, buffers)
        with Operation(self._log, channel, buffers):
            result = read(addresses)
            self._peers.finish()
        return result

    def _announce(self, channel: int, address: int, buffers: object) -> None:
        with Operation(self._log, channel, buffers):
            self._peers.announce(channel, address)

    def _notes(self, channel: int, buffers: object) -> Addresses:
        with Operation(self._log, channel, buffers):
            notes = self._peers.notes(channel)
        self._log.refuse_differing(channel, {rank: number for rank, (number, _) in notes.items()})
        return {rank: address for rank, (_, address) in notes.items()}

    def compare(self, channel: int, *, flags: int = 0) -> int:
        # The log has only operations by other transports of the group: notes compare those of this one. A note has room
        # for an address of 64 bits; in its place go 62 bits of the digest, and the flags.
        digest = self._log.digest & _DIGEST_MASK
        self._announce(channel, digest << 2 | flags, None)
        received: Addresses = QueuedWork(partial(self._notes, channel, None), self._queue).wait()
        if any(word >> 2 != digest for word in received.values()):
            refuse_differing_logs(self, self._log)
        self._log.clear()
        return reduce(or_, (word & 3 for word in received.values()), flags)

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        shards = [full[low:high] for low, high in pairwise(bounds)]
        return self._launch(channel, shards[self._rank].data_ptr(), partial(self._read_each, shards), full)

    def reduce(self, messages: Sequence[Message], times: float, into: Tensor | None, channel: int) -> Work:
        shares = _Shares(messages, self._rank, self._peers)
        buffers = messages, shares, into
        return self._launch(channel, shares.address, partial(shares.sum, times=times, into=into), buffers)

    def all_to_all(self, messages: Sequence[Message], channel: int) -> Work:
        shares = _Shares(messages, self._rank, self._peers)
        return self._launch(channel, shares.address, shares.rows, (messages, shares))

    def broadcast(self, flat: Tensor, source: int) -> None:
        def read(addresses: Addresses) -> None:
            if self._rank != source:
                self._peers.read(source, addresses[source], flat)

        self._launch(BROADCAST, flat.data_ptr(), read, flat).wait()

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> None:
        flat = tensor.view(-1)
        if flat.nbytes > CHUNK and not maximum:
            bounds = [len(flat) * rank // self._world for rank in range(self._world + 1)]
            low, high = bounds[self._rank : self._rank + 2]
            counts = lengths(bounds)
            self.reduce([(flat, counts)], times, flat[low:high], channel).wait()
            self.gather(flat, bounds, channel).wait()
            return
        rows = self._rows(flat, channel)
        flat.copy_(rows.amax(0) if maximum else sum_in_rank_order([rows], times))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        rows = self._rows(torch.frombuffer(bytearray(data), dtype=torch.uint8), COMPARISON)
        return [row.numpy().tobytes() for row in rows]

    def _rows(self, flat: Tensor, channel: int) -> Tensor:
        """Returns the tensors of all ranks, one row a rank."""
        rows = flat.new_empty(self._world, len(flat))
        rows[self._rank] = flat
        self._launch(channel, rows[self._rank].data_ptr(), partial(self._read_each, rows), rows).wait()
        return rows

    def _read_each(self, tensors: Sequence[Tensor] | Tensor, addresses: Addresses) -> None:
        """Reads from each other rank into the tensor that is in its place."""
        for rank, address in addresses.items():
            self._peers.read(rank, address, tensors[rank])

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None, device: torch.device) -> None:
        sent = [tensor for owner, tensor in transfers if owner == self._rank and tensor is not None]
        table = _address_table(sent)
        counts = Counter(owner for owner, _ in transfers)

        def read(addresses: Addresses) -> None:
            if to not in (None, self._rank):
                return
            tables = {rank: self._peers.read_table(rank, at, counts[rank]) for rank, at in addresses.items()}
            seen: Counter[int] = Counter()
            for owner, tensor in transfers:
                if owner != self._rank and tensor is not None:
                    self._peers.read(owner, tables[owner][seen[owner]], tensor)
                seen[owner] += 1

        self._launch(COLLECTION, table.data_ptr(), read, (sent, table)).wait()


class _Shares:
    """Reads this rank's share of the messages of all ranks. Other ranks read theirs from this rank's messages."""

    def __init__(self, messages: Sequence[Message], rank: int, peers: Peers) -> None:
        self._messages, self._rank, self._peers = [message for message, _ in messages], rank, peers
        self._bounds = [[0, *accumulate(counts)][rank : rank + 2] for _, counts in messages]
        self._table = _address_table(self._messages)
        self.address = self._table.data_ptr()

    def sum(self, addresses: Addresses, times: float, into: Tensor | None) -> Tensor:
        """Returns the sums of Transport.reduce for this rank. addresses: those of the other ranks' tables."""
        tables = self._tables(addresses)
        sample = self._messages[0]
        new = partial(sample.new_empty, dtype=summed_as(sample.dtype))
        total = new(sum(high - low for low, high in self._bounds)) if into is None else into
        most = min(CHUNK // sample.element_size(), max(1, *(high - low for low, high in self._bounds)))
        chunks = sample.new_empty(len(tables) + 1, most)
        buffer = None if into is None else new(most)  # `into` may overlap the messages
        done = 0
        for number, (low, high) in enumerate(self._bounds):
            for start in range(low, high, most):
                length = min(most, high - start)
                rows = chunks[:, :length]
                self._read(tables, number, start, rows)
                chunk = total[done : done + length]
                add_in_order([*rows], chunk if buffer is None else buffer[:length], times)
                if buffer is not None:
                    chunk.copy_(buffer[:length])
                done += length
        return total

    def rows(self, addresses: Addresses) -> list[Tensor]:
        """Returns for each message this rank's shares from all ranks, one row a rank."""
        tables, received = self._tables(addresses), []
        for number, (low, high) in enumerate(self._bounds):
            rows = self._messages[number].new_empty(len(tables) + 1, high - low)
            self._read(tables, number, low, rows)
            received.append(rows)
        return received

    def _read(self, tables: Mapping[int, Sequence[int]], number: int, start: int, rows: Tensor) -> None:
        """Overwrites the rows, one a rank, with elements of message `number` of all ranks, from `start` on."""
        rows[self._rank] = self._messages[number][start : start + rows.shape[1]]
        for rank, table in tables.items():
            self._peers.read(rank, table[number] + start * rows.element_size(), rows[rank])

    def _tables(self, addresses: Addresses) -> dict[int, Sequence[int]]:
        """Returns the addresses of the messages of each other rank, by rank."""
        count = len(self._messages)
        return {rank: self._peers.read_table(rank, address, count) for rank, address in addresses.items()}


def _address_table(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the tensors' addresses, which other ranks can read."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device="cpu")
