"""A rank that comes late to each operation: the others wait, over every transport, and all get what they should.

Late means 0.6 s: the first look at the other ranks, after 0.25 s, finds nothing yet.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import gpus
import ranks
from assertions import same
from inner import Comm
from transports import TRANSPORTS, by
from zero.comm.host_memory import Peers
from zero.comm.transport import ProcessGroupTransport

LATE = 0.6


class Slow:
    """A process group. This rank sleeps before each of its collectives."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        collective = getattr(self._group, name)

        def late(*args: Any) -> Any:
            time.sleep(LATE)
            return collective(*args)

        return late


@contextmanager
def late(comm: Comm) -> Iterator[None]:
    """In here this rank comes late to all that it does with others."""
    announce, of = Peers.announce, comm.link.transports[gpus.DEVICE]

    def slowly(*args: Any) -> None:
        time.sleep(LATE)
        announce(*args)

    with mock.patch.object(Peers, "announce", slowly):
        if isinstance(of, ProcessGroupTransport):
            with mock.patch.multiple(of, _group=Slow(of._group), _reduces_by=Slow(of._reduces_by)):
                yield
        else:
            yield


def collect(comm: Comm, to: int | None) -> None:
    """Tensors of two owners, one of them empty, one larger than what a socket holds."""
    lengths = [(1, 3), (2, 500_000), (1, 0)]
    expected = [torch.arange(float(length)) + owner for owner, length in lengths]
    room = [
        tensor.clone() if owner == comm.rank else torch.zeros_like(tensor) if to in (None, comm.rank) else None
        for tensor, (owner, _) in zip(expected, lengths, strict=True)
    ]
    transfers = [(owner, tensor) for (owner, _), tensor in zip(lengths, room, strict=True)]
    comm.collect(transfers, to, torch.device(gpus.DEVICE))
    if to in (None, comm.rank):
        same(room, expected, f"collected by {to}")


def gather(comm: Comm) -> None:
    full = torch.full((9,), float(comm.rank))
    comm.gather(full, [0, 3, 6, 9]).wait()
    assert full.tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3


def reduce(comm: Comm) -> None:
    assert comm.reduce([(torch.full((6,), comm.rank + 1.0), [1, 2, 3])]).wait().unique().tolist() == [6.0]


def others(comm: Comm) -> None:
    value = torch.tensor([float(comm.rank)])
    comm.all_reduce(value)
    assert value.item() == 3
    comm.broadcast([value.fill_(comm.rank)], 1)
    assert value.item() == 1
    assert comm.all_gather_text(str(comm.rank)) == ["0", "1", "2"]


OPERATIONS: dict[str, Callable[[Comm], object]] = {
    "collect on one": lambda comm: collect(comm, 0),
    "collect on all": lambda comm: collect(comm, None),
    "gather": gather,
    "reduce": reduce,
    "others": others,
}
CASES = [("collect on one", 0), ("collect on one", 1), ("collect on one", 2)]
CASES += [("collect on all", 1), ("gather", 0), ("reduce", 1), ("others", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("operation", "who"), CASES)
@ranks.on(3, timeout=30)
def test_a_late_rank_is_waited_for(rank, world, transport, operation, who):
    """Whether it owns what is sent, receives it, or does neither."""
    with by(transport):
        comm = Comm()
        comm.agree(comm.channel("a test"))
        if rank == who:
            with late(comm):
                OPERATIONS[operation](comm)
        else:
            OPERATIONS[operation](comm)
        comm.agree(0)
