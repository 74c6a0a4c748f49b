"""The connections between the ranks of a process group on one host, which may read one another's memory.

Each rank has a pipe from each other rank, over which these send two kinds of notes, of 16 bytes:

    operation   the channel of the sender's next operation, and the address of the data that the other ranks read
    done        the sender has read all its data of the oldest operation for which it has not sent this note yet

Tensors do not go through the pipes: `attach.read` copies their values from the memory of the other rank.
"""

from __future__ import annotations

import select
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from weakref import finalize

from torch import Tensor

from zero.comm import waiting
from zero.comm.forked import Pipe
from zero.comm.host_memory import attach

# The number of a `done` note, in place of a channel.
_DONE = -1

_NOTE = struct.Struct("=qQ")

# Seconds of one call of poll(2), which accepts no more than some weeks.
_LONGEST_POLL = 3600


class Peer:
    """Another rank: its process, the pipe from it (`inbox`), and that to it (`outbox`). Notes that are not used yet:
    `notes` about operations (channel and address), and the number of `done` notes. `closed`: whether the rank has ended
    or closed its pipes."""

    def __init__(self, pid: int, inbox: Pipe, outbox: Pipe) -> None:
        self.pid, self.inbox, self.outbox = pid, inbox, outbox
        self.notes: deque[tuple[int, int]] = deque()
        self.done = 0
        self.closed = False

    def has(self, needed: Callable[[Peer], bool]) -> bool:
        """Takes notes until there is what is needed. Returns False if there is not yet, or the rank has ended."""
        while not needed(self):
            # Another thread that marks a failure closes the pipes: `read` would raise ValueError.
            data = b"" if self.inbox.closed else self.inbox.read(_NOTE.size)
            if not data:
                # b"" is the end of the pipe; None only says that no note has come yet.
                self.closed = data is not None
                return False
            # Never a part of a note: a pipe takes up to PIPE_BUF bytes, at least 512, as a whole or not at all.
            number, address = _NOTE.unpack(data)
            if number == _DONE:
                self.done += 1
            else:
                self.notes.append((number, address))
        return True

    def send(self, note: bytes) -> None:
        """Sends a note. Blocks only if the peer has thousands of unread notes; it may then be blocked in a send itself.

        Does nothing if the peer has ended: this rank raises when it next waits for a note of the peer.
        """
        try:  # not `suppress`, which takes a third as long as the write
            while self.outbox.write(note) is None:
                _poll([self], to_send=True)
                # Empties the inbox: the peer may wait for room in it, and then reads nothing of this rank's.
                self.has(lambda peer: False)
        except BrokenPipeError:
            return


class Peers:
    """The connections of one rank to all other ranks of its process group, by rank. timeout: seconds to wait for a note
    of a rank before OSError is raised. close: closes all pipes.

    `waits_for`: called once in a wait that takes long, with the ranks that are waited for and the channel of the
        operation.
    """

    def __init__(self, peers: Mapping[int, Peer], timeout: float, close: Callable[[], object]) -> None:
        self._peers, self._timeout = peers, timeout
        self.waits_for: Callable[[list[int], int], object] = lambda missing, channel: None
        self._channel = _DONE
        self.close = finalize(self, close)

    def announce(self, number: int, address: int = 0) -> None:
        """Sends all ranks the channel of this rank's operation, and the address of its data.

        The data must not change until `finish` has returned for this operation.
        """
        note = _NOTE.pack(number, address)
        for peer in self._peers.values():
            peer.send(note)

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

    def finish(self) -> None:
        """Tells all ranks that this rank has read its data, and waits until all others have."""
        self.announce(_DONE)
        self._wait(lambda peer: peer.done > 0)
        for peer in self._peers.values():
            peer.done -= 1

    def _wait(self, needed: Callable[[Peer], bool]) -> None:
        """Raises OSError if a peer that is waited for has ended, or if one sends nothing in time."""
        if all(peer.has(needed) for peer in self._peers.values()):
            return
        begun, patience = time.monotonic(), waiting.PATIENCE
        while missing := {rank: peer for rank, peer in self._peers.items() if not peer.has(needed)}:
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
            _poll(missing.values(), min(patience, self._timeout) - waited)


def _poll(peers: Collection[Peer], seconds: float = _LONGEST_POLL, *, to_send: bool = False) -> None:
    """Waits for a note of any of the peers, for the end of one, or until a note can be sent."""
    poll = select.poll()
    for peer in peers:
        try:
            poll.register(peer.inbox, select.POLLIN)
            if to_send:
                poll.register(peer.outbox, select.POLLOUT)
        except ValueError:  # another thread, which marks a failure, has just closed it
            return
    poll.poll(min(seconds, _LONGEST_POLL) * 1000)
