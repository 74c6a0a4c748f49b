"""docs/examples/train_gpt.py: the same losses at every stage, interrupted and resumed or not."""

import argparse
import contextlib
import io
import runpy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from processes import ROOT, python

SCRIPT = ROOT / "docs" / "examples" / "train_gpt.py"
Losses = dict[int, float]
TINY = {"batch_size": 8, "context": 8, "width": 8, "layers": 1}


@cache
def example() -> Any:
    return runpy.run_path(str(SCRIPT))["train"]


def trained(output: str, stage: int, **how: Any) -> tuple[Losses, Losses]:
    text = Path(output).parent / "text"
    fixed = {"start": None, "bf16": False, "compile": False, "accumulate": 2, "lr": 0.01, "steps": 3}
    fixed["max_norm"] = 1e6  # which scales by 1: sums of squares are added up in another order at each stage
    given = {**fixed, **TINY, **how, "output": output, "text": text, "stage": stage, "save_every": 1}
    with contextlib.redirect_stdout(io.StringIO()):
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return example()(argparse.Namespace(**given), torch.device("cpu"), rank, world)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "text").write_text("".join(chr(97 + number * number % 25) for number in range(1200)))
    return str(tmp_path)


def trainings(rank: int, world: int, folder: str) -> tuple[list[Any], Any, list[Any]]:
    """Losses at each stage; of a run that each step goes on at another one; and of runs that clip, and start from the
    file of full weights of stage 2, which rank 0 reads."""
    whole = [trained(f"{folder}/{stage}", stage, bf16=True) for stage in range(4)]
    parts: tuple[Losses, Losses] = {}, {}
    for step, stage in enumerate((3, 2, 0), 1):
        for together, found in zip(parts, trained(f"{folder}/parts", stage, steps=step, bf16=True), strict=True):
            together.update(found)
    how = {"steps": 1, "start": f"{folder}/2/full.pt", "max_norm": 0.1}
    return whole, parts, [trained(f"{folder}/from {stage}", stage, **how) for stage in (0, 2, 3)]


@pytest.mark.slow
def test_losses_are_the_same_at_every_stage_interrupted_and_started_from_a_file(folder):
    for (plain, *sharded), parts, (from_file, *others) in ranks.run(trainings, 2, (folder,)):
        losses, evaluated = plain
        assert len(losses) == 3 and evaluated[3] < evaluated[1]
        assert [*sharded, parts] == [plain] * 4
        assert all(
            found == pytest.approx(one, rel=1e-5) for pair in others for found, one in zip(pair, from_file, strict=True)
        )
        assert from_file[0][1] < losses[1]


@pytest.mark.slow
def test_it_runs_alone_as_a_command(folder):
    tiny = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", value)]
    told = python(SCRIPT, "--steps", 2, "--text", "text", *tiny, cwd=Path(folder)).stdout
    assert told.startswith("step 2: evaluated ")
    assert find_spec("matplotlib") is None or Path(folder, "run", "training.svg").exists()
    full = torch.load(f"{folder}/run/full.pt")
    assert full["weights"]["head.weight"].shape == full["average"]["head.weight"].shape == (256, 8)
