"""The connections between the ranks of a process group on one host, which may read one another's memory.

Each rank has a socket to each other rank, over which they send two kinds of notes, of 16 bytes:

    operation   the channel of the sender's next operation, and the address of the data that the other ranks read
    done        the sender has read all its data of the oldest operation for which it has not sent this note yet

Tensors do not go over the sockets: `attach.read` copies their values from the memory of the other rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import finalize

from zero.features.host_memory import attach

_DONE = -1
"""The number of a `done` note, in place of a channel."""

_NOTE = struct.Struct("=qQ")

_LONGEST_POLL = 3600
"""Seconds of one call of poll(2), which accepts no more than some weeks."""


class Note(NamedTuple):
    """A note about an operation: its channel and an address."""

    number: int
    address: int


class Peer:
    """The connection to another rank. Notes that are not used yet: `notes` about operations, and the number of `done`
    notes. `closed`: whether the rank has ended or closed its connection."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.socket = pid, connection
        self.pidfd = os.pidfd_open(pid)  # the socket may outlive the process, in a process that was forked from it
        self.notes: deque[Note] = deque()
        self.done = 0
        self.closed = False

    def take_notes(self) -> None:
        """Takes all notes that have arrived, without blocking."""
        while not self.closed:
            try:
                data = self.socket.recv(_NOTE.size)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.closed = True
                return
            note = Note(*_NOTE.unpack(data))
            if note.number == _DONE:
                self.done += 1
            else:
                self.notes.append(note)

    def send(self, note: bytes) -> None:
        """Sends a note. Blocks only if the peer has hundreds of unread notes; it may then be blocked in a send itself.

        Does nothing if the peer has ended: this rank raises when it next waits for a note of the peer.
        """
        while not self.closed:
            try:
                self.socket.send(note, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                self.take_notes()
                poll = select.poll()
                poll.register(self.socket, select.POLLIN | select.POLLOUT)
                poll.register(self.pidfd, select.POLLIN)
                if self.pidfd in dict(poll.poll()):
                    self.closed = True
            except OSError:
                self.take_notes()
                self.closed = True


class Peers:
    """The connections of one rank to all other ranks of its process group. peers: by rank; None for this rank.
    timeout: seconds to wait for a note of a rank before OSError is raised."""

    def __init__(self, peers: Sequence[Peer | None], timeout: float) -> None:
        self._peers = {rank: peer for rank, peer in enumerate(peers) if peer is not None}
        self._timeout = timeout
        self._pid = os.getpid()
        self._poll = select.poll()
        self._by_descriptor: dict[int, Peer] = {}
        for peer in self._peers.values():
            for descriptor in (peer.socket.fileno(), peer.pidfd):
                self._poll.register(descriptor, select.POLLIN)
                self._by_descriptor[descriptor] = peer
        self.close = finalize(self, close, [*self._peers.values()], self._pid)

    def announce(self, number: int, address: int = 0) -> None:
        """Sends all ranks the channel of this rank's operation, and the address of its data.

        The data must not change until `finish` has returned for this operation.
        """
        self._send(_NOTE.pack(number, address))

    def notes(self) -> dict[int, Note]:
        """Waits for the oldest note of each other rank that was not returned yet, and returns them by rank."""
        self._wait(lambda peer: bool(peer.notes))
        return {rank: peer.notes.popleft() for rank, peer in self._peers.items()}

    def read(self, rank: int, address: int, into: int, nbytes: int) -> None:
        """Copies from an address on another rank to the address `into` on this rank."""
        if nbytes:
            attach.read(self._peers[rank].pid, address, into, nbytes)

    def read_table(self, rank: int, address: int, count: int) -> Sequence[int]:
        """Returns a table of `count` addresses, read from an address on another rank."""
        table = (ctypes.c_uint64 * count)()
        self.read(rank, address, ctypes.addressof(table), ctypes.sizeof(table))
        return list(table)

    def finish(self) -> None:
        """Tells all ranks that this rank has read its data, and waits until all others have."""
        self._send(_NOTE.pack(_DONE, 0))
        self._wait(lambda peer: peer.done > 0)
        for peer in self._peers.values():
            peer.done -= 1

    def _send(self, note: bytes) -> None:
        if os.getpid() != self._pid:
            raise OSError("this process was forked from a rank and is not a rank itself; use zero in the rank only")
        for peer in self._peers.values():
            peer.send(note)

    def _wait(self, satisfied: Callable[[Peer], bool]) -> None:
        deadline = time.monotonic() + self._timeout
        while missing := [(rank, peer) for rank, peer in self._peers.items() if not satisfied(peer)]:
            for rank, peer in missing:
                if peer.closed:
                    raise OSError(f"rank {rank} of the group, process {peer.pid}, has ended or closed its connection")
            left = max(deadline - time.monotonic(), 0)
            ready = self._poll.poll(min(left, _LONGEST_POLL) * 1000)
            if not ready and left == 0:
                silent = ", ".join(str(rank) for rank, _ in missing)
                raise OSError(f"rank {silent} of the group sent nothing for {self._timeout:g} s")
            for descriptor, _ in ready:
                peer = self._by_descriptor[descriptor]
                peer.take_notes()
                if peer.closed or descriptor == peer.pidfd:
                    self._mark_closed(peer)

    def _mark_closed(self, peer: Peer) -> None:
        peer.closed = True
        for descriptor in (peer.socket.fileno(), peer.pidfd):
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)


def close(peers: Sequence[Peer], pid: int) -> None:
    """Closes the connections. Does nothing in a process that was forked from the process `pid` that opened them."""
    if os.getpid() != pid:
        return
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)
        peer.socket.close()
        os.close(peer.pidfd)
