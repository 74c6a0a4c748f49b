"""The rendezvous of a process group's ranks: it finds out whether they share a host and may read one another's memory.

Each rank exchanges a few hundred bytes through the group's store. This is collective, but uses no process group.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack

from zero.comm.forked import Pipe
from zero.comm.host_memory import attach
from zero.comm.host_memory.peers import Peer, Peers
from zero.comm.store import StoreRendezvous

# Bytes of the token by which a rank proves that another rank can read its memory.
_TOKEN = 16


def rendezvous(exchange: StoreRendezvous, how: str) -> Peers | None:
    """Collective. Returns this rank's peers; None, on every rank, unless all ranks run on one host and each may read
    the memory of all others. how: "auto", "off" or "ptracer"."""
    with ExitStack() as entries, ExitStack() as opened:
        meeting = _Meeting(exchange.rank, exchange.world, entries, opened)
        offers = exchange.all_gather(_or_empty(lambda: meeting.offer(how)))
        if not all(offers) or not all(exchange.all_gather(_or_empty(lambda: meeting.connect(offers)))):
            return None
        opened.pop_all()
        return Peers(meeting.peers, exchange.timeout.total_seconds())


def _or_empty(step: Callable[[], bytes]) -> bytes:
    """Returns the result of the step, or no bytes if it raises: the other ranks wait for an answer in any case."""
    try:
        return step()
    except Exception:
        return b""


class _Meeting:
    """Each step returns the bytes to exchange after it. A rank reads notes from pipes that it has made, one for each
    other rank, which opens it through /proc. So only processes that may trace this one can write notes.

    entries: closes the ends by which this process itself could write into its pipes. opened: closes all others.
    """

    def __init__(self, rank: int, world: int, entries: ExitStack, opened: ExitStack) -> None:
        self._rank, self._world, self._entries, self._opened = rank, world, entries, opened
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN), _TOKEN)
        self._inboxes: dict[int, Pipe] = {}
        self.peers: dict[int, Peer] = {}

    def offer(self, how: str) -> bytes:
        """Makes the pipes. Returns the host, this process, the pipes by rank, and a token with its address."""
        if how == "off":
            return b""
        if how == "ptracer":
            attach.permit_siblings()
        pipes = {}
        for rank in {*range(self._world)} - {self._rank}:
            inbox, entry = os.pipe()
            self._inboxes[rank] = self._opened.enter_context(Pipe(inbox, "rb"))
            pipes[rank] = self._entries.enter_context(Pipe(entry, "wb")).fileno()
        token = self._token.raw.hex()
        return json.dumps([attach.host(), os.getpid(), pipes, token, ctypes.addressof(self._token)]).encode()

    def connect(self, offers: list[bytes]) -> bytes:
        """Reads the token in every rank's memory, and opens the pipes to the other ranks."""
        for rank, (host, pid, pipes, token, address) in enumerate(map(json.loads, offers)):
            if host != attach.host():
                raise OSError(f"rank {rank} is on another host")
            read = ctypes.create_string_buffer(_TOKEN)
            attach.read(pid, address, ctypes.addressof(read), _TOKEN)
            if read.raw.hex() != token:
                raise OSError(f"process {pid} is not rank {rank}")
            if rank != self._rank:
                outbox = os.open(f"/proc/{pid}/fd/{pipes[str(self._rank)]}", os.O_WRONLY | os.O_NONBLOCK)
                self.peers[rank] = Peer(pid, self._inboxes[rank], self._opened.enter_context(Pipe(outbox, "wb")))
        return b"connected"
