"""Which transport ranks use in a test, instead of the one that suits this machine. To be entered before the first
operation of a process group, on every rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

READS = os.environ.get("ZERO_HOST_MEMORY") != "0"
"""Whether ranks of this run of the tests may read one another's memory. `make hosts` forbids it, as between hosts."""

TRANSPORTS = ["host memory", "gloo"] if READS else ["gloo"]


@contextmanager
def between_hosts() -> Iterator[None]:
    """By Gloo: nothing is read from the others' memory."""
    with mock.patch.dict(os.environ, ZERO_HOST_MEMORY="0"):
        yield


def by(transport: str) -> AbstractContextManager[None]:
    """One of TRANSPORTS."""
    return nullcontext() if transport == "host memory" else between_hosts()


@contextmanager
def overlapping(name: str = "nccl") -> Iterator[None]:
    """As by a backend that sends beside the computing. What goes by it here runs over Gloo all the same."""
    with mock.patch("zero.comm.link.backend_of", return_value=name):
        yield
