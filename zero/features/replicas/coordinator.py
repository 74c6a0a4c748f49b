"""The coordinator: the one process that knows which replicas live, and decides what becomes of a round.

Every rank of every replica has a connection to it. The system closes the connection when the rank's process ends, so
the coordinator knows at once; then the whole replica counts as lost. A rank that is stopped is lost by `timeout`.

A message is a line of JSON.

    from a rank             {"enter": id of the replica, "name", "rank", "size"}; once
                            {"ready": kind of round, "step": number}
                            {"done": round} or {"failed": round, "why": text}
    from the coordinator    {"go": round, "generation", "members": names, "index", "joining": indices, "port",
                             "timeout"}
                            {"commit": round, "waiting": whether a replica waits to join} or {"abort": round}
                            {"error": text}
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

_ABORTS = 3
"""Rounds that may be aborted one after another although nobody was lost."""


@dataclass(eq=False)
class Replica:
    """ranks: their connections. ready: the kind of round and the step for which a rank waits."""

    name: str
    size: int
    ranks: dict[int, asyncio.StreamWriter] = field(default_factory=dict)
    ready: dict[int, tuple[str, int]] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return len(self.ready) == self.size

    def send(self, message: Message) -> None:
        line = json.dumps(message).encode() + b"\n"
        for writer in self.ranks.values():
            writer.write(line)


class Coordinator:
    """start: number of replicas that the first round waits for. timeout: seconds for which ranks wait for one another.
    port: of the TCPStore by which process groups are made.

    `over`: set when no replica is left that has the training state, or when those that live cannot go on.
    """

    def __init__(self, start: int, timeout: float, port: int) -> None:
        self.over = asyncio.Event()
        self._start_with, self._timeout, self._port = start, timeout, port
        self._replicas: dict[str, Replica] = {}
        """All that are connected, by id."""
        self._gone: set[str] = set()
        """The ids of those that are lost, of which ranks may still come."""
        self._members: list[Replica] = []
        """Those that have the training state, the oldest first."""
        self._group: list[Replica] = []
        """Those that took part in the last round that was committed, or take part in the running one."""
        self._generation = self._round = self._phase = self._aborts = 0
        """`_phase`: counts changes between rounds that run and the time between them."""
        self._running = False
        self._involved: set[Replica] = set()
        """Those for which the running round has work."""
        self._done: set[tuple[Replica, int]] = set()

    # --------------------------------------------------------------------------------------------- connections

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Follows the connection of one rank."""
        replica, rank = None, 0
        try:
            with suppress(OSError, ValueError):  # a reset connection, or a line that ends within a message
                entry = json.loads(await reader.readline())
                rank = entry["rank"]
                replica = self._enter(entry, writer)
                async for line in reader:
                    self._hear(replica, rank, json.loads(line))
        except asyncio.CancelledError:  # it is the coordinator that ends
            replica = None
            raise
        finally:
            writer.close()
            if replica is not None:
                self._lose(replica, f"rank {rank} has ended")

    def _enter(self, entry: Message, writer: asyncio.StreamWriter) -> Replica:
        key = entry["enter"]
        replica = self._replicas.setdefault(key, Replica(entry["name"], entry["size"]))
        replica.ranks[entry["rank"]] = writer
        others = self._members or [*self._replicas.values()]
        if others[0].size != replica.size:
            sizes = f"it has {replica.size} ranks, and replica {others[0].name} has {others[0].size}"
            self._lose(replica, sizes, "Start all replicas with the same number of ranks.")
        elif key in self._gone:
            self._lose(replica, "another rank of it has ended")
        return replica

    def _hear(self, replica: Replica, rank: int, message: Message) -> None:
        if "ready" in message:
            replica.ready[rank] = (message["ready"], message["step"])
            self._advance()
        elif self._running and message.get("done") == self._round:
            if replica in self._involved and not any(one in self._involved for one, _ in self._done):
                self._expect()
            self._done.add((replica, rank))
            if all((one, rank) in self._done for one in self._group for rank in range(one.size)):
                self._commit()
        elif self._running and message.get("failed") == self._round:
            self._aborts += 1
            self._abort()
            if self._aborts == _ABORTS:
                self._end(f"{_ABORTS} rounds failed although no replica was lost. The last error: {message['why']}")

    def _lose(self, replica: Replica, why: str, remedy: str | None = None) -> None:
        """Goes on without a replica. The ranks of it that live are told."""
        known = [key for key, one in self._replicas.items() if one is replica]
        if not known:
            return
        del self._replicas[known[0]]
        self._gone.add(known[0])
        was_member = replica in self._members
        self._members = [one for one in self._members if one is not replica]
        _say(f"replica {replica.name} is gone: {why}; {len(self._members)} train")
        over = was_member and not self._members
        remedy = remedy or (_ALL_LOST if over else _LOST)
        replica.send({"error": f"replica {replica.name} cannot go on: {why}. {remedy}"})
        for writer in replica.ranks.values():
            writer.close()
        self._aborts = 0
        if self._running and replica in self._group:
            self._abort(without=replica)
        if over:
            self._end(_ALL_LOST)
        else:
            self._advance()

    # --------------------------------------------------------------------------------------------- rounds

    def _advance(self) -> None:
        """Begins a round if all are ready for one."""
        if self._running or self.over.is_set():
            return
        joiners = [one for one in self._replicas.values() if one not in self._members and one.is_ready]
        if not self._members:
            if len(joiners) >= self._start_with:
                self._begin(sorted(joiners, key=lambda one: one.name), joiners=1)
            return
        waiting = {of_rank for one in self._members for of_rank in one.ready.values()}
        if len(waiting) > 1:
            shown = " and in ".join(f"{kind} at step {step}" for kind, step in sorted(waiting))
            self._end(f"replicas are out of step: they are in {shown}. All must run as many backwards a step.")
        elif all(one.is_ready for one in self._members):
            joins = [kind for kind, _ in waiting] == ["join"]
            self._begin([*self._members, *(joiners if joins else [])], joiners=len(self._members))
        elif waiting and not self._involved:
            self._involved = {*self._members}
            self._expect()

    def _begin(self, group: list[Replica], joiners: int) -> None:
        """Begins a round. joiners: the index of the first one that receives the state."""
        if group != self._group:
            self._group, self._generation = group, self._generation + 1
        self._running, self._done = True, set()
        self._round, self._phase = self._round + 1, self._phase + 1
        joining = [*range(joiners, len(group))]
        self._involved = {group[0], *group[joiners:]} if joining else {*group}
        shared = {"members": [one.name for one in group], "joining": joining, "generation": self._generation}
        shared |= {"port": self._port, "timeout": self._timeout}
        for index, replica in enumerate(group):
            replica.ready.clear()
            replica.send({"go": self._round, "index": index, **shared})

    def _commit(self) -> None:
        new = [one.name for one in self._group if one not in self._members]
        self._members = [*self._group]
        self._finish()
        self._aborts = 0
        if new:
            _say(f"{', '.join(new)} joined; {len(self._members)} replicas train")
        joining = any(one.is_ready for one in self._replicas.values() if one not in self._members)
        for replica in self._members:
            replica.send({"commit": self._round, "waiting": joining})

    def _abort(self, without: Replica | None = None) -> None:
        """Ends the round. Those that took part get ready again; their process groups are of no use any more."""
        for replica in self._group:
            if replica is not without:
                replica.send({"abort": self._round})
        self._group = []
        self._finish()

    def _finish(self) -> None:
        self._running, self._involved, self._phase = False, set(), self._phase + 1

    def _end(self, text: str) -> None:
        """Tells all that are connected that nobody goes on."""
        for replica in self._replicas.values():
            replica.send({"error": text})
        self.over.set()

    # --------------------------------------------------------------------------------------------- time

    def _expect(self) -> None:
        """Gives the other ranks as long as `timeout` to come where the first one is."""
        asyncio.get_running_loop().call_later(self._timeout, self._expire, self._phase)

    def _expire(self, phase: int) -> None:
        if phase == self._phase and not self.over.is_set():
            for replica in self._late():
                self._lose(replica, f"it has not come where others wait for {self._timeout:.0f} s")

    def _late(self) -> Iterable[Replica]:
        if self._running:
            return [one for one in self._group if any((one, rank) not in self._done for rank in range(one.size))]
        return [one for one in self._members if not one.is_ready]


_LOST = "The others go on without it. Start it again, and it joins them."
_ALL_LOST = (
    "No replica is left that has all shards of the training state. Start the coordinator and the replicas again, from "
    "the last checkpoint."
)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
