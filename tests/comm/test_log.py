"""When ranks compare what they do between hosts, and what they are told when they are out of step."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpus
import matrix
import ranks
import zero
from ranks import refusal
from runs import sgd, take_step
from transports import TRANSPORTS, between_hosts, by, overlapping
from zero.comm import Comm
from zero.comm.transport import Gloo, ProcessGroupTransport
from zoo import Stack, batch, loss_on


@contextmanager
def counted() -> Iterator[list[int]]:
    """The comparisons between ranks, by channel."""
    seen: list[int] = []
    compare = ProcessGroupTransport.compare

    def counting(self: ProcessGroupTransport, channel: int, *, flags: int = 0) -> int:
        seen.append(channel)
        return compare(self, channel, flags=flags)

    with mock.patch.object(ProcessGroupTransport, "compare", counting):
        yield seen


def evaluate(model: nn.Module, rank: int, number: int) -> None:
    with torch.no_grad():
        model(batch(rank, number))


@pytest.mark.parametrize(
    ("stage", "trains", "most", "check"), [(1, True, 2, ""), (2, True, 2, ""), (3, True, 2, "each"), (3, False, 1, "")]
)
@ranks.on(2)
def test_what_is_settled_has_few_comparisons_whatever_the_number_of_units(rank, world, stage, trains, most, check):
    """What waits for all ranks without bringing anything: comparisons, and sums of a few numbers. At an evaluation the
    first operation is compared, lest a rank that begins it alone sends it into others' backward."""
    found = []
    with mock.patch.dict(os.environ, ZERO_CHECK=check), between_hosts(), counted() as seen:
        model, optimizer = zero.setup(Stack(blocks=6), sgd, stage=stage)
        for number in range(2):
            seen.clear()
            with mock.patch.object(Comm, "all_reduce", autospec=True, side_effect=Comm.all_reduce) as summed:
                if trains:
                    take_step(optimizer, loss_on(rank, number)(model))
                else:
                    evaluate(model, rank, number)
            found.append(len(seen) + summed.call_count)
    assert found[1] == (most if check == "" else found[0])
    assert found[0] > most


class Steps:
    """Operations one after another: gathers by their number, and agreements by their name."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.comm = Comm(group)
        self._channels = {
            operation: self.comm.channel(f"gather {operation}" if isinstance(operation, int) else f"the {operation}")
            for operation in (0, 1, 2, "end", "pause")
        }

    def run(self, *operations: int | str) -> None:
        for operation in operations:
            if isinstance(operation, int):
                world = self.comm.world
                full = torch.full((5 * world,), float(self.comm.rank))
                self.comm.gather(full, range(0, 5 * world + 1, 5), self._channels[operation]).wait()
                assert full.view(world, 5)[:, 0].tolist() == [*range(world)]
            else:
                self.comm.agree(self._channels[operation])


ONE, OTHER = (0, 1, 2, "end"), (0, 2, 1, "end")
OUT_OF_STEP = {  # what each rank does, and where it is told to be: once the schedule is settled, or in a new one
    "a gather and agreements": (False, [("end",), (0,), ("pause",)], ["the end", "gather 0", "the pause"]),
    "gathers of one size": (True, [OTHER, ONE, ONE], ["gather 2", "gather 1", "gather 1"]),
    "one waits in vain": (True, [ONE, (0, 1, "end"), ONE], ["gather 2", "the end", "gather 2"]),
}


WAYS = TRANSPORTS if gpus.ON else [*TRANSPORTS, "other"]
"""The last: by collectives of another backend, which here runs over Gloo all the same, as long as lengths are equal."""

CASES = [(name, way) for name, (settled, *_) in OUT_OF_STEP.items() for way in (TRANSPORTS if settled else WAYS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES)
@ranks.on(3, timeout=20)
def test_ranks_out_of_step_are_told_where_each_is_and_the_group_refuses_to_go_on(rank, world, name, way):
    """In a settled schedule transfers of one size arrive in the place of another. The timeout is not waited for."""
    settled, each, places = OUT_OF_STEP[name]
    with overlapping(way, returns_work=False) if way == "other" else by(way):
        steps = Steps()
        for operations in [ONE, OTHER] * 2 if settled else [("end",)]:
            steps.run(*operations)
        first, second = refusal(lambda: steps.run(*each[rank])), refusal(lambda: steps.run("end"))
    assert "ranks are out of step: rank " in first
    named = {int(peer): place for peer, place in re.findall(r"rank (\d) (?:is )?in (.+?)(?=, |\.|$)", first)}
    assert named.items() <= dict(enumerate(places)).items(), first
    assert len({*named.values()}) == len({*places}), first
    assert "nitialise the process group again" in second


@pytest.mark.slow
@ranks.on(3, timeout=20)
def test_ranks_that_wait_are_told_that_another_has_failed(rank, world):
    """Its process and connections live on."""
    with between_hosts():
        steps = Steps()
        steps.run(*ONE)  # which connects the lanes of shards
        steps.run("end")
        if rank == 1:
            with mock.patch.object(Gloo, "_broadcast_shards", side_effect=RuntimeError("cut off")):
                told = refusal(lambda: steps.run(*ONE))
        else:
            told = refusal(lambda: steps.run(*ONE))
    assert "rank 1 failed in gather 0" in told
    assert "cut off" in told


@matrix.only
@ranks.on(3, timeout=30)
def test_a_rank_that_never_comes_is_named_after_the_timeout(rank, world):
    with between_hosts():
        steps = Steps(dist.new_group([0, 1, 2], timeout=timedelta(seconds=2)))
        steps.run("end")
        told = "" if rank == 2 else refusal(lambda: steps.run("end"))
    assert rank == 2 or "failed in the end" in told
    assert rank == 2 or "rank 2 of the group of 3 has not reached the next operation" in told


@pytest.mark.parametrize(("there", "told"), [("Do this.", True), ("Do that.", False), ("", False)])
@ranks.on(2, timeout=20)
def test_a_remedy_is_told_where_all_operations_out_of_step_have_it(rank, world, there, told):
    comm = Comm()
    channels = [comm.channel("expert 1", "Do this."), comm.channel("expert 2", there)]
    text = refusal(lambda: comm.agree(channels[rank]))
    assert "collective: call it on every rank" in text
    assert ("Do this." in text, "zero.join" in text) == (told, not told)


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks.on(2, timeout=20)
def test_one_rank_has_all_compare_each_operation(rank, world, transport):
    """One that compared alone would send comparisons into what others receive."""
    with by(transport), counted() as seen, mock.patch.dict(os.environ, ZERO_CHECK="each" if rank == 1 else ""):
        model, optimizer = zero.setup(Stack(), sgd, stage=3)
        assert Comm().log.each
        found = []
        for number in range(3):
            seen.clear()
            take_step(optimizer, loss_on(rank, number)(model))
            found.append(len(seen))
    assert transport == "host memory" or found[1] == found[2] > 4
