"""The Trainer's callback that reports memory, called as the Trainer calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import on_ranks
from torch import nn
from torch.optim import Adam

import zero

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


def steps(rank: int, world: int, stage: int) -> tuple[Any, dict[str, Any]]:
    from zero.integrations.transformers_report import MemoryCallback

    inner = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model, optimizer = zero.setup(inner, Adam, stage=stage)
    callback, state = MemoryCallback(every=2), SimpleNamespace(global_step=0, is_world_process_zero=rank == 0)
    wrapped = SimpleNamespace(optimizer=optimizer)  # as Accelerate does
    logs: dict[str, Any] = {"loss": 1.0}
    for step in range(3):
        state.global_step = step
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        callback.on_pre_optimizer_step(None, state, None, model=inner, optimizer=wrapped)
        optimizer.step()
    callback.on_log(None, state, None, logs=logs)
    assert callback.report is not None
    return callback.report.stage, logs


@pytest.mark.parametrize("stage", [2, 3])
def test_the_logs_have_memory_by_kind(stage):
    full = 4 * (16 * 16 + 16) * 4  # in one unit
    for found, logs in on_ranks("test_transformers_report", "steps", stage):
        assert found == str(stage)
        assert logs["loss"] == 1.0
        assert logs["zero/sent_bytes"] == pytest.approx(full, rel=0.1)  # half of the gradients, half of the parameters
        assert logs["zero/gradients_bytes"] > 0
