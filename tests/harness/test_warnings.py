"""Warnings point to the line of the user that brought them about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero


def here(warned: Any) -> list[bool]:
    return [one.filename == __file__ for one in warned]


def test_files_that_are_read(tmp_path: Path) -> None:
    from zero.integrations.accelerate import ZeroPlugin

    file = tmp_path / "config.yaml"
    section = "zero_stage: 2, offload_param_device: cpu, deepspeed_hostfile: hosts"
    file.write_text(f"deepspeed_config: {{{section}}}\n")
    with pytest.warns(UserWarning, match="deepspeed_hostfile|offload_param_device") as warned:
        ZeroPlugin.from_yaml(file)
    assert here(warned) == [True, True]


@ranks.on(2)
def test_steps(rank: int, world: int) -> None:
    optimizer = zero.OSS(nn.Linear(4, 4).parameters(), torch.optim.Adam, lr=0.1)
    optimizer.step()
    with pytest.warns(UserWarning, match="found no gradient") as warned:
        optimizer.step()
    assert here(warned) == [True]
