"""How the ranks of a process group find out whether they run on one host and may read one another's memory.

They exchange a few hundred bytes each through the group's store, which is collective but uses no process group.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from zero.comm import attach
from zero.comm.peers import Peer, Peers, close
from zero.comm.settings import HostMemory

_TOKEN = 16
"""Bytes by which ranks prove to be who they say."""


def meet(store: dist.Store, rank: int, world: int, timeout: timedelta, *, how: HostMemory) -> tuple[Peers | None, str]:
    """Collective. The peers of this rank; None, on every rank, unless all run on one host and may read all others. And
    a word that is the same on all ranks, and new each time."""
    board = _Board(store, rank, world, timeout)
    try:
        nonce = board.exchange(secrets.token_hex(8).encode())[0].decode()
        return _met(board.exchange, rank, world, timeout.total_seconds(), how), nonce
    finally:
        board.leave()


class _Board:
    """Where each rank leaves a few bytes for the others, in rounds. The last to leave takes all of them away, so that a
    later process group may use the same store."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        self._store, self._rank, self._world, self._timeout = store, rank, world, timeout
        self._rounds = 0

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank."""
        keys = [f"{self._rounds}/{rank}" for rank in range(self._world)]
        self._rounds += 1
        self._store.set(keys[self._rank], data.hex() or "-")
        self._store.wait(keys, self._timeout)
        found = [self._store.get(key).decode() for key in keys]
        return [b"" if text == "-" else bytes.fromhex(text) for text in found]

    def leave(self) -> None:
        with suppress(Exception):  # a store that ended, or that deletes nothing
            if self._store.add("left", 1) == self._world:
                for number in range(self._rounds):
                    for rank in range(self._world):
                        self._store.delete_key(f"{number}/{rank}")
                self._store.delete_key("left")


def _met(
    exchange: Callable[[bytes], list[bytes]], rank: int, world: int, timeout: float, how: HostMemory
) -> Peers | None:
    hosts = exchange(_or_nothing(lambda: b"" if how == "off" else attach.host().encode()))
    if not hosts[0] or len(set(hosts)) > 1:
        return None
    meeting = _Meeting(rank, widen=how == "ptracer")
    try:
        calls = exchange(_or_nothing(meeting.call))
        if all(exchange(_or_nothing(lambda: meeting.visit(calls)))) and all(exchange(_or_nothing(meeting.receive))):
            return Peers([meeting.peers.pop(other, None) for other in range(world)], timeout)
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

    widen: whether to permit other processes to read this one's memory where the system forbids it otherwise.
    peers: those met. What is still in it at the end is closed.
    """

    def __init__(self, rank: int, *, widen: bool) -> None:
        self._widen = widen
        self.peers: dict[int, Peer] = {}
        self._rank = rank
        self._listener: socket.socket | None = None
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN), _TOKEN)
        self._ranks: dict[int, int] = {}  # by process

    def call(self) -> bytes:
        """Where this rank is to be visited, and what is to be read in its memory for a proof that it can be."""
        if self._widen:
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
            self.peers[rank] = Peer(pid, line)
        except BaseException:
            line.close()
            raise

    def end(self) -> None:
        if self._listener is not None:
            self._listener.close()
        close([*self.peers.values()], os.getpid())
