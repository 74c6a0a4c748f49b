"""Values and orders of calls that nobody wants: each does what it does with DistributedDataParallel, or raises on every
rank; nothing hangs.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

import matrix
import ranks
import zero
from models import FeedForward, Stack
from sidebyside import data

WIDTH = 5
STAGES = [1, 2, 3]

DESTROYED: list[Any] = []
"""Groups of this process. Should the last to hold one be what is collected, ProcessGroupGloo may wait for a thread of
its own, which waits for Python (torch 2.13): DistributedDataParallel's reducer does.
"""

adamw = partial(AdamW, lr=1e-2)

Told = list[Any]
Scenario = Callable[["Training"], Iterator[Any]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """What it yields is compared with what it yields under DistributedDataParallel."""
    SCENARIOS[function.__name__] = function
    return function


class Training:
    """A model and its optimizer at a stage. Stage 0 is torch's own."""

    def __init__(self, rank: int, stage: int, inner: nn.Module | None = None) -> None:
        self.rank, self.stage = rank, stage
        self.inner = inner or Stack(partial(FeedForward, WIDTH, 7), WIDTH, 3)
        self.model, self.optimizer = zero.setup(self.inner, adamw, stage=stage)

    def batch(self, step: int, rows: int = 4) -> Tensor:
        return data(rows, WIDTH, rank=self.rank, step=step)

    def step(self, x: Tensor, scale: float = 1.0, clip: float | None = None) -> float:
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum() * scale
        loss.backward()
        if clip is not None:
            self.clip(clip)
        self.optimizer.step()
        return loss.item()

    def clip(self, norm: float) -> float:
        if self.stage == 0:
            return clip_grad_norm_(self.model.parameters(), norm).item()
        clip = self.model.clip_grad_norm_ if self.stage == 3 else self.optimizer.clip_grad_norm
        return clip(norm).item()

    def weights(self) -> dict[str, Tensor]:
        return zero.full_state_dict(self.model)


def told(rank: int, world: int, name: str, stage: int) -> Told:
    training = Training(rank, stage)
    return [*SCENARIOS[name](training), training.weights()]


def same(found: Any, expected: Any) -> bool:
    """NaN is the same as NaN."""
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, Tensor):
        return torch.equal(torch.nan_to_num(found, nan=1e30), torch.nan_to_num(expected, nan=1e30))
    return found == expected or (isinstance(expected, float) and math.isnan(expected) and math.isnan(found))


# -------------------------------------------------------------------------------------------------------------- values


@scenario
def nan_in_one_input_of_one_rank(training):
    yield training.step(training.batch(0))
    x = training.batch(1)
    if training.rank:
        x[0, 0] = torch.nan
    for step in range(2):
        yield training.step(x if step == 0 else training.batch(2))


@scenario
def gradients_that_are_clipped_by_a_norm_that_is_not_finite(training):
    for step, scale in enumerate([1.0, math.nan, 1.0]):
        yield training.step(training.batch(step), scale=scale, clip=1.0)


@scenario
def gradients_that_overflow(training):
    for step in range(2):
        yield training.step(training.batch(step) * 1e19)
    yield training.clip(1.0)


@scenario
def state_that_is_not_finite(training):
    yield training.step(training.batch(0))
    optimizer = getattr(training.optimizer, "optim", training.optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].fill_(math.nan)
        state["exp_avg_sq"].fill_(math.inf)
    yield training.step(training.batch(1))


@scenario
def weights_that_are_not_finite(training):
    with torch.no_grad():
        weights = {name: value.fill_(math.nan) for name, value in training.weights().items()}
    model = training.model.module if training.stage < 2 else training.model
    model.load_state_dict(weights)
    yield training.step(training.batch(0))
    yield training.step(training.batch(1), clip=1.0)


@scenario
def a_batch_of_no_rows_on_one_rank(training):
    for step in range(3):
        yield training.step(training.batch(step, rows=0 if training.rank == step % 2 else 4))


# ------------------------------------------------------------------------------------------------------ orders of calls


@scenario
def backward_twice_and_then_a_step(training):
    """The gradients of the first stay."""
    loss = training.model(training.batch(1)).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    training.optimizer.step()
    yield training.step(training.batch(2))


@scenario
def the_optimizer_is_gone_before_the_model(training):
    yield training.step(training.batch(0))
    training.optimizer = None
    gc.collect()
    with torch.no_grad():
        yield training.model(training.batch(1)).sum().item()
    (training.model(training.batch(1)).square().sum()).backward()


@scenario
def the_process_group_is_gone_between_steps(training):
    """The model and the optimizer hold it."""
    yield training.step(training.batch(0))
    DESTROYED.append(dist.group.WORLD)
    dist.destroy_process_group()
    for step in range(1, 3):
        yield training.step(training.batch(step))


@scenario
def each_step_in_a_thread_of_its_own(training):
    losses: list[float] = []
    for step in range(3):
        thread = threading.Thread(target=lambda step=step: losses.append(training.step(training.batch(step))))
        thread.start()
        thread.join()
    yield losses


@cache
def told_by_ddp(name: str) -> list[Told]:
    return ranks.run(told, args=(name, 0), timeout=20)


@matrix.combined("name, stage", SCENARIOS, STAGES, each=2)
def test_it_does_what_it_does_with_distributed_data_parallel(name, stage):
    expected = told_by_ddp(name)
    for rank, found in enumerate(ranks.run(told, args=(name, stage), timeout=20)):
        different = [number for number, value in enumerate(expected[rank]) if not same(found[number], value)]
        assert not different, f"rank {rank}: {[found[number] for number in different]}"


# --------------------------------------------------------------------------------------------------------- what is gone


def without_its_model(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    training = Training(rank, stage)
    for step in range(2):
        training.step(training.batch(step))
    training.optimizer.zero_grad()
    training.model(training.batch(2)).square().sum().backward()
    inner = training.inner
    training.model = None
    gc.collect()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.optimizer.step()
    training.optimizer.state_dict()
    return dict(inner.named_parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_steps_when_the_wrapper_is_gone(stage):
    """At stage 3 what it steps are shards."""
    expected = ranks.run(without_its_model, args=(0,))[0]
    by_rank = ranks.run(without_its_model, args=(stage,), timeout=20)
    for name, value in expected.items():
        shards = [found[name].flatten() for found in by_rank]
        assert torch.equal(torch.cat(shards) if stage == 3 else shards[0], value.flatten()), name


# --------------------------------------------------------------------------------------------------------------- depth


def nested(depth: int) -> nn.Module:
    inner: nn.Module = nn.Linear(WIDTH, WIDTH)
    for _ in range(depth):
        inner = nn.Sequential(inner)
    return inner


def deep(rank: int, world: int, stage: int) -> list[float]:
    training = Training(rank, stage, nested(100))
    return [training.step(training.batch(step)) for step in range(2)]


def deep_in_units(rank: int, world: int) -> list[float]:
    inner = nested(100)
    training = Training(rank, 0, inner)
    training.model = zero.FSDP(nested(100), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential, nn.Linear}))
    training.model.load_state_dict(inner.state_dict())
    training.optimizer = adamw(training.model.parameters())
    return [training.step(training.batch(step)) for step in range(2)]


class Endless(FeedForward):
    """Calls itself without end, when told."""

    endless = False

    def forward(self, x: Tensor) -> Tensor:
        return self(x) if self.endless else super().forward(x)


def endless(rank: int, world: int, stage: int) -> list[float]:
    training = Training(rank, stage, Stack(partial(Endless, WIDTH, 7), WIDTH, 3))
    losses = []
    for step in range(3):
        training.inner.blocks[1].endless = True
        with pytest.raises(RecursionError):
            training.step(training.batch(9))
        training.inner.blocks[1].endless = False
        losses.append(training.step(training.batch(step)))
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_modules_that_are_nested_deeply_train(stage):
    torch.manual_seed(0)
    expected = ranks.run(deep, args=(0,), timeout=20)
    assert ranks.run(deep, args=(stage,), timeout=20) == expected
    if stage == 3:
        assert all(map(math.isfinite, ranks.run(deep_in_units, timeout=20)[0]))


@pytest.mark.filterwarnings("ignore:module forward hook with:UserWarning")  # at its end no hook can be called either
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_after_a_recursion_without_end(stage):
    assert ranks.run(endless, args=(stage,), timeout=30) == ranks.run(endless, args=(0,), timeout=30)


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


class Interrupting(nn.Module):
    """Raises SIGINT in its third forward or backward."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.moment, self.count = moment, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == 3 and self.moment == "forward":
            signal.raise_signal(signal.SIGINT)
        if self.count == 3 and self.moment == "backward":
            x = x.clone()
            x.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
        return x


def interrupted(rank: int, port: int, stage: int, moment: str, only: int | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traceback
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{stage}", store), rank=rank, world_size=2)
    mine = only is None or only == rank
    block = lambda: nn.Sequential(FeedForward(WIDTH, 7), Interrupting(moment if mine else ""))  # noqa: E731
    training = Training(rank, stage, Stack(block, WIDTH, 3, blocks=1))
    for step in range(50):
        if step == 2 and moment == "step" and mine:
            optimizer: Optimizer = getattr(training.optimizer, "optim", training.optimizer)
            optimizer.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        training.step(training.batch(step))


@matrix.combined("moment, only", ["forward", "backward", "step"], [None, 1])
def test_an_interrupt_ends_every_process(moment, only):
    """Where it reaches one rank only, the others end too, of its going away."""
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pairs = [(stage, rank) for stage in STAGES for rank in range(2)]
    processes = [
        context.Process(target=interrupted, args=(rank, store.port, stage, moment, only), daemon=True)
        for stage, rank in pairs
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(20)
        assert [(pair, process.exitcode) for pair, process in zip(pairs, processes, strict=True)] == [
            (pair, 1) for pair in pairs
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()
