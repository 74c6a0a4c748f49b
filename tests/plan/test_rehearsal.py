"""One rank of a group that does not exist: it goes through its operations, and what these send and hold is told."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import zero
from zero._torch import without_values
from zero.plan.meter import Meter
from zero.plan.rehearsal import rehearsed_traffic
from zero.plan.transport import rehearsed

WORLD = 4096


def test_ranks_that_are_not_there_agree_with_this_one():
    comm = rehearsed(3, WORLD, "gloo")
    comm.agree(comm.channel("a step"))
    comm.compare("the models", ["one line"])
    assert comm.all_gather_text("here") == ["here"] * WORLD
    with pytest.raises(ValueError, match="something is wrong"):
        comm.compare("the models", ["one line"], "something is wrong")


def test_what_a_step_sends_is_counted_and_forgotten():
    comm, before = rehearsed(1, 4, "nccl"), zero.traffic()
    bounds = [0, 30, 50, 50, 100]
    with rehearsed_traffic():
        comm.gather(torch.zeros(100), bounds).wait()
        sums = comm.reduce([(torch.zeros(100), [high - low for low, high in pairwise(bounds)])]).wait()
        assert (zero.traffic().gather, zero.traffic().reduce) == (20 * 4 * 3, 80 * 4)
        assert zero.traffic().other == 0
    assert len(sums) == 20
    assert zero.traffic() == before


def test_a_comm_stands_for_a_process_group():
    comm = rehearsed(1, 4, "gloo")
    optimizer = zero.OSS([torch.nn.Parameter(torch.zeros(64))], torch.optim.Adam, comm)
    assert (optimizer.comm.rank, optimizer.comm.world) == (1, 4)
    assert len(optimizer.shards.shard_groups[0].shard) == 16


@pytest.mark.parametrize(
    ("like", "dtype", "held"),
    [
        ("nccl", torch.float32, 1000 * 4),  # a reduce-scatter
        ("nccl", torch.bfloat16, 8 * 1000 * 2 + 1000 * 4),  # what comes of 8 ranks, and the sum
        ("gloo", torch.bfloat16, 8 * 1000 * 2 + 1000 * 4),  # added up in float32
        ("host memory", torch.float32, 8 * 1000 * 4 + 1000 * 4),
    ],
)
def test_a_reduce_holds_what_comes_of_all_ranks(like, dtype, held):
    comm = rehearsed(0, 8, like)
    with without_values(), Meter() as meter:
        message = torch.empty(8000, dtype=dtype)
        meter.reset_peak()
        handle = comm.reduce([(message, [1000] * 8)])
        assert (meter.peak() == message.nbytes) == (like == "host memory")  # which reads it when it adds it up
        handle.wait()
    assert meter.peak() == message.nbytes + held
