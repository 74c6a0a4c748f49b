"""The watchdog of one rank of a group."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from weakref import finalize, ref

from zero.comm.oplog import Log
from zero.comm.store import StoreRendezvous, address_towards
from zero.comm.watchdog import loop
from zero.comm.watchdog.connections import Connections, Message, listen
from zero.comm.watchdog.hub import Hub, Position

# Seconds between two looks at the log of this rank.
_TICK = 0.2

# Seconds after which a rank that has nothing to say says that it lives, at most.
_BEAT = 30.0

# Reports that the hub is to read in a second, at most: ranks of large groups report later that their log stands.
_REPORTS = 400

# Seconds for which a rank that fails tries to tell the others, and waits for their word on who is missing.
_SAYS = 1.0


class Progress:
    """Whether the log of this rank moves. stands: seconds without an operation after which it does not."""

    def __init__(self, log: Log, stands: float) -> None:
        self._log, self._stands = log, stands
        self._at: Position = (0, 0)
        self._since, self._is_reported = time.monotonic(), False

    def news(self, now: float) -> Message | None:
        """What the hub is to hear, if anything: where the log stands, or that it moves again."""
        position = self._log.position
        if position != self._at:
            self._at, self._since = position, now
            if self._is_reported:
                self._is_reported = False
                return {"moves": True}
        elif now - self._since >= self._stands and not self._is_reported:
            log = self._log.history[1]
            if self._log.position == position:  # it did not move while it was read
                self._is_reported = True
                return {"at": position, "log": log}
        return None


class Watchdog:
    """Collective. Watches a group as long as `user` lives, which holds its log, or as this process does.

    timeout: how long ranks wait for one another. Who is missing is found a little sooner, since NCCL then ends the
        process.
    """

    def __init__(self, user: object, log: Log, exchange: StoreRendezvous, timeout: timedelta) -> None:
        self._log, self._rank, self._world = log, exchange.rank, exchange.world
        limit = timeout.total_seconds() - min(10.0, timeout.total_seconds() / 10)
        self._limit, self._said = limit, time.monotonic()
        self._progress = Progress(log, max(2 * _TICK, exchange.world / _REPORTS))
        # When the hub was last heard of; None before this rank is connected.
        self._heard: float | None = None
        self._hub_ended: Position | None = None
        self._learned, self._word, self._process = False, Event(), os.getpid()
        self._hub = None if self._rank else Hub(self._log, limit, self._tell)
        hear, lost = (self._learn_from, self._lose_hub) if self._hub is None else (self._hub.hear, self._hub.lost)
        self._connections = Connections(self._rank, exchange.nonce, hear, lost, limit)
        listening = None if self._rank else listen()
        own = [] if listening is None else [address_towards(exchange.host)[0], listening.getsockname()[1]]
        host, port = json.loads(exchange.all_gather(json.dumps(own).encode())[0])
        self._log.failure.at_failure.insert(0, self._fail)  # before transfers are aborted, which may take long
        self._log.failure.inquire = self._inquire
        self._working = loop.run(self._work(listening, host or exchange.host, port))
        finalize(user, self._end, ref(user))

    # --------------------------------------------------------------------------------------- in other threads

    def _fail(self, reason: str) -> None:
        """Tells the other ranks that this one has failed."""
        # What this rank was told the others know; and a forked process speaks for no rank.
        if not self._learned and self._process == os.getpid():
            self._wait_until_said({"failed": reason})
        self._word.set()

    def _inquire(self) -> None:
        """Waits a moment for the word on who is missing, after a transfer has failed."""
        self._word.wait(_SAYS / 2)

    def _end(self, user: ref[object]) -> None:
        """Says that this rank uses the group no more: it has dropped the group, or its process ends."""
        if self._process != os.getpid():
            return
        # Where the user is gone, an error that nobody caught was another one, as in an earlier cell of a notebook.
        error: BaseException | None = getattr(sys, "last_value", None) if user() is not None else None
        how = None if error is None else f"has ended with {type(error).__name__}: {str(error)[:500]}"
        self._wait_until_said({"ended": self._log.position, "how": how}, last=True)
        self._log.failure.at_failure.remove(self._fail)  # the log and this refer to each other
        self._log.failure.inquire = lambda: None

    def _wait_until_said(self, message: Message, *, last: bool = False) -> None:
        said = loop.run(self._say_now(message, last))
        # A finalizer may run in the loop's thread, where a wait would hold up what it waits for.
        if not loop.is_here():
            with suppress(Exception):
                said.result(_SAYS)

    # --------------------------------------------------------------------------------------------- in the loop

    async def _work(self, listening: socket.socket | None, host: str, port: int) -> None:
        if listening is not None:
            await self._connections.serve(listening)
        connecting = None if listening else asyncio.ensure_future(self._connections.connect(host, port))
        try:
            while True:
                await asyncio.sleep(_TICK)
                self._look()
        finally:
            if connecting is not None:
                connecting.cancel()

    async def _say_now(self, message: Message, last: bool) -> None:
        self._say(message)
        # The first rank's hub alone has heard it: others would take the end of its connection for its failure.
        if last and self._hub is not None:
            self._connections.send(message)
        await self._connections.drain()
        if last:
            self._working.cancel()
            self._connections.close()

    def _say(self, message: Message) -> None:
        """Says something to the hub."""
        self._said = time.monotonic()
        if self._hub is None:
            self._connections.send(message)
        else:
            self._hub.hear(0, message)

    def _tell(self, message: Message) -> None:
        """Tells all ranks what the hub has found."""
        self._connections.send(message)
        self._learn_from(0, message)

    def _learn_from(self, hub: int, message: Message) -> None:
        self._heard = time.monotonic()
        if "ended" in message:
            self._hub_ended = tuple(message["ended"])
        elif "failed" in message:
            self._learn(message["failed"])
        elif "missing" in message:
            self._learn(self._log.missing(message["missing"], message["how"]))
        elif "behind" in message:
            here = tuple(message["at"]) == self._log.position
            if here and self._rank not in message["behind"]:  # else it has come there since
                self._log.waits_for(message["behind"])

    def _lose_hub(self, hub: int) -> None:
        if self._hub_ended is None:
            self._learn(self._log.missing(0, "has stopped"))

    def _learn(self, reason: str) -> None:
        if not self._learned:
            self._learned = True
            # In a thread, because transfers on the device are aborted there, which may take long.
            Thread(target=self._log.failure.mark_broken, args=(reason,), daemon=True).start()

    def _look(self) -> None:
        """Reports where this rank is, if its log has not moved for a while; and looks who is missing."""
        now = time.monotonic()
        if news := self._progress.news(now):
            self._say(news)
        if now - self._said > min(self._limit / 4, _BEAT):
            self._say({})
            if self._hub is not None:
                self._connections.send({})
        if self._hub is not None:
            self._hub.look()
        elif self._hub_ended is not None and self._hub_ended < self._log.position:
            self._learn(self._log.missing(0, "has ended before it reached this operation"))
        elif self._heard is not None and now - self._heard > self._limit:
            self._learn(self._log.missing(0, f"has not answered for {self._limit:.0f} s"))
