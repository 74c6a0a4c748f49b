"""The watchdog of a rank that waits long: it writes the rank's log into the group's store, and reads the other ranks'.

Ranks that are out of step in a settled schedule may wait for one another for ever: they wait in different operations,
or one of them never starts the operation. So a rank that waits writes its log since the last comparison into the store,
and compares it with the log of the group's first rank. A rank that finds a difference, or has failed, also writes the
error into the store, and all others raise it.

If the store does not answer, because its host cannot be reached, the watchdog does not ask it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar
from weakref import proxy

import torch.distributed as dist

from zero.comm import link
from zero.comm.order import Order

_FAILURE = "failure"

_TIMEOUT, _TIMEOUT_A_RANK = 1.0, 0.01
"""Seconds to wait for an answer of the store, and seconds to add for each rank of the group."""

_Answer = TypeVar("_Answer")
_Report = tuple[int, tuple[int, list[int]]]
"""The number of comparisons of a rank, and its history since the last one (Order.history)."""


class Watchdog:
    """The watchdog of one rank. store: used by the watchdogs of this group only."""

    def __init__(self, order: Order, store: dist.Store, rank: int, world: int) -> None:
        # A weak reference, because the order refers to this: the garbage collector would drop a cycle, and Gloo groups
        # of torch that are dropped from within it may deadlock.
        self._order: Order = proxy(order)
        self._store, self._rank, self._world = store, rank, world
        self._answers = True
        order.while_waiting.append(self.check)
        order.at_failure.append(self._write_failure)
        order.absent = self._absent

    def check(self) -> None:
        """Compares logs while this rank waits. Raises RuntimeError if a rank has failed or ranks are out of step."""
        report = json.dumps([self._order.comparisons, *self._order.history])
        failure, first = self._ask(lambda: self._exchange(report)) or (None, None)
        if failure is not None:
            self._order.mark_broken(failure)
            raise RuntimeError(failure)
        if first is not None and first[0] == self._order.comparisons:
            difference = self._order.difference({0: first[1], self._rank: self._order.history})
            if difference:
                self._order.out_of_step(difference)

    def _exchange(self, report: str) -> tuple[str | None, _Report | None]:
        """Writes the report of this rank. Returns the error of any rank, and the report of the first rank."""
        self._store.set(f"waits/{self._rank}", report)
        failure = self._store.get(_FAILURE).decode() if self._store.check([_FAILURE]) else None
        return failure, self._report(0) if self._rank else None

    def _ask(self, request: Callable[[], _Answer]) -> _Answer | None:
        """Calls the request in a thread, because a store on a host that cannot be reached would block this one."""
        answers: list[_Answer] = []

        def run() -> None:
            with suppress(Exception):  # the store may have ended with its process
                answers.append(request())

        if self._answers:
            thread = Thread(target=run, daemon=True)
            thread.start()
            thread.join(_TIMEOUT + _TIMEOUT_A_RANK * self._world)
            self._answers = not thread.is_alive()
        return answers[0] if answers else None

    def _report(self, rank: int) -> _Report | None:
        """Returns the last report of a rank; None if it has written none."""
        key = f"waits/{rank}"
        if not self._store.check([key]):
            return None
        comparisons, length, tail = json.loads(self._store.get(key))
        return comparisons, (length, tail)

    def _write_failure(self, reason: str) -> None:
        self._ask(lambda: self._store.compare_set(_FAILURE, "", reason))  # unless another rank has written one

    def _absent(self) -> str:
        """Returns which ranks have not reported that they wait since the last comparison, in words for the user."""
        comparisons, others = self._order.comparisons, [rank for rank in range(self._world) if rank != self._rank]
        reports = self._ask(lambda: {rank: self._report(rank) for rank in others}) or {}
        absent = [str(rank) for rank, report in reports.items() if report is None or report[0] < comparisons]
        return f" (no report from rank {', '.join(absent)})" if absent else ""


link.watchers.append(Watchdog)
