"""What a rank does while it waits long: it says in the group's store what for, and reads what others say.

Ranks that are out of step in a settled schedule may wait for one another for ever: each operation is another one's, or
comes never. A rank that waits writes its log since the last comparison into the store, and compares it with that of the
group's first rank. Whoever finds a difference, or has failed, writes that too, for all others to raise it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from weakref import proxy

import torch.distributed as dist

from zero.comm.order import Order

_FAILURE = "failure"


class Watch:
    """Of one rank. store: of this group and this meeting of its ranks alone."""

    def __init__(self, order: Order, store: dist.Store, rank: int, world: int) -> None:
        # Weakly: the order has this. What is in a cycle is dropped by the garbage collector, from within which torch's
        # Gloo groups may wait for themselves.
        self._order: Order = proxy(order)
        self._store, self._rank, self._world = store, rank, world
        order.at_failure.append(self._say_failure)
        order.absent = self._absent

    def look(self) -> None:
        """To be called while this rank waits. Raises RuntimeError where the ranks cannot go on."""
        self._store.set(f"waits/{self._rank}", json.dumps([self._order.comparisons, *self._order.history]))
        if self._store.check([_FAILURE]):
            said = self._store.get(_FAILURE).decode()
            self._order.end(said)
            raise RuntimeError(said)
        first = self._waiting(0) if self._rank else None
        if first is not None and first[0] == self._order.comparisons:
            difference = self._order.difference({0: first[1], self._rank: self._order.history})
            if difference is not None:
                self._order.out_of_step(difference)

    def _waiting(self, rank: int) -> tuple[int, tuple[int, list[int]]] | None:
        """How often a rank that waited had compared its log, and the log since."""
        key = f"waits/{rank}"
        if not self._store.check([key]):
            return None
        comparisons, length, tail = json.loads(self._store.get(key))
        return comparisons, (length, tail)

    def _say_failure(self, said: str) -> None:
        with suppress(Exception):  # the store may have ended with its process
            if not self._store.check([_FAILURE]):
                self._store.set(_FAILURE, said)

    def _absent(self) -> str:
        """Which ranks have not said that they wait at this point, in words for the user."""
        with suppress(Exception):
            here = self._order.comparisons
            told = {rank: self._waiting(rank) for rank in range(self._world) if rank != self._rank}
            late = [str(rank) for rank, waiting in told.items() if waiting is None or waiting[0] < here]
            if late:
                return f" (rank {', '.join(late)} did not say that it waits)"
        return ""
