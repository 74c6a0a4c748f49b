"""The transport between the ranks of one Linux host, which read one another's memory.

Every operation begins with a note to each other rank (Peers): the channel, and the address of the data to read. So
ranks compare operations at no further cost. An operation ends when all ranks have read: until then no rank overwrites
or frees data that others still read. Reads happen in `wait`, so they do not overlap with computing.

It took less CPU time than Gloo (transport.py) at every size from 4 KiB on, a tenth at 64 KiB and a quarter at 16 MB
of a gather (two loaded cores of an AMD EPYC, November 2026), so it is used at all sizes.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial, reduce
from itertools import accumulate, pairwise
from operator import or_
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from zero.comm.forked import Pipe
from zero.comm.oplog import COMPARISON, Log
from zero.comm.store import StoreRendezvous
from zero.comm.transport import (
    Message,
    Operation,
    Transport,
    Work,
    add_in_order,
    lengths,
    refuse_differing_logs,
    sum_in_rank_order,
    summed_as,
)

# -------------------------------------------------------------------------------------------------------------- reading
#
# Reads the memory of another process of this host by Linux's cross memory attach, process_vm_readv(2).
#
# It copies once, directly from a tensor of the other process into a tensor of this process, without a buffer in
# between.
# MPI libraries and UCX send between the processes of one host in the same way.
#
# The system permits it between processes of one user that may trace one another. Where Yama restricts tracing to
# descendants (/proc/sys/kernel/yama/ptrace_scope is 1, as on Ubuntu), ranks may not read one another, as they are
# siblings, unless each has called `permit_siblings`.
#
# Where a system has none of it, these raise, and ranks send over Gloo.


# "Yama" in ASCII. The standard library does not have the number.
_PR_SET_PTRACER = 0x59616D61

# struct iovec: an address, and a number of bytes.
_Range = ctypes.c_size_t * 2


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    ranges = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = ctypes.c_int, *ranges, *ranges, ctypes.c_ulong
    return libc


def read_memory(pid: int, address: int, into: int, nbytes: int) -> None:
    """Copies `nbytes` from an address in process `pid` to the address `into` in this process.

    Raises OSError if not all bytes can be read: the process has ended, has no such memory, or does not permit it.
    """
    libc, done = _libc(), 0
    while done < nbytes:  # the system copies at most 2 GiB in one call
        local, remote = _Range(into + done, nbytes - done), _Range(address + done, nbytes - done)
        copied = libc.process_vm_readv(pid, local, 1, remote, 1, 0)
        if copied <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process {pid} cannot be read: {os.strerror(number)}")
        done += copied


def permit_siblings() -> None:
    """Permits the parent of this process and its descendants to read this process's memory, where Yama forbids it.

    With a launcher, these are the ranks. The permission is for processes of this user, and lasts as long as this
    process. Does nothing if the parent is the first process of the system, because all processes descend from it.
    """
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() == "1" and os.getppid() > 1:
        _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def host_name() -> str:
    """Returns kernel and namespace, which are equal in two processes if each finds the other by its process id."""
    if os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc is of another namespace of process ids")
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


# ------------------------------------------------------------------------------------------------------ the other ranks
#
# The connections between the ranks of a process group on one host, which may read one another's memory.
#
# Each rank has a pipe from each other rank, over which these send two kinds of notes, of 24 bytes:
#
#     operation   the channel of the sender's next operation, the address of the data that the other ranks read, and
#                 the number of bytes of the operation
#     done        the sender has read all its data of the oldest operation for which it has not sent this note yet
#
# Tensors do not go through the pipes: `read_memory` copies their values from the memory of the other rank.


# The number of a `done` note, in place of a channel.
_DONE = -1

_NOTE = struct.Struct("=qQQ")

Note = tuple[int, int, int]
"""Of an operation: channel, address, bytes."""

# Seconds of one call of poll(2), which accepts no more than some weeks.
_LONGEST_POLL = 3600


class Peer:
    """Another rank: its process, the pipe from it (`inbox`), and that to it (`outbox`). Notes that are not used yet:
    `notes` about operations, and the number of `done` notes. `closed`: whether the rank has ended or closed its
    pipes."""

    def __init__(self, pid: int, inbox: Pipe, outbox: Pipe) -> None:
        self.pid, self.inbox, self.outbox = pid, inbox, outbox
        self.notes: deque[Note] = deque()
        self.done = 0
        self.closed = False

    def has(self, needed: Callable[[Peer], bool]) -> bool:
        """Takes notes until there is what is needed. Returns False if there is not yet, or the rank has ended."""
        while not needed(self):
            data = self.inbox.read(_NOTE.size)
            if not data:
                # b"" is the end of the pipe; None only says that no note has come yet.
                self.closed = data is not None
                return False
            # Never a part of a note: a pipe takes up to PIPE_BUF bytes, at least 512, as a whole or not at all.
            note = _NOTE.unpack(data)
            if note[0] == _DONE:
                self.done += 1
            else:
                self.notes.append(note)
        return True

    def send(self, note: bytes, timeout: float) -> None:
        """Sends a note. Blocks only if the peer has thousands of unread notes; it may then be blocked in a send itself.
        Raises OSError if it reads none for `timeout` seconds.

        Does nothing if the peer has ended: this rank raises when it next waits for a note of the peer.
        """
        begun: float | None = None
        try:  # not `suppress`, which takes a third as long as the write
            while self.outbox.write(note) is None:
                begun = begun or time.monotonic()
                if (left := begun + timeout - time.monotonic()) < 0:
                    raise OSError(f"process {self.pid} has read nothing for {timeout:g} s")
                _poll([self], left, to_send=True)
                # Empties the inbox: the peer may wait for room in it, and then reads nothing of this rank's.
                self.has(lambda peer: False)
        except BrokenPipeError:
            return


class Peers:
    """The connections of one rank to all other ranks of its process group, by rank. timeout: seconds to wait for a note
    of a rank before OSError is raised. close: closes all pipes. `pipes`: these."""

    def __init__(self, peers: Mapping[int, Peer], timeout: float, close: Callable[[], object]) -> None:
        self._peers, self._timeout = peers, timeout
        self.pipes = [pipe for peer in peers.values() for pipe in (peer.inbox, peer.outbox)]
        finalize(self, close)

    def announce(self, number: int, address: int = 0, nbytes: int = 0) -> None:
        """Sends all ranks the channel of this rank's operation, the address of its data, and the bytes that it moves.

        The data must not change until `finish` has returned for this operation.
        """
        note = _NOTE.pack(number, address, nbytes)
        for peer in self._peers.values():
            peer.send(note, self._timeout)

    def notes(self) -> dict[int, Note]:
        """Waits for the oldest note of each other rank that was not returned yet. Returns them by rank."""
        self.wait_for(lambda peer: bool(peer.notes))
        return {rank: peer.notes.popleft() for rank, peer in self._peers.items()}

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Overwrites a contiguous tensor with what is at an address on another rank."""
        if into.nbytes:
            read_memory(self._peers[rank].pid, address, into.data_ptr(), into.nbytes)

    def finish(self) -> None:
        """Tells all ranks that this rank has read its data, and waits until all others have."""
        self.announce(_DONE)
        self.wait_for(lambda peer: peer.done > 0)
        for peer in self._peers.values():
            peer.done -= 1

    def wait_for(self, needed: Callable[[Peer], bool]) -> None:
        """Raises OSError if a peer that is waited for has ended, or if one sends nothing in time."""
        if all(peer.has(needed) for peer in self._peers.values()):
            return
        begun = time.monotonic()
        while missing := {rank: peer for rank, peer in self._peers.items() if not peer.has(needed)}:
            for rank, peer in missing.items():
                if peer.closed:
                    raise OSError(f"rank {rank} of the group, process {peer.pid}, has ended or closed its connection")
            waited = time.monotonic() - begun
            if waited >= self._timeout:
                silent = ", ".join(map(str, missing))
                raise OSError(f"rank {silent} of the group sent nothing for {self._timeout:g} s")
            _poll(missing.values(), self._timeout - waited)


def _poll(peers: Collection[Peer], seconds: float, *, to_send: bool = False) -> None:
    """Waits for a note of any of the peers, for the end of one, or until a note can be sent."""
    poll = select.poll()
    for peer in peers:
        poll.register(peer.inbox, select.POLLIN)
        if to_send:
            poll.register(peer.outbox, select.POLLOUT)
    poll.poll(min(seconds, _LONGEST_POLL) * 1000)


# ------------------------------------------------------------------------------------------------------- how ranks meet
#
# The rendezvous of a process group's ranks: it finds out whether they share a host and may read one another's memory.
#
# A rank reads notes from pipes that it has made, one for each other rank, which opens it through /proc: only a process
# that may look into this one can send notes to it. Each rank exchanges a few hundred bytes through the group's store.
# This is collective, but uses no process group.


def rendezvous(exchange: StoreRendezvous, how: str) -> Peers | None:
    """Collective. Returns this rank's peers; None, on every rank, unless all ranks run on one host and each may read
    the memory of all others. how: "auto", "off" or "ptracer"."""
    nonce = ctypes.create_string_buffer(exchange.nonce.encode())
    inboxes: dict[int, Pipe] = {}
    peers: dict[int, Peer] = {}
    with ExitStack() as opened, ExitStack() as entries:
        # What goes wrong on this rank, whatever it is, the others learn by an offer, or an answer, of no bytes.
        offer, answer = b"", b""
        with suppress(Exception):
            if how == "ptracer":
                permit_siblings()
            pipes = {}
            for rank in {*range(exchange.world)} - {exchange.rank}:
                inbox, entry = os.pipe()
                inboxes[rank] = opened.enter_context(Pipe(inbox, "rb"))
                # Closed on leaving: a pipe whose other end this rank held open itself would never show a peer's end.
                pipes[rank] = entries.enter_context(Pipe(entry, "wb")).fileno()
            offer = json.dumps([host_name(), os.getpid(), pipes, ctypes.addressof(nonce)]).encode()
        offers = exchange.all_gather(b"" if how == "off" else offer)
        if not all(offers):
            return None
        with suppress(Exception):
            for rank, (host, pid, pipes, address) in enumerate(map(json.loads, offers)):
                read = ctypes.create_string_buffer(len(nonce))
                if host == host_name():
                    read_memory(pid, address, ctypes.addressof(read), len(nonce))
                if read.raw != nonce.raw:
                    raise OSError(f"rank {rank} of the group is on another host, or is not process {pid}")
                if rank != exchange.rank:
                    outbox = os.open(f"/proc/{pid}/fd/{pipes[str(exchange.rank)]}", os.O_WRONLY | os.O_NONBLOCK)
                    peers[rank] = Peer(pid, inboxes[rank], opened.enter_context(Pipe(outbox, "wb")))
            answer = b"connected"
        if not all(exchange.all_gather(answer)):
            return None
        return Peers(peers, exchange.timeout.total_seconds(), opened.pop_all().close)


# -------------------------------------------------------------------------------------------------------- the transport


CHUNK = 1 << 18
"""Bytes that are read from each rank before they are added up, while they are still in the cache."""

_DIGEST_MASK = (1 << 62) - 1

Addresses = Mapping[int, Sequence[int]]
"""Where the tensors are that other ranks show to this one, by rank."""


class QueuedWork(Work):
    """A transfer that compares operations in `wait`. finish: does all the rest of it, and returns its result.
    queue: all that are in flight. They are completed in the order of their launches, so that this order is the same on
    every rank, whichever work a rank waits for first."""

    def __init__(self, finish: Callable[[], Any], queue: list[QueuedWork]) -> None:
        self._finish: Any = finish
        self._result: Any = None
        self._error: BaseException | None = None
        self._queue = queue
        queue.append(self)

    def wait(self) -> Any:
        """Also raises the error of the transfer if it came up in the `wait` of another work."""
        while self in self._queue:
            work = self._queue.pop(0)
            finish, work._finish = work._finish, None  # with its buffers
            try:
                work._result = finish()
            except BaseException as error:
                work._error = error
                raise
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None
        return result


class TwoWorks(Work):
    """A transfer, and a second one that is launched once the first has ended. `wait` returns `result`."""

    def __init__(self, first: Work, then: Callable[[], Work], result: Any) -> None:
        self._first, self._then, self._result = first, then, result

    def wait(self) -> Any:
        self._first.wait()
        self._then().wait()
        return self._result


class HostMemory(Transport):
    """The transport for tensors on the CPU, within one host."""

    name, overlaps, reads_memory = "host memory", False, True

    def __init__(self, log: Log, peers: Peers, rank: int, world: int) -> None:
        self._log, self._peers, self._rank, self._world = log, peers, rank, world
        self._queue: list[QueuedWork] = []
        pipes = peers.pipes
        # The other ranks wait for this rank to read: it will not. Not by the peers, which keep the log.
        log.failure.at_failure.append(lambda _: deque(map(Pipe.cut, pipes), 0))

    def _announce(
        self, channel: int, word: int, nbytes: int, buffers: object, finish: Callable[[Mapping[int, int]], Any]
    ) -> Work:
        """Announces an operation of so many bytes on each rank. `wait` returns the result of `finish`, which gets the
        words of the other ranks, by rank. buffers: the owners of all memory that any rank reads or writes."""
        with Operation(self._log, channel, buffers, (OSError,)):  # torch, which sums, raises RuntimeError
            self._log.record(channel)
            work = QueuedWork(partial(self._finish, channel, nbytes, buffers, finish), self._queue)
            self._peers.announce(channel, word, nbytes)
        return work

    def _finish(self, channel: int, nbytes: int, buffers: object, finish: Callable[[Mapping[int, int]], Any]) -> Any:
        with Operation(self._log, channel, buffers, (OSError,)):  # torch, which sums, raises RuntimeError
            notes = self._peers.notes()
            self._log.refuse_differing(channel, {rank: number for rank, (number, *_) in notes.items()})
            if any(size != nbytes for *_, size in notes.values()):
                self._log.out_of_step({})
            return finish({rank: word for rank, (_, word, _) in notes.items()})

    def _launch(
        self,
        channel: int,
        nbytes: int,
        shown: Sequence[Tensor],
        read: Callable[[Addresses], Any],
        buffers: object,
    ) -> Work:
        """Launches an operation. `wait` returns the result of `read` after all ranks have read.

        shown: the tensors that other ranks may read, as many on each rank. A rank announces the address of one tensor
        itself, of several that of a table of their addresses.
        """
        own = [tensor.data_ptr() for tensor in shown]
        # The device is named, as the user may have set another by torch.set_default_device.
        table = torch.tensor(own, dtype=torch.int64, device="cpu") if len(own) > 1 else None

        def read_all(words: Mapping[int, int]) -> Any:
            result = read({rank: self._addresses(rank, word, len(own)) for rank, word in words.items()})
            self._peers.finish()
            return result

        word = sum(own) if table is None else table.data_ptr()
        return self._announce(channel, word, nbytes, (shown, table, buffers), read_all)

    def _addresses(self, rank: int, word: int, count: int) -> list[int]:
        if count == 1:
            return [word]
        table = torch.empty(count, dtype=torch.int64, device="cpu")
        self._peers.read(rank, word, table)
        return table.tolist()

    def compare(self, channel: int, *, flags: int = 0) -> int:
        # The digest has only operations by other transports of the group: notes compare those of this one. A note has
        # room for an address of 64 bits; in its place go 62 bits of the digest, and the flags.
        digest = self._log.digest & _DIGEST_MASK
        received: Mapping[int, int] = self._announce(channel, digest << 2 | flags, 0, None, lambda words: words).wait()
        if any(word >> 2 != digest for word in received.values()):
            refuse_differing_logs(self, self._log)
        self._log.clear()
        return reduce(or_, (word & 3 for word in received.values()), flags)

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        shards = [full[low:high] for low, high in pairwise(bounds)]
        return self._launch(channel, full.nbytes, [shards[self._rank]], partial(self._read_each, shards), full)

    def _read_each(self, tensors: Sequence[Tensor] | Tensor, addresses: Addresses) -> None:
        """Reads from each other rank into the tensor that is in its place."""
        for rank, (address,) in addresses.items():
            self._peers.read(rank, address, tensors[rank])

    def reduce(self, messages: Sequence[Message], times: float, channel: int) -> Work:
        return self._reduce(messages, times, None, channel)

    def _reduce(self, messages: Sequence[Message], times: float, into: Tensor | None, channel: int) -> Work:
        flats = [flat for flat, _ in messages]
        shares = [[0, *accumulate(counts)][self._rank : self._rank + 2] for _, counts in messages]
        nbytes = sum(flat.nbytes for flat in flats)
        return self._launch(channel, nbytes, flats, partial(self._sum, flats, shares, times, into), into)

    def _sum(
        self,
        messages: Sequence[Tensor],
        shares: Sequence[Sequence[int]],
        times: float,
        into: Tensor | None,
        addresses: Addresses,
    ) -> Tensor:
        """Reads this rank's share [low, high) of each message from all ranks, in chunks, and adds them up."""
        sample = messages[0]
        new = partial(sample.new_empty, dtype=summed_as(sample.dtype))
        total = new(sum(high - low for low, high in shares)) if into is None else into
        most = min(CHUNK // sample.element_size(), max(1, *(high - low for low, high in shares)))
        chunks = sample.new_empty(self._world, most)
        # Sums of 16-bit floats are float32: within `into` each addition would round them.
        buffer = None if total.dtype == summed_as(sample.dtype) else new(most)
        done = 0
        for number, (low, high) in enumerate(shares):
            for start in range(low, high, most):
                length = min(most, high - start)
                rows, chunk = chunks[:, :length], total[done : done + length]
                sums = chunk if buffer is None else buffer[:length]
                rows[self._rank] = messages[number][start : start + length]
                for rank, of_messages in addresses.items():
                    self._peers.read(rank, of_messages[number] + start * rows.element_size(), rows[rank])
                add_in_order([*rows], sums, times)
                if sums is not chunk:
                    chunk.copy_(sums)
                done += length
        return total

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        flat = tensor.view(-1)
        # In shares: a rank then reads 2 (W - 1) / W of the bytes instead of W - 1 times them.
        if flat.nbytes > CHUNK and not maximum:
            bounds = [len(flat) * rank // self._world for rank in range(self._world + 1)]
            low, high = bounds[self._rank : self._rank + 2]
            shares = self._reduce([(flat, lengths(bounds))], times, flat[low:high], channel)
            return TwoWorks(shares, partial(self.gather, flat, bounds, channel), flat)
        rows = self._rows(flat, channel)
        return Work(flat.copy_(rows.amax(0) if maximum else sum_in_rank_order([rows], times)))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        # A copy: torch warns of memory that cannot be written, as that of `bytes`.
        rows = self._rows(torch.frombuffer(bytearray(data), dtype=torch.uint8), COMPARISON)
        return [row.numpy().tobytes() for row in rows]

    def _rows(self, flat: Tensor, channel: int) -> Tensor:
        """Returns the tensors of all ranks, one row a rank."""
        rows = flat.new_empty(self._world, len(flat))
        rows[self._rank] = flat
        self._launch(channel, rows.nbytes, [rows[self._rank]], partial(self._read_each, rows), rows).wait()
        return rows

    def exchange(self, into: Tensor, sent: Message, counts_in: Sequence[int], channel: int) -> Work:
        flat, counts_out = sent
        own = [flat.data_ptr() + start * flat.element_size() for start in [0, *accumulate(counts_out)]]
        # The device is named, as the user may have set another by torch.set_default_device.
        table, address = torch.tensor(own, device="cpu"), torch.empty(1, dtype=torch.int64, device="cpu")

        def read(words: Mapping[int, int]) -> None:
            for rank, place in enumerate(into.split([*counts_in])):
                if place.numel():
                    self._peers.read(rank, words[rank] + self._rank * address.nbytes, address)
                    self._peers.read(rank, int(address), place)
            self._peers.finish()

        return self._announce(channel, table.data_ptr(), 0, (into, flat, table), read)  # each rank sends others
