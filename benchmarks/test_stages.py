"""CPU time of a step and of clipping at every stage, for pytest-benchmark (make bench)."""

from functools import partial
from typing import Any

import pytest
from torch.nn.utils import clip_grad_norm_

from contestants import How, build
from launch import Launch, Rank, take_turns
from loop import repeat, take_step, time_training
from models import gpt

TASK = gpt(6, 384, tied=True)
NAMES = ("ddp", "zero1", "zero2", "zero3")
Found = tuple[float, list[float]]
"""CPU ms, and what is the same at every stage."""

pytestmark = pytest.mark.timeout(900)


def step(name: str, rank: Rank) -> Found:
    timed = time_training(name, TASK, How(), 6, rank)
    return timed.cpu_ms, timed.losses


def clip(name: str, rank: Rank) -> Found:
    """After a step and a backward. A norm of 1e9 clips nothing, so that it stays the same."""
    trained = build(name, TASK, rank)
    take_step(trained, TASK.batch(0, rank.rank, rank.device), rank.device)
    trained.backward(trained.loss(*TASK.batch(1, rank.rank, rank.device)))
    clipping = partial(clip_grad_norm_, [*trained.model.parameters()], max_norm=1e9)
    return repeat(clipping, rank, times=50)[1], [float(clipping())]


@pytest.fixture(scope="module", params=[step, clip], ids=lambda work: work.__name__)
def taken(request: pytest.FixtureRequest) -> dict[str, list[list[Found]]]:
    """What each rank found, by turn."""
    found, failed = take_turns({name: partial(Launch(2), partial(request.param, name)) for name in NAMES}, 3)
    assert not failed
    return found


@pytest.mark.parametrize("name", NAMES)
def test_cpu_time(benchmark: Any, taken: dict[str, list[list[Found]]], name: str) -> None:
    """The mean over the ranks. It is handed on by a clock that advances by what they have measured."""
    assert taken[name][0][0][1] == pytest.approx(taken["ddp"][0][0][1], rel=1e-5)
    cpu_seconds = [sum(cpu_ms for cpu_ms, _ in ranks) / len(ranks) / 1000 for ranks in taken[name]]
    clock, turns = [0.0], iter(cpu_seconds)

    def advance() -> None:
        clock[0] += next(turns)

    benchmark._timer = lambda: clock[0]
    benchmark.pedantic(advance, rounds=len(cpu_seconds), iterations=1)
