"""In which order processes end: a launcher shows the error of the first one that ends.

A rank that raises because another one has raised, or is gone, ends after that one. So torch.multiprocessing.spawn and
torchrun show what the user's own code has raised.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from multiprocessing.util import Finalize
from pathlib import Path

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
