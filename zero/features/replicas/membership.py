"""A rank's side of the coordinator (coordinator.py): rounds, which all ranks of all replicas do together or repeat."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar
from weakref import WeakSet, finalize

from zero.comm.store_group import StoreGroup

Message = dict[str, Any]
Result = TypeVar("Result")

_CONNECTS = 60.0
"""Seconds in which the coordinator must accept the connection."""


class Round:
    """A round that was begun. group: the ranks of this number in all replicas; None if there is one replica.

    members: the names of the replicas. index: this one's place among them. joining: indices of those that receive the
    state, from the replica with index 0.
    """

    def __init__(self, message: Message, group: StoreGroup | None) -> None:
        self.group, self.members, self.index = group, message["members"], message["index"]
        self.joining: list[int] = message["joining"]


class Membership:
    """The connection of one rank. key: of this replica, the same on its ranks, and no other replica's.

    `members`, `index`: of the last round. `waiting`: whether a replica waits to join.
    """

    def __init__(self, address: str, key: str, name: str, rank: int, size: int) -> None:
        self.members: list[str] = []
        self.index, self.waiting = 0, False
        self._address, self._rank = address, rank
        self._host, _, port = address.rpartition(":")
        self._generation: int | None = None
        self._group: StoreGroup | None = None
        try:
            self._socket = socket.create_connection((self._host, int(port)), timeout=_CONNECTS)
        except OSError as error:
            raise RuntimeError(f"no coordinator of replicas answers at {address} ({error}). {_START}") from error
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _sockets.add(self._socket)
        self._lines = self._socket.makefile("rb")
        finalize(self, _close, self._socket, self._lines)
        self._send({"enter": key, "name": name, "rank": rank, "size": size})

    def run(self, kind: str, step: int, work: Callable[[Round], Result]) -> Result:
        """Collective over all replicas. Returns what `work` does in a round in which it succeeds on all ranks; it is
        repeated as long as replicas are lost meanwhile.

        kind, step: what this rank does; the same on all but those that join. Raises RuntimeError if this replica cannot
        go on.
        """
        while True:
            self._send({"ready": kind, "step": step})
            begun = self._receive()
            answer: Message = {"done": begun["go"]}
            try:
                this = Round(begun, self._group_of(begun))
                result = work(this)
            except RuntimeError as error:  # of a transfer: its other end is gone
                self._drop_group()
                answer = {"failed": begun["go"], "why": f"{error}"[:500]}
            self._send(answer)
            verdict = self._receive()
            if "commit" in verdict:
                self.members, self.index, self.waiting = this.members, this.index, verdict["waiting"]
                return result
            self._drop_group()

    def _group_of(self, begun: Message) -> StoreGroup | None:
        """Returns the process group of a generation, which is made when the first round of it begins."""
        if begun["generation"] != self._generation:
            self._drop_group()
            world, name = len(begun["members"]), f"{begun['generation']}/{self._rank}"
            if world > 1:
                self._group = StoreGroup(
                    self._host, begun["port"], name, begun["index"], world, timeout=begun["timeout"]
                )
            self._generation = begun["generation"]
        return self._group

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._generation = self._group = None

    def _send(self, message: Message) -> None:
        with suppress(OSError):  # what the coordinator said last can still be read
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> Message:
        line = b""
        with suppress(OSError):
            line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise RuntimeError(
                f"the coordinator of replicas at {self._address} has ended, so replicas cannot agree any more. Start "
                "it and the replicas again, from the last checkpoint."
            )
        message: Message = json.loads(line)
        if "error" in message:
            raise RuntimeError(message["error"])
        return message


_START = "Start it first: python -m zero.features.replicas --port PORT --replicas NUMBER."

_sockets: WeakSet[socket.socket] = WeakSet()


def _close(connection: socket.socket, lines: BinaryIO) -> None:
    lines.close()
    connection.close()


def _forget() -> None:
    """Closes the connections in a forked process, such as a worker of a DataLoader: while it holds them open, the
    coordinator does not notice the end of the process that it was forked from."""
    for one in _sockets:
        os.close(one.detach())


os.register_at_fork(after_in_child=_forget)
