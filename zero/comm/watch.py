"""What a rank does while it waits long: it says in the group's store what for, and reads what others say.

Ranks that are out of step in a settled schedule may wait for one another for ever: each operation is another one's, or
comes never. A rank that waits writes its log since the last comparison into the store, and compares it with that of the
group's first rank. Whoever finds a difference, or has failed, writes that too, for all others to raise it.

Where the store does not answer, because its host cannot be reached, nothing more is asked of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar
from weakref import proxy

import torch.distributed as dist

from zero.comm.order import Order

_FAILURE = "failure"

_PATIENCE, _PATIENCE_A_RANK = 1.0, 0.01
"""Seconds in which a store answers, and more for each rank that it may be asked about."""

_Answer = TypeVar("_Answer")
_Waiting = tuple[int, tuple[int, list[int]]]
"""How often a rank had compared its log, and the log since."""


class Watch:
    """Of one rank. store: of this group and this meeting of its ranks alone."""

    def __init__(self, order: Order, store: dist.Store, rank: int, world: int) -> None:
        # Weakly: the order has this. What is in a cycle is dropped by the garbage collector, from within which torch's
        # Gloo groups may wait for themselves.
        self._order: Order = proxy(order)
        self._store, self._rank, self._world = store, rank, world
        self._answers = True
        order.at_failure.append(self._say_failure)
        order.absent = self._absent

    def look(self) -> None:
        """To be called while this rank waits. Raises RuntimeError where the ranks cannot go on."""
        waits = json.dumps([self._order.comparisons, *self._order.history])
        failure, first = self._answer(lambda: self._ask(waits)) or (None, None)
        if failure is not None:
            self._order.end(failure)
            raise RuntimeError(failure)
        if first is not None and first[0] == self._order.comparisons:
            difference = self._order.difference({0: first[1], self._rank: self._order.history})
            if difference is not None:
                self._order.out_of_step(difference)

    def _ask(self, waits: str) -> tuple[str | None, _Waiting | None]:
        """What has failed, and what the first rank waits for."""
        self._store.set(f"waits/{self._rank}", waits)
        failure = self._store.get(_FAILURE).decode() if self._store.check([_FAILURE]) else None
        return failure, self._waiting(0) if self._rank else None

    def _answer(self, ask: Callable[[], _Answer]) -> _Answer | None:
        """What the store is asked, in a thread of its own: a host that cannot be reached would keep this one."""
        answers: list[_Answer] = []

        def run() -> None:
            with suppress(Exception):  # the store may have ended with its process
                answers.append(ask())

        if self._answers:
            thread = Thread(target=run, daemon=True)
            thread.start()
            thread.join(_PATIENCE + _PATIENCE_A_RANK * self._world)
            self._answers = not thread.is_alive()
        return answers[0] if answers else None

    def _waiting(self, rank: int) -> _Waiting | None:
        """What a rank has said; None if it has not."""
        key = f"waits/{rank}"
        if not self._store.check([key]):
            return None
        comparisons, length, tail = json.loads(self._store.get(key))
        return comparisons, (length, tail)

    def _say_failure(self, said: str) -> None:
        def say() -> None:
            if not self._store.check([_FAILURE]):
                self._store.set(_FAILURE, said)

        self._answer(say)

    def _absent(self) -> str:
        """Which ranks have not said that they wait at this point, in words for the user."""
        here, others = self._order.comparisons, [rank for rank in range(self._world) if rank != self._rank]
        found = self._answer(lambda: {rank: self._waiting(rank) for rank in others}) or {}
        late = [str(rank) for rank, waiting in found.items() if waiting is None or waiting[0] < here]
        return f" (rank {', '.join(late)} did not say that it waits)" if late else ""
