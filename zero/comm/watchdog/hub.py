"""What the first rank of a group knows of all ranks, and how it finds that one of them is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zero.comm import waiting
from zero.comm.oplog import Log

Position = tuple[int, int]
"""How far a rank has come: the number of comparisons, and of operations since the last one."""


@dataclass
class Report:
    """Where a rank is whose log has not moved lately. log: its last operations. since: when it said so."""

    position: Position
    log: list[int]
    since: float

    @property
    def history(self) -> tuple[int, list[int]]:
        return self.position[1], self.log


class Hub:
    """limit: seconds for which ranks wait for another. tell: sends a message to all ranks."""

    def __init__(self, log: Log, limit: float, tell: Callable[[dict[str, Any]], object]) -> None:
        self._log, self._limit, self._tell = log, limit, tell
        self._reports: dict[int, Report] = {}
        # When a rank was last heard of, of those that are connected and have not ended.
        self._heard: dict[int, float] = {}
        self._ended: dict[int, Position] = {}
        self._looked = time.monotonic()
        # The position for which ranks were last told that they wait for others.
        self._waits_at: Position = (0, 0)

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Takes a message of a rank: that its log stands ("at", with its last operations in "log") or moves on
        ("moves"), that it has failed, or that it has ended. An empty one says that it runs."""
        self._heard[rank] = time.monotonic()
        if "moves" in message:
            self._reports.pop(rank, None)
        if "failed" in message:
            self._tell(message)
        if "ended" in message:
            self._end(rank, tuple(message["ended"]), message["how"])
        if "at" in message:
            report = self._reports[rank] = Report(tuple(message["at"]), message["log"], self._heard[rank])
            self._compare(rank, report)
            for ended, position in self._ended.items():
                self._miss_ended(ended, position, report)

    def lost(self, rank: int, how: str = "has stopped") -> None:
        """Takes the end of the connection of a rank."""
        # A rank that has said that it ended is not in it: the end of its connection is no failure.
        if self._heard.pop(rank, None) is not None:
            self._tell({"missing": rank, "how": how})

    def look(self) -> None:
        """Looks for ranks that are silent, or that others have waited for too long."""
        now = time.monotonic()
        if now - self._looked > self._limit / 4:  # this process was stopped itself, and has heard nobody meanwhile
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        for rank, heard in [*self._heard.items()]:
            if now - heard > self._limit:
                self.lost(rank, f"has not answered for {self._limit:.0f} s: its process was stopped, or is stuck")
        waiting = {rank: report for rank, report in self._reports.items() if now - report.since > self._limit}
        furthest = max((report.position for report in waiting.values()), default=(0, 0))
        for rank, report in waiting.items():
            if rank in self._heard and report.position < furthest:
                how = f"has not reached the next operation for {self._limit:.0f} s, in which other ranks wait"
                self.lost(rank, how)
        self._look_for_waiting(now)

    def _look_for_waiting(self, now: float) -> None:
        """Tells the ranks that have come furthest, once they have stood there for long, who is behind. One whose log
        moves sends no position, and is not there yet: whatever it reaches is compared with the log of those."""
        standing = [report.position for report in self._reports.values() if now - report.since > waiting.PATIENCE]
        furthest = max((report.position for report in self._reports.values()), default=(0, 0))
        if furthest not in standing or furthest == self._waits_at:
            return
        there = {rank for rank, report in self._reports.items() if report.position == furthest}
        if behind := sorted(self._heard.keys() - there):
            self._waits_at = furthest
            self._tell({"behind": behind, "at": furthest})

    def _compare(self, rank: int, report: Report) -> None:
        """Compares the log of a rank with the longest one."""
        others = [
            (other, each)
            for other, each in self._reports.items()
            # Each comparison empties the logs: after different ones they begin at different operations.
            if other != rank and each.position[0] == report.position[0]
        ]
        if not others:
            return
        other, longest = max(others, key=lambda item: item[1].position)
        channels = self._log.difference({other: longest.history, rank: report.history})
        if channels:
            self._tell({"failed": self._log.channels.differing(dict(sorted(channels.items())))})

    def _end(self, rank: int, position: Position, how: str | None) -> None:
        if how is not None:
            self.lost(rank, how)
        self._heard.pop(rank, None)
        self._ended[rank] = position
        self._reports.pop(rank, None)
        for report in [*self._reports.values()]:
            self._miss_ended(rank, position, report)

    def _miss_ended(self, rank: int, position: Position, waiting: Report) -> None:
        if position < waiting.position:
            self._tell({"missing": rank, "how": "has ended before it reached this operation"})
