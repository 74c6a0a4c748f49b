"""The ranks of a process group that all run on one host and may read one another's memory.

Each rank has a socket to each other one. Two kinds of notes go over it, of 16 bytes:

    told    which operation the sender has come to, and the address of what the others are to read for it
    done    the sender has read all that it needed for the oldest operation for which it has not said so

What is in the tensors does not go over the sockets: `attach.read` copies it from the other's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import finalize

from zero.oss import attach

_DONE = -1
"""Where the number of an operation stands in other notes."""

_NOTE = struct.Struct("=qQ")

_PATIENCE = 3600
"""Seconds that one call waits; the system takes no more than some weeks."""

_TOKEN = 16
"""Bytes by which ranks prove to be who they say."""


class Told(NamedTuple):
    """What a rank said about an operation."""

    number: int
    address: int


class _Peer:
    """Another rank, and what has come from it and is not yet used."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self.line = pid, line
        self.alive = os.pidfd_open(pid)  # a socket may outlive its process, in one that was forked from it
        self.told: deque[Told] = deque()
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
            told = Told(*_NOTE.unpack(note))
            if told.number == _DONE:
                self.done += 1
            else:
                self.told.append(told)

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


class Neighbours:
    """All ranks of one process group, seen from one of them.

    peers: by rank; None at this one.
    timeout: seconds after which a rank that says nothing is given up.
    """

    def __init__(self, peers: Sequence[_Peer | None], timeout: float) -> None:
        self._peers = {rank: peer for rank, peer in enumerate(peers) if peer is not None}
        self._timeout = timeout
        self._pid = os.getpid()
        self._poll = select.poll()
        self._by_descriptor: dict[int, _Peer] = {}
        for peer in self._peers.values():
            for descriptor in (peer.line.fileno(), peer.alive):
                self._poll.register(descriptor, select.POLLIN)
                self._by_descriptor[descriptor] = peer
        self.close = finalize(self, _close, [*self._peers.values()], self._pid)

    def tell(self, number: int, address: int = 0) -> None:
        """Says which operation this rank has come to, and the address of what it has there for the others.

        What lies there must not change until `finish` has returned for this operation.
        """
        self._send(_NOTE.pack(number, address))

    def hear(self) -> dict[int, Told]:
        """By rank, what each other rank told of the oldest operation that was not yet asked for. Blocks until then."""
        self._wait(lambda peer: bool(peer.told))
        return {rank: peer.told.popleft() for rank, peer in self._peers.items()}

    def read(self, rank: int, address: int, into: int, nbytes: int) -> None:
        """Copies from an address on another rank to the address `into` on this one."""
        if nbytes:
            attach.read(self._peers[rank].pid, address, into, nbytes)

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

    def _wait(self, satisfied: Callable[[_Peer], bool]) -> None:
        until = time.monotonic() + self._timeout
        while missing := [(rank, peer) for rank, peer in self._peers.items() if not satisfied(peer)]:
            for rank, peer in missing:
                if peer.gone:
                    raise OSError(f"rank {rank} of the group, process {peer.pid}, has left")
            left = max(until - time.monotonic(), 0)
            ready = self._poll.poll(min(left, _PATIENCE) * 1000)
            if not ready and left == 0:
                silent = ", ".join(str(rank) for rank, _ in missing)
                raise OSError(f"of rank {silent} of the group nothing was heard for {self._timeout:g} s")
            for descriptor, _ in ready:
                peer = self._by_descriptor[descriptor]
                peer.take_notes()
                if peer.gone or descriptor == peer.alive:
                    self._give_up(peer)

    def _give_up(self, peer: _Peer) -> None:
        peer.gone = True
        for descriptor in (peer.line.fileno(), peer.alive):
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)


def _close(peers: Sequence[_Peer], pid: int) -> None:
    if os.getpid() != pid:
        return  # a process forked from the rank: the sockets are the rank's
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.line.shutdown(socket.SHUT_RDWR)
        peer.line.close()
        os.close(peer.alive)


# ---------------------------------------------------------------------------------------------------------- meeting


def meet(exchange: Callable[[bytes], list[bytes]], rank: int, world: int, timeout: float) -> Neighbours | None:
    """Collective. The neighbours of this rank; None, on every rank, unless all run on one host and may read all others.

    exchange: brings what each rank gives it, a few hundred bytes at most, to every rank, in the order of ranks.
    """
    hosts = exchange(_or_nothing(lambda: attach.host().encode()))
    if not hosts[0] or len(set(hosts)) > 1:
        return None
    meeting = _Meeting(rank)
    try:
        calls = exchange(_or_nothing(meeting.call))
        if all(exchange(_or_nothing(lambda: meeting.visit(calls)))) and all(exchange(_or_nothing(meeting.receive))):
            return Neighbours([meeting.peers.pop(other, None) for other in range(world)], timeout)
        return None
    finally:
        meeting.end()


def _or_nothing(act: Callable[[], bytes]) -> bytes:
    """Whatever goes wrong on this rank, the others wait for its answer."""
    try:
        return act()
    except Exception:
        return b""


class _Meeting:
    """How each rank comes by a socket to each other one. Its steps return what is exchanged between them.

    peers: those met. What is still in it at the end is closed.
    """

    def __init__(self, rank: int) -> None:
        self.peers: dict[int, _Peer] = {}
        self._rank = rank
        self._listener: socket.socket | None = None
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN), _TOKEN)
        self._ranks: dict[int, int] = {}  # by process

    def call(self) -> bytes:
        """Where this rank is to be visited, and what is to be read in its memory for a proof that it can be."""
        attach.permit_siblings()
        name = secrets.token_hex(_TOKEN)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(0)  # whoever is received has visited before
        self._listener.bind(f"\0{name}")  # a name without a file
        self._listener.listen(socket.SOMAXCONN)
        token = self._token.raw.hex()
        return json.dumps([os.getpid(), name, token, ctypes.addressof(self._token)]).encode()

    def visit(self, calls: list[bytes]) -> bytes:
        """Reads the proof of every rank, and visits those before this one."""
        for rank, (pid, name, token, address) in enumerate(map(json.loads, calls)):
            found = ctypes.create_string_buffer(_TOKEN)
            attach.read(pid, address, ctypes.addressof(found), _TOKEN)
            if found.raw.hex() != token or pid in self._ranks:
                raise OSError(f"process {pid} is not rank {rank}, or not alone")
            self._ranks[pid] = rank
            if rank < self._rank:
                line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._met(rank, pid, line)
                line.connect(f"\0{name}")
                line.setblocking(False)
        return b"visited"

    def receive(self) -> bytes:
        """Takes in the ranks after this one, which have visited."""
        assert self._listener is not None
        while len(self.peers) < len(self._ranks) - 1:
            line, _ = self._listener.accept()
            credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, _, _ = struct.unpack("3i", credentials)
            rank = self._ranks.get(pid)
            if rank is None or rank in self.peers:
                line.close()  # no rank of this group
            else:
                line.setblocking(False)
                self._met(rank, pid, line)
        return b"received"

    def _met(self, rank: int, pid: int, line: socket.socket) -> None:
        try:
            self.peers[rank] = _Peer(pid, line)
        except BaseException:
            line.close()
            raise

    def end(self) -> None:
        if self._listener is not None:
            self._listener.close()
        _close([*self.peers.values()], os.getpid())
