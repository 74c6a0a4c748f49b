"""The whole script, docs/examples/train_gpt.py: the same losses at every stage, interrupted and resumed or not."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from processes import ROOT, python

SCRIPT = ROOT / "docs" / "examples" / "train_gpt.py"
STEPS, SAVE_EVERY = 6, 2
TINY = {"batch_size": 2, "context": 8, "width": 8, "layers": 2}
HOW: dict[str, dict[str, Any]] = {
    "float32": {"max_norm": 1e6},  # clipping scales by 1: sums of squares are added up in another order at each stage
    "bf16": {"max_norm": 1e6, "bf16": True},
    "clipped": {"max_norm": 0.1},
}


@cache
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(output: str, stage: int, steps: int = STEPS, **how: Any) -> list[float]:
    text = Path(output).parent / "text"
    fixed = {"start": None, "bf16": False, "compile": False, "accumulate": 2, "lr": 0.01, "save_every": SAVE_EVERY}
    given = {**fixed, **TINY, **how, "output": output, "text": text, "stage": stage, "steps": steps}
    with contextlib.redirect_stdout(io.StringIO()):
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return example().train(argparse.Namespace(**given), torch.device("cpu"), rank, world)


def at_every_stage(rank: int, world: int, folder: str, how: str) -> list[list[float]]:
    return [trained(f"{folder}/{how}{stage}", stage, **HOW[how]) for stage in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "text").write_text("".join(chr(97 + number * number % 25) for number in range(1200)))
    return str(tmp_path)


@pytest.mark.parametrize("how", HOW)
def test_losses_are_the_same_at_every_stage(folder, how):
    for plain, *sharded in ranks.run(at_every_stage, 2, (folder, how)):
        assert plain[-1] < plain[2 * SAVE_EVERY]  # those of the evaluations
        assert all(found == pytest.approx(plain, rel=1e-5) if how == "clipped" else found == plain for found in sharded)


def interrupted(rank: int, world: int, folder: str) -> tuple[list[float], list[float]]:
    """The losses of a run at stage 3, and of one that goes on at another stage every other step."""
    whole = trained(f"{folder}/whole", 3, **HOW["bf16"])
    parts = []
    for number, stage in enumerate((3, 2, 0)):
        parts += trained(f"{folder}/parts", stage, SAVE_EVERY * (number + 1), **HOW["bf16"])
    return whole, parts


def test_a_run_that_is_interrupted_goes_on_to_the_same_losses_at_another_stage(folder):
    for whole, parts in ranks.run(interrupted, 2, (folder,)):
        assert parts == whole


def started(rank: int, world: int, folder: str) -> list[list[float]]:
    """The losses of trainings that start from the file of full weights of another one, which rank 0 reads."""
    trained(f"{folder}/first", 2, **HOW["float32"])
    start = f"{folder}/first/full.pt"
    return [trained(f"{folder}/{stage}", stage, start=start, **HOW["float32"]) for stage in range(4)]


def test_a_run_starts_from_the_file_that_another_has_saved(folder):
    for plain, *sharded in ranks.run(started, 2, (folder,)):
        assert sharded == [plain] * 3


def test_it_runs_alone_as_a_command(folder):
    tiny = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", value)]
    told = python(SCRIPT, "--steps", 2, "--text", "text", *tiny, cwd=Path(folder)).stdout
    assert told.startswith("step 2: evaluated ")
    full = torch.load(f"{folder}/run/full.pt")
    assert full["weights"]["head.weight"].shape == full["average"]["head.weight"].shape == (256, 8)
