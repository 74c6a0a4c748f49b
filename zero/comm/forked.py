"""What a forked process, such as a worker of a DataLoader, gives up: connections, as nobody notices the end of the
process that it was forked from while it holds them open; and process groups, as it is none of their ranks."""

from __future__ import annotations

import os
from io import FileIO
from typing import Any
from weakref import WeakSet

held: set[Any] = set()
"""Sockets and pipes of this process."""

failures: WeakSet[Any] = WeakSet()
"""Those of the process groups of this process (failure.py)."""


class Pipe(FileIO):
    """One end of a pipe. A read or write that would have to wait returns None."""

    def __init__(self, descriptor: int, mode: str) -> None:
        super().__init__(descriptor, mode)
        os.set_blocking(descriptor, False)
        held.add(self)

    def close(self) -> None:
        held.discard(self)
        super().close()


def _give_up() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in held:
        # Another thread may have closed it and not taken it from `held` yet; dup2 to -1 raises.
        if one.fileno() >= 0:
            os.dup2(nothing, one.fileno())  # not closed: the copy of the object would close the number again
    os.close(nothing)
    held.clear()
    for failure in failures:
        failure.end_in_fork()


if hasattr(os, "register_at_fork"):  # where it is missing, no process is forked
    os.register_at_fork(after_in_child=_give_up)
