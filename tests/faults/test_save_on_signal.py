"""docs/examples/save_on_signal.py: one rank is told to end, all save after the same step, and the run goes on."""

import os
import signal
from unittest import mock

import pytest
from torch import nn

import ranks
import zero
from assertions import same
from examples import run_example

STEPS = 12


def train(rank, world, folder, told=None, at=0, number=None):
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
        assert [calls for _, calls in ranks.run(train, 2, (stopped, told, at, number), fresh=True)] == [at, at]
    resumed = ranks.run(train, 2, (stopped,), fresh=True)
    expected = ranks.run(train, 2, (whole,), fresh=True)
    for (found, calls), (weights, _) in zip(resumed, expected, strict=True):
        assert calls == STEPS - 3 - 4
        same(found, weights)
