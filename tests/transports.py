"""Which transport ranks use in a test, instead of the one that suits this machine. To be entered before the first
operation of a process group, on every rank."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import gpus
from zero.comm.transport import Overlapping

READS = os.environ.get("ZERO_HOST_MEMORY") != "0" and not gpus.ON
"""Whether ranks of this run of the tests may read one another's memory. `make hosts` forbids it, as between hosts."""

TRANSPORTS = ["nccl"] if gpus.ON else ["host memory", "gloo"] if READS else ["gloo"]


def in_turn(number: int) -> str:
    """One of TRANSPORTS: every third time Gloo, as a step by it takes twice the CPU time of one by host memory."""
    return TRANSPORTS[0 if number % 3 else -1]


@contextmanager
def between_hosts() -> Iterator[None]:
    """By Gloo, or what is on GPUs by NCCL: nothing is read from the others' memory."""
    with mock.patch.dict(os.environ, ZERO_HOST_MEMORY="0"):
        yield


def by(transport: str) -> AbstractContextManager[None]:
    """One of TRANSPORTS, or "overlapping": as GPUs send, from host to host."""
    if transport == "overlapping":
        return _between_hosts_overlapping()
    return nullcontext() if transport == "host memory" else between_hosts()


@contextmanager
def _between_hosts_overlapping() -> Iterator[None]:
    with between_hosts(), overlapping(returns_work=False):
        yield


class _WithoutWork:
    """A process group whose collectives return None, as NCCL's do, where they are told not to be asynchronous."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        collective = getattr(self._group, name)

        def run(*args: Any) -> Any:
            work = collective(*args)
            if not any(getattr(arg, "asyncOp", True) is False for arg in args):
                return work
            work.wait()
            return None

        return run


@contextmanager
def overlapping(name: str = "nccl", *, returns_work: bool = True) -> Iterator[None]:
    """As by a backend that sends beside the computing. What goes by it here runs over Gloo all the same.

    returns_work: as Gloo does. Otherwise a collective in the order of a stream returns None, as NCCL's does, and nobody
    looks after ranks that wait in vain.

    On GPUs NCCL does it itself.
    """
    if gpus.ON:
        yield
        return

    def without_work(log: Any, group: Any, *args: Any, **kwargs: Any) -> Overlapping:
        return Overlapping(log, _WithoutWork(group), *args, **kwargs)

    with mock.patch("zero.comm.link.backend_of", return_value=name), ExitStack() as stack:
        if not returns_work:
            stack.enter_context(mock.patch("zero.comm.link.Overlapping", without_work))
        yield


def calling(rank: int, world: int, transport: str, function: Any, *args: Any) -> Any:
    """Calls a function of ranks.run over one of TRANSPORTS."""
    with by(transport):
        return function(rank, world, *args)
