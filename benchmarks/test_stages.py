"""Every stage by its number: the time of a step, of clipping, and of a checkpoint."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

import zero
from gpt import draw_batch
from launch import Rank
from measure import SEED, build_model
from steps import LEARNING_RATE, Built, default_settings, measure_steps
from turns import Clock, Turn, repeat, report, take_turns

WORLD, TURNS = 2, 3
STAGES = {"stage 0": 0, "stage 1": 1, "stage 2": 2, "stage 3": 3}
clock = Clock()

pytestmark = pytest.mark.timeout(900)


def build_stage(stage: int, model: nn.Module) -> Built:
    return zero.setup(model, Adam, stage=stage, lr=LEARNING_RATE)


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Turn]]:
    settings = default_settings()
    variants = {name: partial(measure_steps, partial(build_stage, stage), settings) for name, stage in STAGES.items()}
    return take_turns(variants, world=WORLD, turns=TURNS)


@pytest.mark.benchmark(group="a step at every stage", timer=clock)
@pytest.mark.parametrize("name", STAGES)
def test_step(benchmark: Any, steps: dict[str, list[Turn]], name: str) -> None:
    for turn, plain in zip(steps[name], steps["stage 0"], strict=True):
        assert turn.ranks[0]["losses"] == plain.ranks[0]["losses"], "not the same training"
    report(benchmark, clock, steps, name)


def train_once(stage: int, rank: Rank) -> tuple[nn.Module, Optimizer]:
    """After a backward, with gradients, and state from the step before."""
    settings = default_settings()
    model, optimizer = build_stage(stage, build_model(settings, rank.device))
    for step in range(2):
        tokens, targets = draw_batch(settings.text, seed=SEED, step=step, rank=rank.rank)
        model(tokens.to(rank.device), targets.to(rank.device)).backward()
        if not step:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def measure_clipping(stage: int, rank: Rank) -> dict[str, Any]:
    model, optimizer = train_once(stage, rank)
    if isinstance(model, zero.FSDP):
        clip: Callable[[float], torch.Tensor] = model.clip_grad_norm_
    elif isinstance(optimizer, zero.OSS):
        clip = optimizer.clip_grad_norm
    else:
        clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()])
    norm = clip(1e9).item()  # clips nothing, so that it stays the same
    return {**repeat(lambda: clip(1.0), rank, times=50), "norm": norm}


@pytest.fixture(scope="module")
def clippings() -> dict[str, list[Turn]]:
    variants = {name: partial(measure_clipping, stage) for name, stage in STAGES.items()}
    return take_turns(variants, world=WORLD, turns=TURNS)


@pytest.mark.benchmark(group="clipping at every stage", timer=clock)
@pytest.mark.parametrize("name", STAGES)
def test_clipping(benchmark: Any, clippings: dict[str, list[Turn]], name: str) -> None:
    expected = clippings["stage 0"][0].ranks[0]["norm"]
    assert clippings[name][0].ranks[0]["norm"] == pytest.approx(expected, rel=1e-5)
    report(benchmark, clock, clippings, name)


def measure_checkpoint(job: str, stage: int, folder: str, rank: Rank) -> dict[str, Any]:
    """Of 123 MB: parameters and Adam's state."""
    model, optimizer = train_once(stage, rank)
    path = Path(folder) / f"stage{stage}"
    zero.checkpoint.save(path, model, optimizer, keep=1)
    if job == "save":
        return repeat(lambda: zero.checkpoint.save(path, model, optimizer, keep=1), rank, times=5)
    return repeat(lambda: zero.checkpoint.load(path, model, optimizer), rank, times=5)


JOBS = {f"{job}, {name}": (job, stage) for job in ("save", "load") for name, stage in STAGES.items() if stage in (1, 3)}


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, list[Turn]]:
    with tempfile.TemporaryDirectory() as folder:
        variants = {name: partial(measure_checkpoint, job, stage, folder) for name, (job, stage) in JOBS.items()}
        return take_turns(variants, world=WORLD, turns=TURNS)


@pytest.mark.benchmark(group="a checkpoint", timer=clock)
@pytest.mark.parametrize("name", JOBS)
def test_checkpoint(benchmark: Any, checkpoints: dict[str, list[Turn]], name: str) -> None:
    report(benchmark, clock, checkpoints, name)
