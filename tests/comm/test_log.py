"""When ranks compare what they do between hosts, and what they are told when they are out of step."""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import gpus
import ranks
import zero
from ranks import refusal
from runs import sgd, take_step
from transports import TRANSPORTS, between_hosts, by, overlapping
from zero.comm import Comm, waiting
from zero.comm.transport import ProcessGroupTransport, levels
from zero.comm.waiting import calling
from zoo import Stack, batch, loss_on


@contextmanager
def counted() -> Iterator[list[int]]:
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
    # The first step of an optimizer at stage 3 also compares its groups.
    assert found[1] == (most if check == "" else found[0] - 1)
    assert found[0] > most


class Steps:
    """Operations one after another: gathers by their number, and agreements by their name."""

    def __init__(self) -> None:
        self.comm = Comm()
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


@pytest.mark.parametrize("world", [1, 2, 8, 11, 16, 22, 64, 1000, 1024])
def test_what_goes_around_in_each_level_has_reached_every_rank(world):
    found = {rank: levels(rank, world) for rank in range(world)}
    assert all(rank in group for rank in range(world) for group in found[rank])
    reached = {0}
    for level in range(len(found[0])):
        reached = {other for rank in reached for other in found[rank][level]}
        assert all(found[other][level] == found[rank][level] for rank in found for other in found[rank][level])
    assert len(reached) == world
    if world in (64, 1024):
        assert sum(len(group) - 1 for group in found[0]) == {64: 14, 1024: 22}[world], "hops"


@pytest.mark.parametrize("elsewhere", [(), (2,), (1, 2)])
@ranks.on(4, timeout=30)
def test_many_ranks_compare_in_several_levels(rank, world, elsewhere):
    """Here in two of two ranks, by connections that are made when they are first used, as where a GPU sends."""
    with (
        mock.patch("zero.comm.transport._OF_A_LEVEL", 2),
        overlapping(returns_work=False),
        mock.patch("zero.comm.link.backend_of", lambda _, device: None if device.type == "cpu" else "nccl"),
        between_hosts(),
    ):
        steps = Steps()
        assert [steps.comm.agree(steps.comm.channel("a flag"), flags=int(rank == 2)) for _ in range(2)] == [1, 1]
        assert steps.comm.agree(steps.comm.channel("no flag")) == 0
        assert steps.comm.all_gather_text(str(rank)) == [*map(str, range(world))]
        sums, largest, anywhere = torch.tensor([rank, 1]), torch.tensor(1.0 * rank), torch.tensor([rank == 2, False])
        steps.comm.all_reduce(sums)
        steps.comm.all_reduce(largest, maximum=True)
        steps.comm.all_reduce(anywhere, maximum=True)
        assert (sums.tolist(), largest.item(), anywhere.tolist()) == ([6, 4], 3.0, [True, False])
        text = refusal(lambda: steps.run("pause" if rank in elsewhere else "end"))
    assert bool(text) == bool(elsewhere)
    assert all(one in text for one in ("ranks are out of step", "the end", "the pause") if elsewhere)


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


# What a rank says on standard error that has waited for long: for whom, in which call.


PATIENCE = 0.5

WHEN_SAID = "said"
"""The key of the store that a rank sets once it has said that it waits."""


class Heard:
    """In the place of standard error."""

    def __init__(self, store: dist.Store) -> None:
        self.said: list[str] = []
        self._store = store

    def write(self, text: str) -> None:
        self.said.append(text)
        self._store.set(WHEN_SAID, "")

    def flush(self) -> None: ...


def alone(rank: int, call: Callable[[], object]) -> list[str]:
    """Rank 0 calls, and the others only after it has said that it waits for them. What rank 0 says."""
    store = dist.distributed_c10d._get_default_store()
    heard = Heard(store)
    with mock.patch.object(waiting, "PATIENCE", PATIENCE):
        if rank == 0:
            with mock.patch.object(sys, "stderr", heard):
                call()
        else:
            store.wait([WHEN_SAID], timedelta(seconds=15))
            call()
    return heard.said


def evaluates(model: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        model(batch(0, 0))


def trains(model: nn.Module, optimizer: Any, *_: Any) -> None:
    take_step(optimizer, loss_on(0, 0)(model))


CALLED: dict[str, Callable[..., object]] = {
    "zero.full_state_dict": lambda model, optimizer, folder: zero.full_state_dict(model, to=0),
    "zero.load_full_state_dict": lambda model, optimizer, folder: zero.load_full_state_dict(
        model, Stack().state_dict()
    ),
    "zero.full_optimizer_state_dict": lambda model, optimizer, folder: zero.full_optimizer_state_dict(
        model, optimizer, to=None
    ),
    "the norm of several tensors": lambda model, optimizer, folder: clip_grad_norm_(model.parameters(), 1.0),
    "zero.checkpoint.save": lambda model, optimizer, folder: zero.checkpoint.save(folder, model, optimizer),
}
TRAINED: dict[str, Callable[..., object]] = {"evaluates": evaluates, "trains": trains}


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("call", [*CALLED, *TRAINED])
@ranks.on(2, timeout=30)
def test_who_waits_says_once_in_which_call_and_for_whom(rank, world, transport, call, tmp_path):
    """As where rank 0 alone saves or evaluates, and the others are in a barrier; or has more batches."""
    with by(transport):
        model, optimizer = zero.setup(Stack(), sgd, stage=3)
        for _ in range(2):
            trains(model, optimizer)
        loss_on(rank, 0)(model).backward()
        said = alone(rank, lambda: {**CALLED, **TRAINED}[call](model, optimizer, tmp_path))
        if rank == 0:
            (text,) = said
            where = (
                f"{call}, which every rank calls" if call in CALLED else "the gathering of the root unit for forward"
            )
            remedy = f"call {call} on every rank" if call in CALLED else "zero.join"
            assert text.startswith(f"zero: rank 0 has waited 0.5 s for rank 1 in {where}. If that ")
            assert "dist.barrier()" in text and remedy in text and text.count("\n") == 1


@gpus.cpu_only("NCCL's own hosts do not wait")
@ranks.on(3, timeout=30)
def test_the_ranks_that_are_behind_are_named_where_no_host_waits(rank, world):
    with overlapping(returns_work=False):
        comm = Comm()
        channel = comm.channel("a test")
        comm.agree(channel)
        said = alone(rank, lambda: comm.agree(channel))
    assert rank or "rank 0 has waited 0.5 s for rank 1, 2 in a test." in "".join(said)


@ranks.on(2, timeout=30)
def test_a_rank_that_builds_its_model_alone_says_so(rank, world):
    (said,) = alone(rank, lambda: zero.setup(Stack(), sgd, stage=2)) or [""]
    assert rank or "for rank 1 in the first operation of a group, as in zero.setup or FSDP(...)." in said


def test_a_call_is_that_of_its_own_thread():
    entered, left = threading.Event(), threading.Event()

    @calling("zero.behind")
    def behind() -> None:
        entered.set()
        assert left.wait(10) and waiting.running_call() == "zero.behind"

    with calling("zero.before"):
        thread = threading.Thread(target=behind)
        thread.start()
        assert entered.wait(10) and waiting.running_call() == "zero.before"
    left.set()
    thread.join()
    assert waiting.running_call() is None


def test_the_outermost_call_is_named_and_none_after_an_error():
    @calling("zero.outer")
    def outer() -> None:
        with calling("zero.inner"):
            waiting.say_waiting(1, range(10), "a gather")
            raise ValueError("inner")

    said: list[str] = []
    with mock.patch("sys.stderr.write", said.append):
        with pytest.raises(ValueError, match="inner"):
            outer()
        waiting.say_waiting(1, [0], "a gather")
    assert "rank 1 has waited 30 s for rank 0, 1, 2, 3, 4, 5, 6, 7 and 2 more in zero.outer, which every" in said[0]
    assert "for rank 0 in a gather." in said[1]
