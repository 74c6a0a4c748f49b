"""The event loop in which the watchdogs of this process run, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from threading import Thread, get_ident
from typing import Any


# By process: a forked one has a copy of the loop, but not the thread that runs it.
@cache
def _loop_of(process: int) -> tuple[asyncio.AbstractEventLoop, Thread]:
    loop = asyncio.SelectorEventLoop()
    thread = Thread(target=loop.run_forever, name="zero-watchdog", daemon=True)
    thread.start()
    return loop, thread


def run(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Runs a coroutine in the loop."""
    return asyncio.run_coroutine_threadsafe(work, _loop_of(os.getpid())[0])


def is_here() -> bool:
    """Returns whether the caller runs in the loop."""
    return get_ident() == _loop_of(os.getpid())[1].ident
