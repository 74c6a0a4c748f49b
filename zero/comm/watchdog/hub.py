"""What the first rank of a group knows of all ranks, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero.comm import waiting
from zero.comm.oplog import Log
from zero.comm.watchdog.standing import WITHIN_ZERO

Message = dict[str, Any]

Position = tuple[int, int]
"""How far a rank has come: the number of comparisons, and of operations since the last one."""

APART = 10.0
"""Seconds for which ranks stand where they can never meet before all are told. A barrier that is met takes less."""


@dataclass
class State:
    """What a rank has said last of itself.

    heard: when. at: its position. log: its last operations if it stands there, `since` then; None while it moves.
    held: in what it waits there if none of its threads can do anything else (standing.py), and for which ranks of the
    job, `held_since` then. failed: its error, if a transfer failed there. gone: how it has ended, empty if in order;
    None while it runs.
    """

    heard: float
    at: Position = (0, 0)
    log: list[int] | None = None
    since: float = 0.0
    held: tuple[str, list[int]] | None = None
    held_since: float = 0.0
    failed: str | None = None
    gone: str | None = None


class Hub:
    """limit: seconds for which ranks wait for another. ranks: of the job, that the ranks of the group are."""

    def __init__(self, log: Log, limit: float, ranks: Sequence[int]) -> None:
        self._log, self._limit, self._ranks = log, limit, ranks
        self._states: dict[int, State] = {}
        self._new: set[int] = set()  # ranks whose log was not compared since they said where it stands
        self._looked = time.monotonic()
        self._waits_at: Position = (0, 0)  # for which ranks were last told that they wait for others

    def hear(self, rank: int, message: Message) -> None:
        """Takes what a rank says of itself: changes of its State. An empty message says that it runs."""
        now = time.monotonic()
        state = self._states.setdefault(rank, State(now))
        state.heard = now
        if "at" in message:
            state.at, state.log, state.since, state.held = tuple(message["at"]), message["log"], now, None
            self._new.add(rank)
        if "held" in message:
            state.held, state.held_since = message["held"] and tuple(message["held"]), now
        state.failed, state.gone = message.get("failed", state.failed), message.get("gone", state.gone)

    def lose(self, rank: int) -> None:
        """Takes the end of the connection of a rank. One that has said that it ended is no loss."""
        if rank in self._states and self._states[rank].gone is None:
            self._states[rank].gone = "has stopped"

    def verdict(self) -> Message | None:
        """What all ranks are to be told now: which rank is missing ("missing", "how"), why the group is broken
        ("failed", "by" a rank, or all), or once in a while for whom those that have come furthest wait ("behind",
        "at")."""
        now = time.monotonic()
        if now - self._looked > self._limit / 4:  # this process was stopped itself, and has heard nobody meanwhile
            for state in self._states.values():
                state.heard = now
        self._looked = now
        standing = {rank: state for rank, state in self._states.items() if state.log is not None and state.gone is None}
        furthest = max((state.at for state in standing.values()), default=(0, 0))
        long = max((state.at for state in standing.values() if now - state.since > self._limit), default=(0, 0))
        failed, by = None, None
        for rank, state in self._states.items():
            how = state.gone
            if how is None and now - state.heard > self._limit:
                how = f"has not answered for {self._limit:.0f} s: its process was stopped, or is stuck"
            elif how is None and rank in standing and now - state.since > self._limit and state.at < long:
                how = f"has not reached the next operation for {self._limit:.0f} s, in which other ranks wait"
            elif how == "" and state.at < furthest:
                how = "has ended before it reached this operation"
            if how:
                return {"missing": rank, "how": how}
            if state.failed and not failed:
                failed, by = state.failed, rank
        if failed or (failed := self._differing(standing) or self._apart(standing, furthest, now)):
            return {"failed": failed, "by": by}
        return self._behind(standing, furthest, now)

    def _differing(self, standing: dict[int, State]) -> str | None:
        """Compares each log that is new with the longest other one."""
        # Each comparison empties the logs: after different ones they begin at different operations.
        longest: dict[int, list[int]] = {}  # the two longest, by the number of comparisons
        for rank, state in standing.items() if self._new else ():
            two = [*longest.get(state.at[0], []), rank]
            longest[state.at[0]] = sorted(two, key=lambda one: standing[one].at, reverse=True)[:2]
        new, self._new = self._new & standing.keys(), set()
        for rank in new:
            for other in [one for one in longest[standing[rank].at[0]] if one != rank][:1]:
                histories = {one: (standing[one].at[1], standing[one].log or []) for one in (rank, other)}
                channels = self._log.difference(histories)
                if channels:
                    return self._log.channels.differing(dict(sorted(channels.items())))
        return None

    def _apart(self, standing: dict[int, State], furthest: Position, now: float) -> str | None:
        """Says that ranks can never meet: all of them have long stood where they can do nothing else, some in an
        operation of zero that the others have not launched, and these in a barrier of which those are part."""
        if len(standing) < len(self._ranks):
            return None
        if any(state.held is None or now - state.held_since < APART for state in standing.values()):
            return None
        held = {rank: state.held for rank, state in standing.items() if state.held is not None}
        here = sorted(rank for rank, (where, _) in held.items() if where == WITHIN_ZERO)
        there = sorted(held.keys() - {*here})
        if not here or not there or any((standing[rank].at == furthest) != (rank in here) for rank in standing):
            return None
        for rank in there:
            of_barrier = {*held[rank][1]}
            if not of_barrier <= {*self._ranks} or not of_barrier & {self._ranks[one] for one in here}:
                return None
        channel = (standing[here[0]].log or [0])[-1]
        names = [", ".join(map(str, ranks)) for ranks in (here, there)]
        return (
            f"ranks can never meet: rank {names[0]} waits in {self._log.channels.name(channel)} for rank {names[1]}, "
            f"which waits in {held[there[0]][0]}. Evaluation and saving are collective: call them on every rank "
            "before the barrier; zero.full_state_dict(model, to=0) returns weights on rank 0 alone."
        )

    def _behind(self, standing: dict[int, State], furthest: Position, now: float) -> Message | None:
        """Once ranks that have come furthest have stood there for long: who is not there. One whose log moves sends no
        position, and whatever it reaches is compared with the log of those."""
        there = {rank for rank, state in standing.items() if state.at == furthest}
        behind = sorted(rank for rank, state in self._states.items() if state.gone is None and rank not in there)
        long = any(now - standing[rank].since > waiting.PATIENCE for rank in there)
        if not long or not behind or furthest == self._waits_at:
            return None
        self._waits_at = furthest
        return {"behind": behind, "at": furthest}
