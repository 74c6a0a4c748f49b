"""The script that goes on after a failure, docs/examples/resume.py: killed at each stage, told to end, and with other
ranks.

`make faults` sets ZERO_FAULTS=1 and starts it by torchrun, too: killed ten times at each stage, told to end, and by two
agents, of which one is lost and comes back.
"""

import contextlib
import io
import os
import random
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from spot import APART, Agent, losses_of, said, script, wait_for, wait_for_steps
from torch import nn

import matrix
import ranks
import zero
from assertions import same
from examples import run_example

SAVE_EVERY = 20
TWO = "--standalone --nproc-per-node 2 --max-restarts 13"

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

    with (
        mock.patch.object(zero.checkpoint, "save", save_and_stop),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(KeyboardInterrupt),
    ):
        return zero.full_state_dict(run_example("resume", folder, stage, steps, save_every)["model"], to=0)


def run(world: int, *given: Any) -> Any:
    """In new processes: the script handles signals."""
    return ranks.run(train, world, given, fresh=True)[0]


def test_a_run_killed_at_each_stage_in_turn_ends_with_the_bits_of_one_that_was_not(tmp_path):
    for stage, stop in ((1, 5), (2, 15)):
        with pytest.raises(ranks.RankError, match="died with exit code -9"):
            run(2, str(tmp_path / "killed"), stage, 20, stop, stage % 2)
    resumed = run(2, str(tmp_path / "killed"), 3, 20)
    same(resumed, run(2, str(tmp_path / "whole"), 3, 20))


@pytest.mark.filterwarnings("ignore:resume/.* differed between the . ranks:UserWarning")  # Python's own generator
def test_a_run_comes_back_with_fewer_and_with_more_ranks(tmp_path):
    run(2, str(tmp_path / "changing"), 3, 15, 5)
    run(1, str(tmp_path / "changing"), 3, 15, 10)
    changing = run(3, str(tmp_path / "changing"), 3, 15)
    torch.testing.assert_close(changing, run(2, str(tmp_path / "whole"), 3, 15), rtol=1e-4, atol=1e-5)


STEPS = 12


def train_until_told(rank, world, folder, told=None, at=0, number=None):
    """The weights, how many steps were made, and with what the script ended. told: the rank that a signal reaches,
    alone, in the middle of the forward of its step `at`."""
    forward, calls, models = nn.GELU.forward, [], []
    setup = zero.setup

    def told_in_forward(module, x):
        calls.append(x)
        if rank == told and len(calls) == at:
            os.kill(os.getpid(), number)
        return forward(module, x)

    def kept(*args, **options):
        models.append(setup(*args, **options))
        return models[-1]

    ended = None
    with mock.patch.object(nn.GELU, "forward", told_in_forward), mock.patch.object(zero, "setup", kept):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run_example("resume", folder, written="1000", instead=str(STEPS))
        except SystemExit as end:
            ended = end.code
        return zero.full_state_dict(models[0][0], to=0), len(calls), ended


def test_a_signal_to_one_rank_saves_all_at_one_step_and_the_run_goes_on_with_the_same_bits(tmp_path):
    """The rank that was told ends as one that is done; the other with an error, by which torchrun starts anew."""
    stopped, whole = str(tmp_path / "stopped"), str(tmp_path / "whole")
    for told, at, number in ((1, 3, signal.SIGUSR1), (0, 4, signal.SIGTERM)):
        found = ranks.run(train_until_told, 2, (stopped, told, at, number), fresh=True)
        assert [(calls, bool(ended)) for _, calls, ended in found] == [(at, rank != told) for rank in range(2)]
    resumed = ranks.run(train_until_told, 2, (stopped,), fresh=True)
    expected = ranks.run(train_until_told, 2, (whole,), fresh=True)
    for (found, calls, ended), (weights, _, _) in zip(resumed, expected, strict=True):
        assert calls == STEPS - 3 - 4 and ended is None
        same(found, weights)


# Under torchrun, by the commands of the page.


def kill_one(agent: Agent, folder: Path, moments: random.Random) -> bool:
    """After a random number of checkpoints and a random time. Whether there was a rank left to kill."""
    latest = folder / "latest"
    for _ in range(moments.randint(0, 2)):
        before = text_of(latest)
        while text_of(latest) == before and not agent.ended:
            time.sleep(0.005)
    time.sleep(moments.uniform(0, 0.1))
    while not (alive := agent.ranks()):
        if agent.ended:
            return False
        time.sleep(0.01)
    victim = moments.choice(sorted(alive))
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    while victim in agent.ranks() and not agent.ended:
        time.sleep(0.01)
    return True


def text_of(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""


under_torchrun = pytest.mark.skipif(
    not matrix.FAULTS, reason="make faults runs it; above, ranks are killed without torchrun"
)


@under_torchrun
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_under_torchrun_a_run_killed_at_random_moments_ends_with_the_bits_of_one_that_was_not(stage, tmp_path):
    kills, moments = 10, random.Random(stage)
    steps = SAVE_EVERY * 3 * (kills + 1)
    given = [stage, steps, SAVE_EVERY]
    killed_in, whole = tmp_path / "killed", tmp_path / "whole"
    with Agent(TWO, script(tmp_path), killed_in, *given) as agent:
        killed = sum(kill_one(agent, killed_in, moments) for _ in range(kills))
        assert agent.process.wait(500) == 0, agent.log.read_text()
    assert killed == kills, "the run came to its end before all kills"
    with Agent(TWO, script(tmp_path), whole, *given) as undisturbed:
        assert undisturbed.process.wait(100) == 0
    assert losses_of(agent) == losses_of(undisturbed) and len(losses_of(agent)) == steps
    same(run(2, str(killed_in), stage, steps), run(2, str(whole), stage, steps))


@under_torchrun
@pytest.mark.timeout(400)
def test_under_torchrun_a_rank_and_then_the_agent_are_told_to_end_and_no_step_is_lost(tmp_path):
    given = [script(tmp_path, seconds=0.03), tmp_path / "told", 3, 300, 1000]  # saved where told alone
    with Agent(TWO, *given) as agent:
        wait_for_steps(20, agent)
        os.kill(max(agent.ranks()), signal.SIGTERM)
        wait_for_steps(40, agent)
        agent.process.terminate()
        assert agent.process.wait(60) != 0
    with Agent(TWO, *given) as again:
        assert again.process.wait(100) == 0
    with Agent(TWO, script(tmp_path), tmp_path / "whole", *given[2:]) as undisturbed:
        assert undisturbed.process.wait(100) == 0
    assert [step for step, _ in said(agent.log, again.log)] == [*range(1, 301)]
    assert losses_of(agent, again) == losses_of(undisturbed)


@under_torchrun
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["killed", "told"])
def test_one_of_two_agents_leaves_with_its_rank_and_comes_back(way, tmp_path):
    """The other goes on alone, and both go on once it is back: the losses are those of an undisturbed run, before it
    left bit for bit, later within rounding. Told by SIGTERM, it saves: no step is made twice."""
    kept = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False
    )  # by neither, so that both start at once
    launch = (
        f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint localhost:{kept.port}"
    )
    launch += " --rdzv-conf last_call_timeout=10"
    given = [script(tmp_path, seconds=0.1), tmp_path / "run", 3, 1000, 20]
    with Agent(launch, *given) as first:
        with Agent(launch, *given) as second:
            wait_for_steps(30, first, second)
            if way == "killed":
                second.kill()
            else:
                second.process.terminate()
                second.process.wait(60)
        before = losses_of(first, second)
        wait_for_steps(20, first)
        with Agent(launch, *given) as back:
            wait_for(lambda: first.worlds()[-2:] == [1, 2] or back.worlds()[-1:] == [2], first)
            (tmp_path / "fast").touch()
            for one in (first, back):
                assert one.process.wait(100) == 0, one.log.read_text()
    with Agent(TWO, script(tmp_path), tmp_path / "whole", *given[2:]) as undisturbed:
        assert undisturbed.process.wait(100) == 0
    expected, found = losses_of(undisturbed), losses_of(first, second, back)
    assert sorted(world for one in (first, second, back) for world in one.worlds()) == [1, 2, 2]
    assert before.items() <= expected.items()
    assert way == "killed" or len(said(first.log, second.log, back.log)) == len(found)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, {step: expected[step] for step in found}, rtol=1e-3, atol=0)


@under_torchrun
@pytest.mark.timeout(400)
def test_others_say_once_that_they_wait_for_a_slow_rank_and_go_on(tmp_path):
    given = [3, 20, 1000]
    with Agent(TWO, script(tmp_path, once=33), tmp_path / "slow", *given, **APART) as slow:
        assert slow.process.wait(200) == 0
    with Agent(TWO, script(tmp_path), tmp_path / "whole", *given, **APART) as undisturbed:
        assert undisturbed.process.wait(100) == 0
    (line,) = [line for line in slow.log.read_text().splitlines() if "has waited" in line]
    assert line.startswith("zero: rank 0 has waited 30 s for rank 1 in "), line
    assert losses_of(slow) == losses_of(undisturbed)
