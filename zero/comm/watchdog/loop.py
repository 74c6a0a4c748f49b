"""The event loop in which the watchdogs of this process run, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from threading import Thread, get_ident
from typing import Any

sockets: set[Any] = set()
"""The sockets of all watchdogs of this process."""


@cache
def _loop() -> tuple[asyncio.AbstractEventLoop, Thread]:
    loop = asyncio.SelectorEventLoop()
    thread = Thread(target=loop.run_forever, name="zero-watchdog", daemon=True)
    thread.start()
    return loop, thread


def run(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Runs a coroutine in the loop."""
    return asyncio.run_coroutine_threadsafe(work, _loop()[0])


def is_here() -> bool:
    """Returns whether the caller runs in the loop."""
    return get_ident() == _loop()[1].ident


def _forget() -> None:
    """Gives up the loop and the sockets in a forked process, such as a worker of a DataLoader: while it holds them
    open, nobody notices the end of the process that it was forked from."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in sockets:
        if one.fileno() >= 0:
            os.dup2(nothing, one.fileno())  # not closed: the copy of the object would close the number again
    os.close(nothing)
    sockets.clear()
    _loop.cache_clear()


os.register_at_fork(after_in_child=_forget)
