"""The rendezvous of a process group's ranks: it finds out whether they share a host and may read one another's memory.

Each rank exchanges a few hundred bytes through the group's store. This is collective, but uses no process group.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable

from zero.comm.host_memory import attach
from zero.comm.host_memory.peers import Peer, Peers, close
from zero.comm.store import StoreRendezvous

# Bytes of the token by which a rank proves that another rank can read its memory.
_TOKEN = 16


def rendezvous(exchange: StoreRendezvous, how: str) -> Peers | None:
    """Collective. Returns this rank's peers; None, on every rank, unless all ranks run on one host and each may read
    the memory of all others. how: "auto", "off" or "ptracer"."""
    handshake = _Handshake(exchange.rank)
    try:
        offers = exchange.all_gather(_or_empty(lambda: handshake.listen(how)))
        if not all(offers) or len({json.loads(offer)[0] for offer in offers}) > 1:
            return None
        for step in (lambda: handshake.connect(offers), handshake.accept):
            if not all(exchange.all_gather(_or_empty(step))):
                return None
        peers, handshake.peers = handshake.peers, {}
        return Peers(peers, exchange.timeout.total_seconds())
    finally:
        handshake.close()


def _or_empty(step: Callable[[], bytes]) -> bytes:
    """Returns the result of the step, or no bytes if it raises: the other ranks wait for an answer in any case."""
    try:
        return step()
    except Exception:
        return b""


class _Handshake:
    """Connects this rank to each other rank by a socket. Each step returns the bytes to exchange before the next step.

    peers: the connected ranks; `close` closes those still in it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.peers: dict[int, Peer] = {}
        self._listener: socket.socket | None = None
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN), _TOKEN)
        self._ranks: dict[int, int] = {}  # by process id

    def listen(self, how: str) -> bytes:
        """Opens a listening socket. Returns the host, this process, the socket's name, and a token with its address in
        this rank's memory."""
        if how == "off":
            return b""
        if how == "ptracer":
            attach.permit_siblings()
        name = secrets.token_hex(_TOKEN)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(0)  # `accept` follows after all ranks have connected
        self._listener.bind(f"\0{name}")  # an abstract name, without a file
        self._listener.listen(socket.SOMAXCONN)
        token = self._token.raw.hex()
        return json.dumps([attach.host(), os.getpid(), name, token, ctypes.addressof(self._token)]).encode()

    def connect(self, offers: list[bytes]) -> bytes:
        """Reads the token in every rank's memory, and connects to the ranks before this one."""
        for rank, (_, pid, name, token, address) in enumerate(map(json.loads, offers)):
            read = ctypes.create_string_buffer(_TOKEN)
            attach.read(pid, address, ctypes.addressof(read), _TOKEN)
            if read.raw.hex() != token or pid in self._ranks:
                raise OSError(f"process {pid} is not rank {rank}, or holds several ranks")
            self._ranks[pid] = rank
            if rank < self._rank:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.peers[rank] = Peer(pid, connection)
                connection.connect(f"\0{name}")
                connection.setblocking(False)
        return b"connected"

    def accept(self) -> bytes:
        """Accepts the connections of the ranks after this one."""
        assert self._listener is not None
        while len(self.peers) < len(self._ranks) - 1:
            connection, _ = self._listener.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, _, _ = struct.unpack("3i", credentials)
            rank = self._ranks.get(pid)
            if rank is None or rank in self.peers:
                connection.close()  # not a rank of this group
            else:
                connection.setblocking(False)
                self.peers[rank] = Peer(pid, connection)
        return b"accepted"

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        close(self.peers.values(), os.getpid())
