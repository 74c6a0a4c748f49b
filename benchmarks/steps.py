"""Training steps of the small GPT, by plain DistributedDataParallel, by torch's own sharded optimizer, and by zero."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

import zero
from gpt import draw_batch, read_text
from launch import Rank
from measure import SEED, WARM_UP, Settings, build_model, read_cpu_seconds, wait_for_device
from turns import Turn, take_turns

LEARNING_RATE = 1e-3
WORLD, TURNS = 2, 5

Built = tuple[nn.Module, Optimizer]


def build_ddp(model: nn.Module) -> Built:
    return DistributedDataParallel(model), Adam(model.parameters(), lr=LEARNING_RATE)


def build_zero_redundancy(model: nn.Module) -> Built:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    return DistributedDataParallel(model), ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=Adam, lr=LEARNING_RATE
    )


def build_oss(model: nn.Module) -> Built:
    return DistributedDataParallel(model), zero.OSS(model.parameters(), optim=Adam, lr=LEARNING_RATE)


def build_sharded_ddp(model: nn.Module) -> Built:
    optimizer = zero.OSS(model.parameters(), optim=Adam, lr=LEARNING_RATE)
    return zero.ShardedDDP(model, optimizer), optimizer


def default_settings() -> Settings:
    return Settings(steps=8, layers=6, width=384, optim="adam", text=read_text())


def measure_steps(build: Callable[[nn.Module], Built], settings: Settings, rank: Rank) -> dict[str, Any]:
    """The median step, the mean CPU time of one, and the losses."""
    model, optimizer = build(build_model(settings, rank.device))
    losses: list[float] = []
    seconds: list[float] = []
    cpu_seconds = 0.0
    for step in range(settings.steps):
        if step == WARM_UP:
            cpu_seconds = read_cpu_seconds()
        tokens, targets = draw_batch(settings.text, seed=SEED, step=step, rank=rank.rank)
        wait_for_device(rank.device)
        begin = time.perf_counter()
        loss: torch.Tensor = model(tokens.to(rank.device), targets.to(rank.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_for_device(rank.device)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    timed = settings.steps - WARM_UP
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "cpu_seconds": (read_cpu_seconds() - cpu_seconds) / timed,
        "losses": losses,
    }


def compare_steps(builds: Mapping[str, Callable[[nn.Module], Built]]) -> dict[str, list[Turn]]:
    """The same training by each in turn; they must have the same losses."""
    settings = default_settings()
    variants = {name: partial(measure_steps, build, settings) for name, build in builds.items()}
    taken = take_turns(variants, world=WORLD, turns=TURNS)
    losses = [turn.ranks[0]["losses"] for turns in taken.values() for turn in turns]
    assert all(each == losses[0] for each in losses), "not the same training"
    return taken
