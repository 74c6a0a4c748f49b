"""The ranks of a process group that all run on one host and may read one another's memory.

Each rank has a socket to each other one. Two kinds of notes go over it, of 16 bytes:

    operation   which operation the sender has come to, and the address of what the others are to read for it
    done        the sender has read all that it needed for the oldest operation for which it has not said so

What is in the tensors does not go over the sockets: `attach.read` copies it from the other's memory.
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

from zero.comm import attach

_DONE = -1
"""Where the number of an operation stands in other notes."""

_NOTE = struct.Struct("=qQ")

_PATIENCE = 3600
"""Seconds that one call waits; the system takes no more than some weeks."""


class Note(NamedTuple):
    """What a rank says about an operation."""

    number: int
    address: int


class Peer:
    """Another rank, and what has come from it and is not yet used."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self.line = pid, line
        self.alive = os.pidfd_open(pid)  # a socket may outlive its process, in one that was forked from it
        self.notes: deque[Note] = deque()
        self.done = 0
        self.gone = False

    def take_notes(self) -> None:
        """Everything that has arrived."""
        while not self.gone:
            try:
                note = self.line.recv(_NOTE.size)
            except BlockingIOError:
                return
            except OSError:
                note = b""
            if not note:
                self.gone = True
                return
            said = Note(*_NOTE.unpack(note))
            if said.number == _DONE:
                self.done += 1
            else:
                self.notes.append(said)

    def send(self, note: bytes) -> None:
        """Returns at once but where the other has hundreds of notes to read; it may then itself be waiting to send.

        One that is gone is missed where something is expected of it.
        """
        while not self.gone:
            try:
                self.line.send(note, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                self.take_notes()
                waiting = select.poll()
                waiting.register(self.line, select.POLLIN | select.POLLOUT)
                waiting.register(self.alive, select.POLLIN)
                if self.alive in dict(waiting.poll()):
                    self.gone = True
            except OSError:
                self.take_notes()
                self.gone = True


class Peers:
    """All ranks of one process group, seen from one of them.

    peers: by rank; None at this one.
    timeout: seconds after which a rank that says nothing is given up.
    """

    def __init__(self, peers: Sequence[Peer | None], timeout: float) -> None:
        self._peers = {rank: peer for rank, peer in enumerate(peers) if peer is not None}
        self._timeout = timeout
        self._pid = os.getpid()
        self._poll = select.poll()
        self._by_descriptor: dict[int, Peer] = {}
        for peer in self._peers.values():
            for descriptor in (peer.line.fileno(), peer.alive):
                self._poll.register(descriptor, select.POLLIN)
                self._by_descriptor[descriptor] = peer
        self.close = finalize(self, close, [*self._peers.values()], self._pid)

    def announce(self, number: int, address: int = 0) -> None:
        """Says which operation this rank has come to, and the address of what it has there for the others.

        What lies there must not change until `finish` has returned for this operation.
        """
        self._send(_NOTE.pack(number, address))

    def notes(self) -> dict[int, Note]:
        """By rank, the note of each other rank on the oldest operation that was not taken yet. Blocks until then."""
        self._wait(lambda peer: bool(peer.notes))
        return {rank: peer.notes.popleft() for rank, peer in self._peers.items()}

    def read(self, rank: int, address: int, into: int, nbytes: int) -> None:
        """Copies from an address on another rank to the address `into` on this one."""
        if nbytes:
            attach.read(self._peers[rank].pid, address, into, nbytes)

    def read_table(self, rank: int, address: int, count: int) -> Sequence[int]:
        """So many addresses that lie at an address on another rank."""
        table = (ctypes.c_uint64 * count)()
        self.read(rank, address, ctypes.addressof(table), ctypes.sizeof(table))
        return list(table)

    def finish(self) -> Callable[[], None]:
        """Says that this rank has read what it needs. The result, called, blocks until all others have."""
        self._send(_NOTE.pack(_DONE, 0))

        def wait() -> None:
            self._wait(lambda peer: peer.done > 0)
            for peer in self._peers.values():
                peer.done -= 1

        return wait

    def _send(self, note: bytes) -> None:
        if os.getpid() != self._pid:
            raise OSError("this process was forked from a rank, and is none itself")
        for peer in self._peers.values():
            peer.send(note)

    def _wait(self, satisfied: Callable[[Peer], bool]) -> None:
        until = time.monotonic() + self._timeout
        while missing := [(rank, peer) for rank, peer in self._peers.items() if not satisfied(peer)]:
            for rank, peer in missing:
                if peer.gone:
                    raise OSError(f"rank {rank} of the group, process {peer.pid}, has left")
            left = max(until - time.monotonic(), 0)
            ready = self._poll.poll(min(left, _PATIENCE) * 1000)
            if not ready and left == 0:
                silent = ", ".join(str(rank) for rank, _ in missing)
                raise OSError(f"of rank {silent} of the group nothing came for {self._timeout:g} s")
            for descriptor, _ in ready:
                peer = self._by_descriptor[descriptor]
                peer.take_notes()
                if peer.gone or descriptor == peer.alive:
                    self._give_up(peer)

    def _give_up(self, peer: Peer) -> None:
        peer.gone = True
        for descriptor in (peer.line.fileno(), peer.alive):
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)


def close(peers: Sequence[Peer], pid: int) -> None:
    """pid: of the process that opened them. One that was forked from it leaves them alone."""
    if os.getpid() != pid:
        return
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.line.shutdown(socket.SHUT_RDWR)
        peer.line.close()
        os.close(peer.alive)
