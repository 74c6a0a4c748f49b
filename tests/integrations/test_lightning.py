"""Lightning's Trainer and Fabric at stages 1, 2, 3, beside the same script with strategy="ddp".

Ranks that have imported Lightning stay for all tests, so what is refused is refused in one run of theirs.
"""

import importlib
import itertools
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call, on_ranks
from fsspec.core import url_to_fs
from torch import Tensor

import matrix
import ranks
from assertions import close
from processes import python, within

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # of Lightning: too few workers, short epochs, no GPU
STAGES = [1, 2, 3]
MODULES = ["lightnings", "fabrics"]
CALLBACKS = [
    *("ModelCheckpoint", "EarlyStopping", "GradientAccumulationScheduler", "DeviceStatsMonitor", "ThroughputMonitor"),
    *("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "LearningRateFinder", "LambdaCallback"),
    *("OnExceptionCheckpoint", "ModelSummary", "Timer"),
]
TOLERANCES = {"clipped": 1e-5, "two optimizers": 1e-5, "by hand": 1e-5, "accumulated": 1e-5}
"""By hand and where batches accumulate each backward reduces: averages are added up, not gradients."""


@cache
def trained(module: str, stage: int) -> list[Any]:
    return on_ranks(module, "all_cases", stage)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_to_the_numbers_of_ddp(stage, module):
    for found, expected in zip(trained(module, stage), trained(module, 0), strict=True):
        for name, (losses, weights, values) in expected.items():
            own_losses, own_weights, own_values = found[name]
            tolerance = TOLERANCES.get(name, 0.0)
            assert own_losses == pytest.approx(losses, rel=tolerance, abs=0), name
            assert list(own_weights) == list(weights)
            for weight, value in weights.items():
                assert close(own_weights[weight], value, tolerance), (name, weight)
            assert same(own_values, values, tolerance), name


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("asked", "precision"), [("bf16-mixed", "bf16"), ("16-mixed", "fp16")])
def test_lightnings_precision_is_that_of_setup(asked, precision, stage, module):
    on_ranks(module, "in_16_bits", stage, asked, precision, 0.5 if stage == 2 else None)


def held(rank: int, world: int, module: str) -> list[float]:
    count = importlib.import_module(module).held
    ways = [(1, True), (2, True), (3, True), (2, False), (3, False)]
    return [count(rank, world, stage, sync_each_batch=asked) for stage, asked in ways]


@pytest.mark.parametrize("module", MODULES)
def test_accumulation_holds_shards_of_gradients_unless_asked_otherwise(module):
    for shares in on_ranks(__name__, "held", module):
        assert shares == pytest.approx([1.0, 0.5, 0.5, 1.0, 1.0], rel=0.1)  # parameters are few


@pytest.mark.parametrize("module", MODULES)
def test_gradients_are_clipped_by_value_as_by_ddp_where_a_rank_has_elements(module):
    expected, *found = (on_ranks(module, "by_value", stage)[0] for stage in (0, *STAGES))
    for weights in found:
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_fabric_clips_each_of_two_optimizers_by_the_norm_of_its_own_gradients():
    expected, *found = (on_ranks("fabrics", "two_optimizers", stage) for stage in [0, *STAGES])
    for by_rank in found:
        assert by_rank == [pytest.approx(one, rel=1e-5) for one in expected]


def test_fabric_saves_one_optimizer_over_two_models(tmp_path):
    expected, *found = (on_ranks("fabrics", "two_models", stage, str(tmp_path)) for stage in (0, 1, 3))
    assert found == [expected] * 2


def test_fabric_cuts_state_that_an_optimizer_has_from_the_start():
    assert on_ranks("fabrics", "with_state", 3) == on_ranks("fabrics", "with_state", 0)


def same(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list):
        return all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return one == (pytest.approx(other, rel=tolerance) if tolerance else other)


def flat(found: Any) -> Iterator[Any]:
    """The values in a nest of lists, tuples and dictionaries, in order."""
    if isinstance(found, (list, tuple, dict)):
        for one in found.values() if isinstance(found, dict) else found:
            yield from flat(one)
    else:
        yield found


@pytest.mark.matrix
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("kind", "stages"), [("full", [0, 1, 2, 3]), ("sharded", [1, 2, 3])])
def test_a_run_goes_on_at_any_stage_where_another_was_saved(module, kind, stages, tmp_path):
    few = [(0, 1), (1, 2), (2, 3), (3, 0)] if kind == "full" else [(3, 2)]
    on_ranks(module, "resumed", [*itertools.product(stages, stages)] if matrix.WHOLE else few, str(tmp_path), kind)


def resumed_at(rank: int, world: int, module: str, url: str, folder: str) -> None:
    with within(folder):
        importlib.import_module(module).resumed(rank, world, [(2, 3)], url, "sharded")
    system, path = url_to_fs(url)
    assert system.exists(f"{path}/2/lightning.ckpt")
    assert os.listdir(folder) == (["there"] if url.startswith("file:") else [])


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("url", "world"), [("memory://bucket/run", 1), ("file://{}/there", 2)])
def test_a_sharded_checkpoint_is_written_to_a_url_and_read_from_it(module, url, world, tmp_path):
    ranks.run(call, world, (__name__, "resumed_at", (module, url.format(tmp_path), str(tmp_path))), 110)


@pytest.mark.parametrize("module", MODULES)
def test_a_checkpoint_takes_the_place_of_one_of_the_other_kind(module, tmp_path):
    on_ranks(module, "saved_in_turn", str(tmp_path / "last.ckpt"))


@pytest.mark.parametrize("module", MODULES)
def test_a_save_that_was_interrupted_leaves_the_one_before(module, tmp_path):
    on_ranks(module, "interrupted", str(tmp_path))


def test_a_checkpoint_of_lightnings_fsdp2_goes_on_at_each_stage(tmp_path):
    for expected, found in on_ranks("lightnings", "by_fsdp2", str(tmp_path)):
        assert found == [expected] * len(STAGES) and expected


def test_saved_files_have_all_weights(tmp_path):
    on_ranks("lightnings", "saved_by_callback", str(tmp_path))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_is_built_without_values_takes_those_of_a_checkpoint(stage, module, tmp_path):
    expected, found = (on_ranks(module, "built_empty", one, str(tmp_path)) for one in (0, stage))
    for (losses, weights, _), (own_losses, own_weights, _) in zip(expected, found, strict=True):
        assert own_losses == losses
        assert all(torch.equal(own_weights[weight], value) for weight, value in weights.items())


@matrix.combined(
    "module, kind, name, stage", MODULES, ["full", "sharded"], ["loaded_in_part", "without_frozen"], STAGES
)
def test_a_checkpoint_with_a_part_of_the_weights_is_loaded_as_by_ddp(name, stage, kind, module, tmp_path):
    expected, found = (on_ranks(module, name, one, kind, str(tmp_path)) for one in (0, stage))
    for one, own in zip(expected, found, strict=True):
        assert same([*flat(own)], [*flat(one)], 0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_checkpoint_brings_back_is_there_before_the_fit_starts(stage, tmp_path):
    losses, weights, values = on_ranks("lightnings", "resumed_in_phases", 0, "full", str(tmp_path))[0]
    for kind in ("full", "sharded"):
        own_losses, own_weights, own_values = on_ranks("lightnings", "resumed_in_phases", stage, kind, str(tmp_path))[0]
        assert (own_losses, own_values) == (losses, values)
        assert all(torch.equal(own_weights[weight], value) for weight, value in weights.items())


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_trained_from_a_later_epoch_on_as_by_one_process(stage, tmp_path):
    """DistributedDataParallel averages no gradients of parameters that were frozen at first."""
    (alone,) = ranks.run(call, 1, ("lightnings", "finetuned", (0, str(tmp_path))), 110)
    for expected, *found in zip(alone, *on_ranks("lightnings", "finetuned", stage, str(tmp_path)), strict=True):
        mean = [sum(of_ranks) / len(found) for of_ranks in zip(*(losses for losses, _, _ in found), strict=True)]
        assert mean == pytest.approx(expected[0], rel=1e-5)
        assert all(close(found[0][1][name], value, 1e-5) for name, value in expected[1].items())
        assert found[0][2] == expected[2] and len(expected[2]) == 2


def test_a_plugin_of_the_users_reads_and_writes_checkpoints(tmp_path):
    ranks.run(call, 1, ("lightnings", "saved_by_plugin", (str(tmp_path),)), 110)


def test_one_module_is_trained_by_one_stage_after_another():
    on_ranks("lightnings", "again")


@matrix.only
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_lightning_spawns_bring_full_weights_back(stage, tmp_path):
    told = python(Path(__file__).with_name("spawned.py"), stage, cwd=tmp_path)
    assert "the weights are those that rank 0 had" in told.stdout, told.stdout + told.stderr


@matrix.only
def test_averages_of_weights_are_those_of_ddp(tmp_path):
    on_each_rank = zip(*(on_ranks("lightnings", "averaged", stage, str(tmp_path)) for stage in (0, 3)), strict=True)
    for expected, found in on_each_rank:
        for (losses, weights, values), (own_losses, own_weights, own_values) in zip(expected, found, strict=True):
            assert (own_losses, own_values) == (losses, values)
            assert all(torch.equal(own_weights[weight], value) for weight, value in weights.items())


@matrix.combined("name, stage", CALLBACKS, STAGES)
def test_a_callback_finds_what_it_finds_under_ddp(name, stage, tmp_path):
    (tmp_path / "ddp").mkdir()
    expected = on_ranks("lightnings", "with_callback", name, 0, str(tmp_path / "ddp"))
    (tmp_path / "own").mkdir()
    found = on_ranks("lightnings", "with_callback", name, stage, str(tmp_path / "own"))
    tolerance = 1e-5 if name == "GradientAccumulationScheduler" else 0.0
    for (losses, weights, values), (own_losses, own_weights, own_values) in zip(expected, found, strict=True):
        assert own_values == values
        assert own_losses == pytest.approx(losses, rel=tolerance, abs=0)
        assert all(close(own_weights[weight], value, tolerance) for weight, value in weights.items())


def test_the_example_runs(tmp_path):
    on_ranks("lightnings", "example", str(tmp_path))
    weights = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert weights["net.2.weight"].shape == (256, 64)
    assert all(value.numel() for value in weights.values())


@pytest.mark.parametrize("module", MODULES)
def test_what_cannot_be_done_is_refused_on_every_rank(module):
    on_ranks(module, "refusals")
