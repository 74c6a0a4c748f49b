"""The connections between the ranks of a process group on one host, which may read one another's memory.

Each rank has a socket to each other rank, over which they send two kinds of notes, of 16 bytes:

    operation   the channel of the sender's next operation, and the address of the data that the other ranks read
    done        the sender has read all its data of the oldest operation for which it has not sent this note yet

Tensors do not go over the sockets: `attach.read` copies their values from the memory of the other rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from weakref import finalize

import torch
from torch import Tensor

from zero.comm import waiting
from zero.comm.host_memory import attach

# The number of a `done` note, in place of a channel.
_DONE = -1

_NOTE = struct.Struct("=qQ")

# Seconds of one call of poll(2), which accepts no more than some weeks.
_LONGEST_POLL = 3600


class Peer:
    """The connection to another rank. Notes that are not used yet: `notes` about operations (channel and address), and
    the number of `done` notes. `closed`: whether the rank has ended or closed its connection."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.socket = pid, connection
        try:
            self.pidfd = os.pidfd_open(pid)  # the socket may outlive the process, in a process that was forked from it
        except BaseException:
            connection.close()
            raise
        self.notes: deque[tuple[int, int]] = deque()
        self.done = 0
        self.closed = False

    def take_note(self) -> bool:
        """Takes the next note, or notices that the rank has closed its connection. Returns False if it is silent."""
        try:
            data = self.socket.recv(_NOTE.size)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return True
        number, address = _NOTE.unpack(data)
        if number == _DONE:
            self.done += 1
        else:
            self.notes.append((number, address))
        return True

    def end(self) -> None:
        """Takes the last notes of a rank that has ended."""
        while not self.closed and self.take_note():
            pass
        self.closed = True

    def send(self, note: bytes) -> None:
        """Sends a note. Blocks only if the peer has hundreds of unread notes; it may then be blocked in a send itself.

        Does nothing if the peer has ended: this rank raises when it next waits for a note of the peer.
        """
        while not self.closed:
            try:
                self.socket.send(note, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                _wait_for([self], to_send=True)
            except OSError:
                self.end()


class Peers:
    """The connections of one rank to all other ranks of its process group, by rank. timeout: seconds to wait for a note
    of a rank before OSError is raised.

    `waits_for`: called once in a wait that takes long, with the ranks that are waited for and the channel of the
        operation.
    """

    def __init__(self, peers: Mapping[int, Peer], timeout: float) -> None:
        self._peers, self._timeout = dict(sorted(peers.items())), timeout
        self.waits_for: Callable[[list[int], int], object] = lambda missing, channel: None
        self._channel = _DONE
        self._pid = os.getpid()
        self.close = finalize(self, close, [*self._peers.values()], self._pid)

    def announce(self, number: int, address: int = 0) -> None:
        """Sends all ranks the channel of this rank's operation, and the address of its data.

        The data must not change until `finish` has returned for this operation.
        """
        if os.getpid() != self._pid:
            raise OSError("this process was forked from a rank and is not a rank itself; use zero in the rank only")
        for peer in self._peers.values():
            peer.send(_NOTE.pack(number, address))

    def notes(self, channel: int) -> dict[int, tuple[int, int]]:
        """Waits for the oldest note of each other rank that was not returned yet: channels and addresses, by rank.
        channel: of this rank's own operation, until `finish`."""
        self._channel = channel
        self._wait(lambda peer: bool(peer.notes))
        return {rank: peer.notes.popleft() for rank, peer in self._peers.items()}

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Overwrites a contiguous tensor with what is at an address on another rank."""
        if into.nbytes:
            attach.read(self._peers[rank].pid, address, into.data_ptr(), into.nbytes)

    def read_table(self, rank: int, address: int, count: int) -> list[int]:
        """Returns a table of `count` addresses (int64), read from an address on another rank."""
        table = torch.empty(count, dtype=torch.int64, device="cpu")
        self.read(rank, address, table)
        return table.tolist()

    def finish(self) -> None:
        """Tells all ranks that this rank has read its data, and waits until all others have."""
        self.announce(_DONE)
        self._wait(lambda peer: peer.done > 0)
        for peer in self._peers.values():
            peer.done -= 1

    def _wait(self, satisfied: Callable[[Peer], bool]) -> None:
        """Raises OSError if a peer that is waited for has ended, or if one sends nothing in time."""
        for peer in self._peers.values():
            while not satisfied(peer) and not peer.closed and peer.take_note():
                pass  # most have sent it by now
        begun, patience = time.monotonic(), waiting.PATIENCE
        while missing := {rank: peer for rank, peer in self._peers.items() if not satisfied(peer)}:
            for rank, peer in missing.items():
                if peer.closed:
                    raise OSError(f"rank {rank} of the group, process {peer.pid}, has ended or closed its connection")
            waited = time.monotonic() - begun
            if waited >= self._timeout:
                silent = ", ".join(map(str, missing))
                raise OSError(f"rank {silent} of the group sent nothing for {self._timeout:g} s")
            if waited >= patience:
                patience = self._timeout
                self.waits_for([*missing], self._channel)
            _wait_for(missing.values(), min(patience, self._timeout) - waited)


def _wait_for(peers: Iterable[Peer], seconds: float | None = None, *, to_send: bool = False) -> None:
    """Waits for a note of any of the peers, for the end of one, or until a note can be sent. Takes a note of each."""
    poll = select.poll()
    for peer in peers:
        poll.register(peer.socket, select.POLLIN | (select.POLLOUT if to_send else 0))
        poll.register(peer.pidfd, select.POLLIN)
    ready = dict(poll.poll(None if seconds is None else min(seconds, _LONGEST_POLL) * 1000))
    for peer in peers:
        if peer.pidfd in ready:
            peer.end()
        elif peer.socket.fileno() in ready:
            peer.take_note()


def close(peers: Iterable[Peer], pid: int) -> None:
    """Closes the connections. Does nothing in a process that was forked from the process `pid` that opened them."""
    if os.getpid() != pid:
        return
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)
        peer.socket.close()
        os.close(peer.pidfd)
