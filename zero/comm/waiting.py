"""What a rank says that has waited for others for half a minute: once, on standard error, for whom and where.

It may be right to wait: another rank computes, or writes a file. It is an error once the time-out of the group is over,
of 30 minutes by default, or where the watchdog knows that ranks can never meet (watchdog.py). Until then
nobody else says that one rank alone saves, evaluates or has more batches, while others wait for it somewhere else.

The watchdog's hub knows who is missing, and before a group has one, its store.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import get_ident

PATIENCE = 30.0
"""Seconds of a wait after which a rank says it."""

_calls: list[tuple[int, str]] = []
"""Public calls that are running, each with its thread, the outermost first."""


@contextmanager
def calling(name: str) -> Iterator[None]:
    """A context, or a decorator of a function, for a public call that all ranks make. name: as users write it.

    Not for forward, backward and step, which the channels of their operations tell of at no cost.
    """
    call = get_ident(), name
    _calls.append(call)
    try:
        yield
    finally:
        _calls.remove(call)  # the first that is equal, which is as good


def running_call() -> str | None:
    """The public call that runs in this thread, or else in any: backward and the watchdog have threads of their own."""
    calls = [*_calls]
    return next((name for thread, name in calls if thread == get_ident()), calls[0][1] if calls else None)


def say_waiting(rank: int, missing: Collection[int], operation: str) -> None:
    """Says that this rank waits. operation: in which it does, if no public call is running."""
    some = [*missing][:8]
    more = f" and {len(missing) - len(some)} more" if len(missing) > len(some) else ""
    whom = f"rank {', '.join(map(str, some))}{more}"
    if call := running_call():
        remedy = f"If that is elsewhere, as in dist.barrier(), call {call} on every rank before."
        operation = f"{call}, which every rank calls"
    else:
        remedy = (
            "If that has no batch left, take batches from zero.join. If it is elsewhere, as in dist.barrier(), train, "
            "evaluate and save on every rank before."
        )
    say(f"rank {rank} has waited {PATIENCE:g} s for {whom} in {operation}. {remedy}")


def say(text: str) -> None:
    """Says a line on standard error."""
    sys.stderr.write(f"zero: {text}\n")
    sys.stderr.flush()
