"""What moves by torch's process groups, and what becomes of what was launched when ranks cannot go on."""

from __future__ import annotations

import gc
import os
import time
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import zero
from ranks import refusal
from simulated.world import simulated
from transports import between_hosts, overlapping
from zero.comm import Comm
from zero.comm.order import Order
from zero.comm.process_group import Overlapping
from zero.comm.streams import NONE
from zero.shards.group_state import GroupOptions
from zero.shards.layout import even
from zero.shards.placement import Placement
from zero.shards.shard_group import ShardGroup

LACKED = [torch.int16, torch.uint16, torch.uint32, torch.float8_e5m2]


OWN = GroupOptions(own_shard=True)


@pytest.mark.parametrize("dtype", LACKED, ids=str)
@pytest.mark.parametrize("beside", [False, True], ids=["gloo", "overlapping"])
@ranks.on(2)
def test_dtypes_that_backends_lack_move_as_bytes(rank, world, dtype, beside):
    with overlapping() if beside else between_hosts():
        comm = Comm()
        buffer = torch.full((3,), 5 * (1 - rank), dtype=torch.int32).to(dtype)
        comm.broadcast([buffer])
        full = torch.full((4,), rank + 1, dtype=torch.int32).to(dtype)
        comm.gather(full, [0, 2, 4]).wait()
        buffer, full = buffer.to(torch.int32).tolist(), full.to(torch.int32).tolist()
    assert buffer == [5, 5, 5]
    assert full == [1, 1, 2, 2]


@pytest.mark.parametrize("streams", [True, False], ids=["beside the computing", "on one stream"])
def test_what_was_launched_before_ranks_were_out_of_step_is_ended_and_its_buffers_are_kept(streams):
    with (
        simulated() as there,
        nullcontext() if streams else mock.patch("zero.shards.shard_group.streams_of", lambda tensor: NONE),  # noqa: PT008 - a mock keeps the tensor
    ):
        comm = there.comm(1, 4)
        flat = ShardGroup([nn.Parameter(torch.ones(64))], ["weight"], even([64], 4, align=16), Placement(comm), OWN)
        flat.launch_unshard()
        full = weakref.ref(flat.full)
        assert not there.aborted
        refusals = [refusal(partial(comm._order.out_of_step, {}))]
        assert there.aborted == [1]
        refusals.append(refusal(flat.finish_unshard))
        assert all("different numbers of bytes" in told for told in refusals), refusals
        order = comm._order
        del flat, comm
        gc.collect()
        assert full() is not None, "a kernel that still runs would write into memory of others"
        del order


class _AnyBackend(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return True


class NCCL(metaclass=_AnyBackend):
    """In the place of ProcessGroupNCCL: ranks of one store say that they are there."""

    class Options:
        _timeout: Any = None

    made: list[NCCL]

    def __init__(self, store: dist.Store, rank: int, world: int, options: Options) -> None:
        self.calls: list[str] = []
        store.set(f"is here {rank}", "")
        store.wait([f"is here {other}" for other in range(world)])
        NCCL.made.append(self)

    def abort(self) -> None:
        self.calls.append("abort")


def made_on_a_gpu() -> Comm:
    NCCL.made = []
    group = dist.new_group([0, 1], backend="cuda:gloo")
    with mock.patch.object(dist, "ProcessGroupNCCL", NCCL, create=True):
        comm = Comm(group)
        assert comm.transport_name(torch.device("cuda")) == "gloo"  # what this group calls itself
    return comm


@ranks.on(2, fresh=True)
def test_reductions_have_communicators_of_their_own_which_a_failure_ends(rank, world):
    comm = made_on_a_gpu()
    refusal(lambda: comm._order.out_of_step({}))
    until = time.monotonic() + 5
    while not NCCL.made[0].calls and time.monotonic() < until:  # the other rank may have told this one first
        time.sleep(0.01)
    assert (len(NCCL.made), NCCL.made[0].calls) == (1, ["abort"])


@pytest.mark.parametrize("said", ["by configure", "by the environment"])
@ranks.on(2, fresh=True)
def test_one_rank_that_wants_no_second_communicator_is_enough(rank, world, said):
    if rank and said == "by configure":
        zero.comm.configure(second_communicator=False)
    with mock.patch.dict(os.environ, ZERO_SECOND_COMMUNICATOR="0" if rank and said == "by the environment" else ""):
        made_on_a_gpu()
    assert not NCCL.made
    with mock.patch.dict(os.environ, ZERO_SECOND_COMMUNICATOR="no"):
        assert "choose 0, 1" in refusal(lambda: Comm(dist.new_group([0, 1])))
    assert "choose True, False" in refusal(lambda: zero.comm.configure(second_communicator="no"))


class Recording:
    """A process group that can launch operations as one. Notes what is launched."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[str | int] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> None:
        self.calls.append("end")

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.calls.append(tensors[0].nbytes)

    def _allgather_base(self, into: torch.Tensor, tensor: torch.Tensor, options: Any) -> None:
        self.calls.append(into.nbytes)


@pytest.mark.parametrize(("bounds", "calls"), [([0, 6, 6, 8], ["start", 24, 8, "end"]), ([0, 3, 6, 9], [36])])
def test_shards_of_unequal_length_are_gathered_as_one_operation_of_their_own_bytes(bounds, calls):
    group, order = Recording(), Order(0, 3)
    checks = mock.Mock(compare=mock.Mock(return_value=False))
    transport = Overlapping(order, group, 0, 3, blocks=False, checks=checks, name="nccl")
    transport.gather(torch.zeros(bounds[-1]), bounds, order.channel("a gather")).wait()
    assert group.calls == calls
