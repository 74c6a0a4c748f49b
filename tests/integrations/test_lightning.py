"""Lightning's Trainer and Fabric at stages 1, 2, 3, beside the same script with strategy="ddp".

Ranks that have imported Lightning stay for all tests, so what is refused is refused in one run of theirs.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from calls import on_ranks
from torch import Tensor

import matrix
from assertions import close
from processes import ROOT, python

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: too few workers, short epochs, no GPU
STAGES = [1, 2, 3]


CASES = {
    "lightnings": ["plain", "accumulated", "in bfloat16", "true bfloat16", "scaled", "by hand", "clipped"],
    "fabrics": ["plain", "in bfloat16", "clipped"],
}
TOLERANCES = {"clipped": 1e-5, "by hand": 1e-5}
"""By hand each backward reduces: averages are added up, not gradients."""


@cache
def trained(module: str, stage: int) -> list[Any]:
    return on_ranks(module, "all_cases", stage)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in CASES.items() for name in names])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_to_the_numbers_of_ddp(stage, module, name):
    tolerance = TOLERANCES.get(name, 0.0)
    for found, expected in zip(trained(module, stage), trained(module, 0), strict=True):
        (losses, weights, values), (own_losses, own_weights, own_values) = expected[name], found[name]
        assert own_losses == pytest.approx(losses, rel=tolerance, abs=0)
        assert list(own_weights) == list(weights)
        for weight, value in weights.items():
            assert close(own_weights[weight], value, tolerance), weight
        assert same(own_values, values, tolerance)


def same(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list):
        return all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return one == (pytest.approx(other, rel=tolerance) if tolerance else other)


@pytest.mark.slow
@pytest.mark.parametrize("module", CASES)
def test_clipping_changes_what_is_trained(module):
    plain, clipped = (trained(module, 0)[0][name][1]["head.weight"] for name in ("plain", "clipped"))
    assert not torch.equal(plain, clipped)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("module", CASES)
@pytest.mark.parametrize(("kind", "stages"), [("full", [0, 1, 2, 3]), ("sharded", [1, 2, 3])])
def test_a_run_goes_on_at_any_stage_where_another_was_saved(module, kind, stages, tmp_path):
    every = [*itertools.product(stages, stages)]
    pairs = every if matrix.WHOLE else [*zip(stages, stages[::-1], strict=True), (3, 3)]
    on_ranks(module, "resumed", pairs, str(tmp_path), kind)


@pytest.mark.parametrize("stage", [2, 3])
def test_saved_files_have_all_weights(stage, tmp_path):
    on_ranks("lightnings", "saved_by_callback", stage, str(tmp_path))


@pytest.mark.slow
def test_one_module_is_trained_by_one_stage_after_another():
    on_ranks("lightnings", "again")


@cache
def averages(stage: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks("lightnings", "averaged", stage, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EMA", "EMA, resumed", "SWA", "SWA, resumed"])
@pytest.mark.parametrize("stage", [2, 3])
def test_averages_of_weights_are_those_of_ddp(stage, name):
    for found, expected in zip(averages(stage), averages(0), strict=True):
        (losses, weights, values), (own_losses, own_weights, own_values) = expected[name], found[name]
        assert (own_losses, own_values) == (losses, values)
        assert all(torch.equal(own_weights[weight], value) for weight, value in weights.items())


@pytest.mark.slow
def test_learning_rates_are_logged_once():
    expected, *found = (on_ranks("lightnings", "monitored", one)[0] for one in (0, 2, 3))
    assert len(expected) == 4 and len(expected[0]) == 6
    for rows in found:
        assert [[*row.values()] for row in rows] == [[*row.values()] for row in expected]


@pytest.mark.slow
def test_a_trainer_that_forks_gets_the_results_of_rank_0(tmp_path):
    """By Lightning's own launcher, from a process that has not used autograd."""
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    python(ROOT / "tests" / "integrations" / "forked.py", tmp_path, PYTHONPATH=folders)
    _, weights, values = trained("lightnings", 0)[0]["plain"]
    for stage in (2, 3):
        found, val_loss = torch.load(tmp_path / f"{stage}.pt")
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        assert val_loss == values[0]


def test_importing_registers_the_stages():
    for found in on_ranks("lightnings", "registered"):
        assert found == ["ZeroStrategy"] * 3 + ["ZeroFabricStrategy"] * 3


def test_the_callback_reports_memory_by_kind():
    for stage, size, numbers in on_ranks("lightnings", "logged", 2):
        assert stage == "2"
        assert size <= numbers["zero/parameters_bytes"] < 1.2 * size  # with padding
        assert numbers["zero/gradients_bytes"] < 0.8 * size
        assert numbers["zero/resident_bytes"] > numbers["zero/parameters_bytes"] + numbers["zero/gradients_bytes"]


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    """Started as users do, by Lightning's own launcher."""
    script = ROOT / "docs" / "examples" / "lightning_train.py"
    run = python(script, "--strategy", "zero_stage_3", "--steps", "10", cwd=tmp_path)
    assert "stage 3 (FSDP), rank 0 of 2" in run.stdout + run.stderr
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
    assert weights["head.weight"].shape == (256, 64)
    assert all(value.numel() for value in weights.values())


@pytest.mark.slow
@pytest.mark.parametrize("module", CASES)
def test_what_cannot_be_done_is_refused_on_every_rank(module):
    on_ranks(module, "refusals")
