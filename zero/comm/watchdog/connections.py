"""The connections of one group's watchdogs: each rank has one to the first rank. A message is a line of JSON."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from zero.comm.forked import held

Message = dict[str, Any]

# How long a rank tries to reach the first one. Without it, the rank is not watched.
_SECONDS = 10.0

# Bytes of a message, at most.
_LONGEST = 1 << 20


def listen() -> socket.socket:
    """Returns a socket that listens on all addresses of this host, on a free port."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)


class Connections:
    """nonce: a name that all ranks know, so that nobody else is listened to. hear: called with the rank and its
    message. lost: called with the rank when its connection ends. keep: seconds after which a host that does not answer
    counts as lost. All methods run in the loop."""

    def __init__(
        self, rank: int, nonce: str, hear: Callable[[int, Message], object], lost: Callable[[int], object], keep: float
    ) -> None:
        self._rank, self._nonce, self._hear, self._lost, self._keep = rank, nonce, hear, lost, keep
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self._unsent: list[Message] = []
        self._closed = False

    async def serve(self, listening: socket.socket) -> None:
        """Accepts the other ranks: on the first rank."""
        self._server = await asyncio.start_server(self._accept, sock=listening, limit=_LONGEST)
        self._listening = listening
        held.add(listening)

    async def connect(self, host: str, port: int) -> None:
        """Connects with the first rank, and reads what it says until the connection ends: on the other ranks."""
        with suppress(OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            opening = asyncio.open_connection(host, port, limit=_LONGEST)
            reader, writer = await asyncio.wait_for(opening, _SECONDS)
            try:
                writer.write(f"{self._nonce} {self._rank}\n".encode())
                answer = await asyncio.wait_for(reader.readline(), _SECONDS)
                if answer.decode().strip() == self._nonce:
                    await self._follow(0, reader, writer)
            finally:
                writer.close()

    def send(self, message: Message) -> None:
        """Sends a message to the first rank, or from it to all others that are connected."""
        if not self._writers and self._rank:
            self._unsent.append(message)
        line = json.dumps(message).encode() + b"\n"
        for writer in self._writers.values():
            writer.write(line)

    async def drain(self) -> None:
        """Waits until the messages have been given to the system."""
        for writer in [*self._writers.values()]:
            with suppress(OSError):
                await writer.drain()

    def close(self) -> None:
        """Ends the connections. Nobody counts as lost then."""
        self._closed = True
        if self._server is not None:
            held.discard(self._listening)
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, asyncio.TimeoutError):
            nonce, _, rank = (await asyncio.wait_for(reader.readline(), _SECONDS)).decode().strip().partition(" ")
            if nonce == self._nonce:
                writer.write(nonce.encode() + b"\n")
                await self._follow(int(rank), reader, writer)
        writer.close()

    async def _follow(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        held.add(connection)
        _keep_alive(connection, self._keep)
        self._writers[rank] = writer
        # `Hub.lost` tells only of ranks that it has heard, and a busy rank says nothing for up to 30 s.
        self._hear(rank, {})
        for message in self._unsent:
            self.send(message)
        self._unsent.clear()
        try:
            async for line in reader:
                self._hear(rank, json.loads(line))
        except (OSError, ValueError):  # a reset connection, or a line that ends within a message
            pass
        finally:
            del self._writers[rank]
            held.discard(connection)
        if not self._closed:
            self._lost(rank)


def _keep_alive(connection: Any, seconds: float) -> None:
    """Has the system end a connection about so long after the other host stopped to answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Half of the time in silence, then four probes an eighth apart: together `seconds`.
    for name, value in {"TCP_KEEPIDLE": seconds / 2, "TCP_KEEPINTVL": seconds / 8, "TCP_KEEPCNT": 4}.items():
        if hasattr(socket, name):  # other systems have other names, and defaults of their own
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, round(value)))
