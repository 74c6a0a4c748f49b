"""The script that goes on after a failure, docs/examples/resume.py: killed at each stage, and with other ranks.

`make faults` sets ZERO_FAULTS=1 and kills it under torchrun, too, ten times at each stage.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import matrix
import ranks
import zero
from assertions import same
from examples import EXAMPLES, run_example

ROOT = Path(__file__).parents[2]
SCRIPT = EXAMPLES / "resume.py"
SAVE_EVERY = 20

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def train(
    rank: int, world: int, folder: str, stage: int, steps: int, stop: int = 0, victim: int = -1, save_every: int = 5
) -> Any:
    """The weights at the script's end. stop: the step after whose save it stops, and with it the victim dies, if there
    is one."""
    save = zero.checkpoint.save

    def save_and_stop(*args: Any, extra: dict[str, Any], **options: Any) -> None:
        save(*args, extra=extra, **options)
        if extra["step"] == stop and victim in (-1, rank):
            os.kill(os.getpid(), signal.SIGKILL) if victim == rank else None
            raise KeyboardInterrupt

    with mock.patch.object(zero.checkpoint, "save", save_and_stop), suppress(KeyboardInterrupt):
        return zero.full_state_dict(run_example("resume", folder, stage, steps, save_every)["model"], to=0)


def test_a_run_killed_at_each_stage_in_turn_ends_with_the_bits_of_one_that_was_not(tmp_path):
    for stage, stop in ((1, 5), (2, 15)):
        with pytest.raises(ranks.RankError, match="died with exit code -9"):
            ranks.run(train, 2, (str(tmp_path / "killed"), stage, 20, stop, stage % 2))
    resumed = ranks.run(train, 2, (str(tmp_path / "killed"), 3, 20))[0]
    same(resumed, ranks.run(train, 2, (str(tmp_path / "whole"), 3, 20))[0])


@pytest.mark.filterwarnings("ignore:resume/.* differed between the . ranks:UserWarning")  # Python's own generator
def test_a_run_comes_back_with_fewer_and_with_more_ranks(tmp_path):
    ranks.run(train, 2, (str(tmp_path / "changing"), 3, 15, 5))
    ranks.run(train, 1, (str(tmp_path / "changing"), 3, 15, 10))
    changing = ranks.run(train, 3, (str(tmp_path / "changing"), 3, 15))[0]
    uninterrupted = ranks.run(train, 2, (str(tmp_path / "whole"), 3, 15))[0]
    torch.testing.assert_close(changing, uninterrupted, rtol=1e-4, atol=1e-5)


class Torchrun:
    def __init__(self, folder: Path, stage: int, steps: int, restarts: int) -> None:
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts {restarts}".split()
        options = f"{stage} {steps} {SAVE_EVERY}".split()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *launcher, str(SCRIPT), str(folder), *options]
        self.process = subprocess.Popen(command, env=environment)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def ranks(self) -> set[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child) for child in children if SCRIPT.name in text_of(Path(f"/proc/{child}/cmdline"))}


def text_of(file: Path) -> str:
    with suppress(OSError):
        return file.read_text()
    return ""


def kill_one(launcher: Torchrun, folder: Path, moments: random.Random) -> bool:
    """After a random number of checkpoints and a random time. Whether there was a rank left to kill."""
    for _ in range(moments.randint(0, 2)):
        before = text_of(folder / "latest")
        while text_of(folder / "latest") == before and not launcher.ended:
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


@pytest.mark.timeout(900)
@pytest.mark.skipif(not matrix.FAULTS, reason="make faults runs it; above, ranks are killed without torchrun")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_under_torchrun_a_run_killed_at_random_moments_ends_with_the_bits_of_one_that_was_not(stage, tmp_path):
    kills, moments = 10, random.Random(stage)
    steps = SAVE_EVERY * 3 * (kills + 1)
    launcher = Torchrun(tmp_path / "killed", stage, steps, restarts=kills + 3)
    try:
        killed = sum(kill_one(launcher, tmp_path / "killed", moments) for _ in range(kills))
        assert launcher.process.wait(500) == 0
    finally:
        launcher.process.terminate()
    assert killed == kills, "the run came to its end before all kills"
    resumed = ranks.run(train, 2, (str(tmp_path / "killed"), stage, steps))[0]
    same(resumed, ranks.run(train, 2, (str(tmp_path / "whole"), stage, steps, 0, -1, SAVE_EVERY))[0])


# docs/examples/save_on_signal.py: one rank is told to end, all save after the same step, and the run goes on.


STEPS = 12


def train_until_told(rank, world, folder, told=None, at=0, number=None):
    """told: the rank that a signal reaches, alone, in the middle of the forward of its step `at`."""
    forward, calls = nn.GELU.forward, []

    def told_in_forward(module, x):
        calls.append(x)
        if rank == told and len(calls) == at:
            os.kill(os.getpid(), number)
        return forward(module, x)

    with mock.patch.object(nn.GELU, "forward", told_in_forward):
        model = run_example("save_on_signal", folder, written="1000", instead=str(STEPS))["model"]
        return zero.full_state_dict(model, to=0), len(calls)


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_all_at_one_step_and_the_run_goes_on_with_the_same_bits(tmp_path):
    stopped, whole = str(tmp_path / "stopped"), str(tmp_path / "whole")
    for told, at, number in ((1, 3, signal.SIGUSR1), (0, 4, signal.SIGTERM)):
        assert [calls for _, calls in ranks.run(train_until_told, 2, (stopped, told, at, number), fresh=True)] == [
            at,
            at,
        ]
    resumed = ranks.run(train_until_told, 2, (stopped,), fresh=True)
    expected = ranks.run(train_until_told, 2, (whole,), fresh=True)
    for (found, calls), (weights, _) in zip(resumed, expected, strict=True):
        assert calls == STEPS - 3 - 4
        same(found, weights)
