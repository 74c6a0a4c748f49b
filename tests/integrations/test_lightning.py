"""Lightning's Trainer at stages 1, 2, 3, beside the same script with strategy="ddp".

Importing Lightning takes seconds, so the ranks of one run do all that there is to do at a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightnings import BATCHES, Module, strategy, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ranks
import zero
import zero.integrations.lightning
from sidebyside import close
from zero.integrations.lightning import MemoryCallback, ZeroStrategy

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: too few workers, short epochs, no GPU
STAGES = [1, 2, 3]


class Record(NamedTuple):
    """What a run has seen and what is left of it."""

    losses: list[float]
    weights: dict[str, Tensor]
    values: list[Any]


def record(module: Module, values: list[Any]) -> Record:
    wrapper = module.trainer.strategy.model
    return Record(module.losses, zero.full_state_dict(wrapper), values)


# ---------------------------------------------------------------------------------------------------- the same numbers


class Recomputed(Module):
    """With dropout under activation checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: nn.functional.dropout(block(y), 0.2), x, use_reentrant=False)
        return self.head(x)


class Manual(Module):
    """Takes its steps itself, two batches each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], number: int) -> None:
        loss = super().training_step(batch, number)
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


def sixteen() -> Any:
    """A scaler whose first scale overflows."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2))


CASES: dict[str, tuple[type[Module], Callable[[], dict[str, Any]]]] = {
    "plain": (Module, dict),
    "accumulated": (Module, lambda: {"accumulate_grad_batches": 2}),
    "in bfloat16": (Module, lambda: {"precision": "bf16-mixed"}),
    "true bfloat16": (Module, lambda: {"precision": "bf16-true"}),
    "scaled": (Module, lambda: {"plugins": [sixteen()], "max_epochs": 2}),
    "recomputed": (Recomputed, dict),
    "by hand": (Manual, dict),
    "clipped": (Module, lambda: {"gradient_clip_val": 0.5}),
    "clipped, accumulated": (Module, lambda: {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
}

TOLERANCES = {"clipped": 1e-6, "clipped, accumulated": 1e-6, "by hand": 1e-5}
"""By hand each backward reduces: averages are added up, not gradients."""


def all_cases(rank: int, world: int, stage: int) -> dict[str, Record]:
    """fit, which validates, then test and predict of what is left."""
    found = {}
    for name, (kind, options) in CASES.items():
        module = kind()
        run = trainer(rank, world, strategy(stage), **options())
        torch.manual_seed(rank)
        run.fit(module)
        values = [run.callback_metrics["val_loss"].item(), run.optimizers[0].param_groups[0]["lr"]]
        if name == "plain":
            values += [run.test(module, verbose=False), run.predict(module), run.validate(module, verbose=False)]
        found[name] = record(module, values)
    return found


@cache
def trained(stage: int) -> list[dict[str, Record]]:
    return ranks.run(all_cases, args=(stage,), timeout=110)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_to_the_numbers_of_ddp(stage, name):
    tolerance = TOLERANCES.get(name, 0.0)
    for found, expected in zip(trained(stage), trained(0), strict=True):
        assert found[name].losses == pytest.approx(expected[name].losses, rel=tolerance, abs=0)
        assert list(found[name].weights) == list(expected[name].weights)
        for weight, value in expected[name].weights.items():
            assert close(found[name].weights[weight], value, tolerance), weight
        for one, other in zip(found[name].values, expected[name].values, strict=True):
            assert same(one, other, tolerance), (one, other)


def same(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list):
        return all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return one == (pytest.approx(other, rel=tolerance) if tolerance else other)


def test_clipping_changes_what_is_trained():
    plain, clipped = (trained(0)[0][name].weights["head.weight"] for name in ("plain", "clipped"))
    assert not torch.equal(plain, clipped)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def resumed(rank: int, world: int, kind: str, stages: list[int], folder: str) -> dict[tuple[int, int], Record]:
    """Half of the steps at each stage, the rest at each."""
    found = {}
    options = {"checkpoint": "sharded"} if kind == "sharded" else {}
    for first in stages:
        path = Path(folder, f"{kind} {first}")
        run = trainer(rank, world, strategy(first, **(options if first else {})), max_steps=BATCHES // 2)
        run.fit(Module())
        run.save_checkpoint(path)  # after fit
        for second in stages:
            module = Module()
            run = trainer(rank, world, strategy(second, **(options if second else {})))
            run.fit(module, ckpt_path=path)
            found[first, second] = record(module, [])
    return found


@pytest.mark.parametrize(("kind", "stages"), [("full", [0, 1, 2, 3]), ("sharded", [1, 2, 3])])
def test_a_run_goes_on_at_any_stage_where_another_was_saved(kind, stages, tmp_path):
    for rank, found in enumerate(ranks.run(resumed, args=(kind, stages, str(tmp_path)), timeout=110)):
        expected = trained(0)[rank]["plain"]
        for pair, run in found.items():
            assert run.losses == expected.losses[BATCHES // 2 :], pair
            assert all(torch.equal(run.weights[name], value) for name, value in expected.weights.items()), pair


def saved_by_callback(rank: int, world: int, stage: int, folder: str) -> None:
    """ModelCheckpoint's best file has every weight, and is found by test()."""
    module = Module()
    callback = pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_last=True, save_weights_only=stage == 2)
    run = trainer(rank, world, strategy(stage), enable_checkpointing=True, callbacks=[callback], max_epochs=2)
    run.fit(module)
    best, last = run.callback_metrics["val_loss"].item(), callback.best_model_path
    run.test(module, ckpt_path="best", verbose=False)
    assert run.callback_metrics["val_loss"].item() == min(best, callback.best_model_score.item())
    plain = Module()
    found = torch.load(last, weights_only=False)["state_dict"]
    assert list(found) == list(plain.state_dict())
    plain.load_state_dict(found)


@pytest.mark.parametrize("stage", STAGES)
def test_saved_files_have_all_weights(stage, tmp_path):
    ranks.run(saved_by_callback, args=(stage, str(tmp_path)), timeout=60)


def again(rank: int, world: int) -> None:
    """One module is trained by one stage after another, and comes back plain."""
    module, plain, runs = Module(), Module(), []
    for stage in (3, 3, 2, 3, 1):
        runs.append(trainer(rank, world, strategy(stage)))
        runs[-1].fit(module)
        trainer(rank, world, strategy(0)).fit(plain)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items())
    del runs[:-1], module.trainer


def test_one_module_is_trained_by_one_stage_after_another():
    ranks.run(again, timeout=60)


# --------------------------------------------------------------------------------------------------------- the rest


def test_importing_registers_the_stages():
    for stage in STAGES:
        name = f"zero_stage_{stage}"
        assert isinstance(pl.strategies.StrategyRegistry.get(name), ZeroStrategy)
        assert name in pl.strategies.StrategyRegistry.available_strategies()


def logged(rank: int, world: int, stage: int) -> tuple[str, dict[str, int]]:
    module, callback = Module(), MemoryCallback(every=2)
    run = trainer(rank, world, strategy(stage), callbacks=[callback])
    run.fit(module)
    assert callback.report is not None
    return callback.report.stage, callback.report.numbers()


def test_the_callback_reports_memory_by_kind():
    size = sum(param.nbytes for param in Module().parameters())
    for stage, numbers in ranks.run(logged, args=(2,)):
        assert stage == "2"
        assert numbers["zero/parameters_bytes"] == pytest.approx(size, rel=0.1)
        assert numbers["zero/gradients_bytes"] == pytest.approx(size / 2, rel=0.2)
        assert numbers["zero/resident_bytes"] == pytest.approx(numbers["zero/planned_resident_bytes"], rel=0.1)


class Without(Module):
    def configure_optimizers(self) -> None: ...


def refused(rank: int, world: int, stage: int, kind: type[Module], options: dict[str, Any]) -> None:
    trainer(rank, world, strategy(stage), **options).fit(kind())


@pytest.mark.parametrize(
    ("stage", "kind", "options", "words"),
    [
        (2, Module, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, ["by value", "stage 2", "by norm"]),
        (3, Module, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, ["by value", "stage 3", "by norm"]),
        (2, Without, {}, ["returned no optimizer", "stage 2"]),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(stage, kind, options, words):
    ranks.expect_error(refused, 2, ValueError, *words, args=(stage, kind, options), timeout=20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 4}, "stage=4 is unknown"),
        ({"stage": 3, "oss": {"partition": "whole"}}, "OSS is of stages 1 and 2"),
        ({"stage": 2, "checkpoint": "local"}, "checkpoint='local' is unknown"),
    ],
)
def test_options_that_are_none_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ZeroStrategy(**options)
