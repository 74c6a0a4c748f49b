"""What a rank says on standard error that has waited for long: for whom, in which call."""

import sys
import threading
from collections.abc import Callable
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
from runs import sgd, take_step
from transports import TRANSPORTS, by, overlapping
from zero.comm import Comm, waiting
from zero.comm.waiting import calling
from zoo import Stack, batch, loss_on

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
    """As where a checkpoint is written behind the training."""
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
