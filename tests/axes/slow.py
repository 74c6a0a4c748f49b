"""One rank sleeps once, for longer than Gloo's first waits: before an operation that is drawn, or amid a collection of
full tensors or state."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from random import Random
from typing import Any
from unittest import mock

import torch.distributed as dist

from axes import Axis, happens
from zero.comm import Comm
from zero.comm.host_memory import Peers
from zero.comm.oplog import Log

NAP = 0.6
NAMES = ("send", "recv", "broadcast", "allgather", "_allgather_base", "allreduce", "alltoall_base")
NAMES += ("all_gather_single", "all_to_all_single", "reduce_scatter_single")

Methods = tuple[tuple[type, str], ...]
"""By which a rank begins to send, or to read from another."""
BY = (dist.ProcessGroupGloo, dist.ProcessGroup)
GLOO: Methods = tuple((group, name) for name in NAMES for group in BY if hasattr(group, name))


class Nap:
    """The sleep before call number `after` of those within `counting`."""

    def __init__(self, after: int) -> None:
        self.after, self.depth = after, 0

    def __call__(self) -> None:
        if self.depth:
            self.after -= 1
            if self.after == -1:
                time.sleep(NAP)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def before(self, owner: type, name: str) -> AbstractContextManager[object]:
        method = getattr(owner, name)

        def called(*args: Any, **given: Any) -> Any:
            self()
            return method(*args, **given)

        return mock.patch.object(owner, name, called)

    def within(self, owner: type, name: str) -> AbstractContextManager[object]:
        method = getattr(owner, name)

        def called(*args: Any, **given: Any) -> Any:
            with self.counting():
                return method(*args, **given)

        return mock.patch.object(owner, name, called)


class Slow(Axis):
    operations: Methods = ((Log, "append"), (Peers, "announce"), (Peers, "read"), *GLOO)

    @contextmanager
    def running(self, rank: int, stage: int) -> Iterator[None]:
        random = Random(f"{self.seed} {stage}")
        sleeper, nap = random.randrange(2), Nap(self.number(random))
        with ExitStack() as stack:
            if stage and rank == sleeper:
                for owner, name in self.operations:
                    stack.enter_context(nap.before(owner, name))
                self.count(nap, stack)
            yield
        assert nap.after < 0 or not stage or rank != sleeper, "nobody slept: draw a smaller number"

    def number(self, random: Random) -> int:
        """After how many operations: a few as often as many."""
        return int(2 ** random.uniform(0, 3.3)) - 1

    def count(self, nap: Nap, stack: ExitStack) -> None:
        stack.enter_context(nap.counting())


happens("slow: an operation")(Slow)


@happens("slow: a collection")
class SlowCollection(Slow):
    """Not where ranks compare it, but before a tensor is sent."""

    operations = ((Peers, "announce"), *GLOO)

    def number(self, random: Random) -> int:
        return random.randrange(3)

    def count(self, nap: Nap, stack: ExitStack) -> None:
        stack.enter_context(nap.within(Comm, "collect"))
