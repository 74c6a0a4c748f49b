"""What a forked process, such as a worker of a DataLoader, gives up: connections, as nobody notices the end of the
process that it was forked from while it holds them open; and process groups, as it is none of their ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakSet

held: set[Any] = set()
"""Sockets and pipes of this process."""

failures: WeakSet[Any] = WeakSet()
"""Those of the process groups of this process (oplog.py)."""


class Pipe(FileIO):
    """One end of a pipe. A read or write that would have to wait returns None."""

    def __init__(self, descriptor: int, mode: str) -> None:
        super().__init__(descriptor, mode)
        os.set_blocking(descriptor, False)
        held.add(self)

    def close(self) -> None:
        held.discard(self)
        super().close()

    def cut(self) -> None:
        """Has the other side see the end of the pipe, while another thread may read or write here: that finds an empty
        file. The number stays taken, which a `close` would free for any other file."""
        _give_up_one(self)


def _give_up_one(one: Any) -> None:
    # Another thread may have closed it, and not taken it from `held` yet: a file then raises, a socket returns -1.
    with suppress(ValueError, OSError):
        number = one.fileno()
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            os.dup2(nothing, number)  # not closed: the copy of the object would close the number again
        finally:
            os.close(nothing)


def _give_up() -> None:
    for one in held:
        _give_up_one(one)
    held.clear()
    for failure in failures:
        failure.end_in_fork()


if hasattr(os, "register_at_fork"):  # where it is missing, no process is forked
    os.register_at_fork(after_in_child=_give_up)


# -------------------------------------------------------------------------------------------------------------- the end
#
# In which order processes end: a launcher shows the error of the first one that ends.
#
# A rank that raises because another one has raised, or is gone, ends after that one. So torch.multiprocessing.spawn and
# torchrun show what the user's own code has raised.


# Seconds for which a process waits at its end, at most; and after another one has ended, for a launcher to notice that.
_PATIENCE, _NOTICED = 5.0, 0.3

_others: set[int] = set()
_waiting: set[int] = set()
"""The process in which the end waits: a forked one has no such end."""


def after_any(processes: Iterable[int]) -> None:
    """Has this process end after any of these, of this host."""
    _others.update(processes)
    if _others and os.getpid() not in _waiting:
        _waiting.add(os.getpid())
        # Not by atexit, which runs in no process that multiprocessing has forked.
        Finalize(None, _wait, exitpriority=0)


def as_it_comes() -> None:
    """Has this process not wait any more: ranks were in step again."""
    _others.clear()


def _wait() -> None:
    until = time.monotonic() + _PATIENCE
    while _others and time.monotonic() < until:
        if not all(map(_runs, _others)):
            time.sleep(_NOTICED)
            break
        time.sleep(0.02)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
