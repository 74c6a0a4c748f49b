"""The script that goes on after a failure, docs/examples/resume.py: killed at random moments, and with other ranks.

`make faults` sets ZERO_FAULTS=1 and kills it under torchrun, too, ten times at each stage.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ranks
import zero

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "examples" / "resume.py"
WHOLE = bool(os.environ.get("ZERO_FAULTS"))
SAVE_EVERY = 20


@cache
def example() -> Any:
    spec = importlib.util.spec_from_file_location("resume", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Torchrun:
    """The command, with the script."""

    def __init__(self, folder: Path, stage: int, steps: int, restarts: int) -> None:
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts {restarts}".split()
        options = f"--stage {stage} --steps {steps} --save-every {SAVE_EVERY}".split()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, *launcher, str(SCRIPT), str(folder), *options], env=environment
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ranks(self) -> set[int]:
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child) for child in children if SCRIPT.name in command_of(int(child))}

    def wait(self) -> int:
        return self._process.wait(500)

    def end(self) -> None:
        self._process.terminate()


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def latest(folder: Path) -> str:
    with suppress(OSError):
        return (folder / "latest").read_text()
    return ""


def kill_one(launcher: Torchrun, folder: Path, moments: random.Random) -> bool:
    """After a random number of checkpoints and a random time. Whether there was a rank left to kill."""
    for _ in range(moments.randint(0, 2)):
        before = latest(folder)
        while latest(folder) == before and not launcher.ended:
            time.sleep(0.005)
    time.sleep(moments.uniform(0, 0.1))
    while not (alive := launcher.ranks()):
        if launcher.ended:
            return False
        time.sleep(0.01)
    victim = moments.choice(sorted(alive))
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    while victim in launcher.ranks() and not launcher.ended:
        time.sleep(0.01)
    return True


def assert_uninterrupted(weights: dict[str, torch.Tensor], folder: Path, stage: int, steps: int) -> None:
    """That the weights are bit for bit those of a run that was never killed."""
    uninterrupted = ranks.run(train, 2, (str(folder), stage, steps))[0]
    assert weights.keys() == uninterrupted.keys()
    for name, weight in uninterrupted.items():
        assert torch.equal(weights[name], weight), f"{name} is off by {(weights[name] - weight).abs().max()}"


@pytest.mark.timeout(900)
@pytest.mark.skipif(not WHOLE, reason="make faults runs it; below, ranks are killed without torchrun")
@pytest.mark.parametrize(("stage", "kills"), [(1, 10), (2, 10), (3, 10)])
def test_under_torchrun_a_run_killed_at_random_moments_ends_with_the_bits_of_one_that_was_not(stage, kills, tmp_path):
    folder, moments = tmp_path / "killed", random.Random(stage)
    steps = SAVE_EVERY * 3 * (kills + 1)
    launcher = Torchrun(folder, stage, steps, restarts=kills + 3)
    try:
        killed = sum(kill_one(launcher, folder, moments) for _ in range(kills))
        assert launcher.wait() == 0
    finally:
        launcher.end()
    assert killed == kills, "the run came to its end before all kills"
    resumed = torch.load(folder / "weights.pt", weights_only=True)
    assert_uninterrupted(resumed, tmp_path / "whole", stage, steps)


def train_until_killed(rank: int, world: int, folder: str, stage: int, steps: int, victim: int, delay: float) -> None:
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    train(rank, world, folder, stage, steps)


def test_a_run_killed_at_each_stage_in_turn_ends_with_the_bits_of_one_that_was_not(tmp_path):
    folder, steps, moments = str(tmp_path / "killed"), 15 * SAVE_EVERY, random.Random(0)
    for stage in (1, 2, 3):
        with pytest.raises(ranks.RankError, match="died with exit code -9"):
            ranks.run(train_until_killed, 2, (folder, stage, steps, stage % 2, moments.uniform(0.05, 0.25)))
    resumed = ranks.run(train, 2, (folder, 3, steps))[0]
    assert_uninterrupted(resumed, tmp_path / "whole", 3, steps)


def train(rank: int, world: int, folder: str, stage: int, steps: int, stop: int | None = None) -> Any:
    """The script's own function. stop: after so many steps, as if it had been killed there."""
    with mock.patch.object(zero.checkpoint, "save", stopping(stop)) if stop else nullcontext(), suppress(Stopped):
        return example().train(folder, stage=stage, steps=steps, save_every=SAVE_EVERY)
    return None


class Stopped(Exception):
    pass


def stopping(stop: int) -> Callable[..., None]:
    save = zero.checkpoint.save

    def save_and_stop(*args: Any, extra: dict[str, Any], **options: Any) -> None:
        save(*args, extra=extra, **options)
        if extra["step"] == stop:
            raise Stopped

    return save_and_stop


def test_a_run_comes_back_with_fewer_and_with_more_ranks(tmp_path):
    steps = 3 * SAVE_EVERY
    ranks.run(train, 2, (str(tmp_path / "changing"), 3, steps, SAVE_EVERY))
    ranks.run(train, 1, (str(tmp_path / "changing"), 3, steps, 2 * SAVE_EVERY))
    changing = ranks.run(train, 3, (str(tmp_path / "changing"), 3, steps))
    uninterrupted = ranks.run(train, 2, (str(tmp_path / "whole"), 3, steps))[0]
    for found in changing:
        for name, weight in uninterrupted.items():
            assert torch.allclose(found[name], weight, rtol=1e-4, atol=1e-5), name
