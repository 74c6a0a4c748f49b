"""What ranks do in test_lightning: a model, data and a Trainer, on ranks that there are already."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.data import DataLoader, TensorDataset

import ranks
import zero.integrations.lightning
from zero.integrations.lightning import GradNormCallback, MemoryCallback
from zoo import Block

WIDTH = 8
BATCHES = 4


class Module(pl.LightningModule):
    """Keeps the losses that it saw."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.options = {"lr": 0.01, **options}
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], number: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        decayed = [param for param in self.parameters() if param.dim() > 1]
        others = [param for param in self.parameters() if param.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, **self.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4 * BATCHES * 2, WIDTH, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def strategy(stage: int, **options: Any) -> Any:
    """Of a stage; 0 is Lightning's own DistributedDataParallel."""
    if stage == 0:
        return pl.strategies.DDPStrategy()
    return zero.integrations.lightning.ZeroStrategy(stage, **options)


def trainer(rank: int, world: int, strategy: Any, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = {"enable_checkpointing": False, "max_epochs": 1, "num_sanity_val_steps": 1}
    plugins = [TorchElasticEnvironment(), *options.pop("plugins", [])]
    return pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, plugins=plugins, **{**quiet, **saves, **options}
    )


def record(module: Module, values: list[Any]) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """What a run has seen, what it has made of the weights, and more."""
    return module.losses, zero.full_state_dict(module.trainer.strategy.model), values


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
    "by hand": (Manual, dict),
    "clipped": (Module, lambda: {"gradient_clip_val": 0.5}),
}


def all_cases(rank: int, world: int, stage: int) -> dict[str, Any]:
    """fit, which validates, then test and predict of what is left."""
    found = {}
    for name, (kind, options) in CASES.items():
        module, norms = kind(), GradNormCallback(every=1)
        run = trainer(rank, world, strategy(stage), **options(), callbacks=[norms] if name == "clipped" else [])
        torch.manual_seed(rank)
        run.fit(module)
        values = [run.callback_metrics["val_loss"].item(), run.optimizers[0].param_groups[0]["lr"]]
        if name == "clipped":
            values.append(norms.norm)
        if name == "plain":
            values += [run.test(module, verbose=False), run.predict(module), run.validate(module, verbose=False)]
        found[name] = record(module, values)
    return found


def resumed(rank: int, world: int, pairs: list[tuple[int, int]], folder: str, kind: str = "full") -> None:
    """An epoch at a stage, another at a second."""
    whole = Module()
    trainer(rank, world, strategy(0), max_epochs=2).fit(whole)
    expected, expected_weights, _ = record(whole, [])
    options = {} if kind == "full" else {"checkpoint": kind}
    for first, second in pairs:
        path = Path(folder, str(first))
        if not path.exists():
            run = trainer(rank, world, strategy(first, **(options if first else {})))
            run.fit(Module())
            run.save_checkpoint(path)  # after fit
        module = Module()
        run = trainer(rank, world, strategy(second, **(options if second else {})), max_epochs=2)
        run.fit(module, ckpt_path=path)
        losses, weights, _ = record(module, [])
        assert losses == expected[BATCHES:], (first, second)
        assert all(torch.equal(weights[name], value) for name, value in expected_weights.items()), (first, second)


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


def again(rank: int, world: int) -> None:
    """One module is trained by one stage after another, and comes back plain."""
    module, plain, runs = Module(), Module(), []
    for stage in (3, 3, 2, 1):
        runs.append(trainer(rank, world, strategy(stage)))
        runs[-1].fit(module)
        trainer(rank, world, strategy(0)).fit(plain)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items())


def gone(rank: int, world: int) -> None:
    """The Trainer of a module that is sharded is no more."""
    module = Module()
    trainer(rank, world, strategy(3)).fit(module)
    run = trainer(rank, world, strategy(2))
    module.trainer = run
    gc.collect()
    run.fit(module)


def logged(rank: int, world: int, stage: int) -> tuple[str, int, dict[str, int]]:
    module, callback = Module(), MemoryCallback(every=2)
    run = trainer(rank, world, strategy(stage), callbacks=[callback])
    run.fit(module)
    assert callback.report is not None
    return callback.report.stage, sum(param.nbytes for param in module.parameters()), callback.report.numbers()


class Normed(Module):
    """Has buffers, which averages have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


AVERAGES: dict[str, Callable[[], Any]] = {
    "EMA": lambda: pl.callbacks.EMAWeightAveraging(decay=0.5),
    "SWA": lambda: pl.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2, device=None),
}


def averaged(rank: int, world: int, stage: int, folder: str) -> dict[str, Any]:
    """Trains, stops in the middle, goes on from there with another Trainer, and tests what became of it."""
    found = {}
    for name, callback in AVERAGES.items():
        for resumes in (False, True):
            module, path = Normed(), Path(folder, f"{name} {stage} {resumes}")
            saves = pl.callbacks.ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
            run = trainer(
                rank, world, strategy(stage), max_epochs=3, callbacks=[callback(), saves], enable_checkpointing=True
            )
            run.fit(module, ckpt_path=Path(folder, f"{name} {stage} False", "epoch=1.ckpt") if resumes else None)
            # At stage 3 the module is sharded now, and callbacks copy it for each run.
            values = [run.callback_metrics["val_loss"].item(), run.test(module, verbose=False)]
            found[f"{name}, resumed" if resumes else name] = record(module, values)
    return found


def monitored(rank: int, world: int, stage: int) -> list[dict[str, float]]:
    """The rates that Lightning's monitor hands to the logger."""
    rows: list[dict[str, float]] = []
    logger = mock.Mock(spec=pl.loggers.Logger, log_metrics=lambda metrics, step: rows.append(metrics), save_dir=None)
    monitor = pl.callbacks.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    options = {"logger": logger, "log_every_n_steps": 1, "limit_val_batches": 0}
    trainer(rank, world, strategy(stage), callbacks=[monitor], **options).fit(Module())
    return rows


def registered(rank: int, world: int) -> list[str]:
    """By which strategies the names of the stages are known."""
    names = [f"zero_stage_{stage}" for stage in (1, 2, 3)]
    found = [registry.get(name) for registry in (pl.strategies.StrategyRegistry, STRATEGY_REGISTRY) for name in names]
    assert {*names} <= {*pl.strategies.StrategyRegistry.available_strategies()}
    return [type(one).__name__ for one in found]


class Without(Module):
    def configure_optimizers(self) -> None: ...


def averaging(rank: int, world: int, callback: Any, stage: int, **options: Any) -> None:
    trainer(rank, world, strategy(stage, **options), callbacks=[callback]).fit(Module())


def of_one_module(module: Module) -> Any:
    """FSDP's option that names a module itself, of which a callback has a copy."""
    return CustomPolicy(lambda one: one is module.blocks[0])


def other_units(rank: int, world: int) -> None:
    module, ema = Module(), pl.callbacks.EMAWeightAveraging()
    options = {"auto_wrap_policy": of_one_module(module)}
    trainer(rank, world, strategy(3, **options), callbacks=[ema]).fit(module)


def by_value(rank: int, world: int, stage: int) -> None:
    clipping = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    trainer(rank, world, strategy(stage), **clipping).fit(Module())


SWA_ELSEWHERE = partial(pl.callbacks.StochasticWeightAveraging, 0.1, device="meta")
REFUSED: list[tuple[Callable[[int, int], Any], list[str]]] = [
    (partial(by_value, stage=2), ["by value", "stage 2"]),
    (partial(by_value, stage=3), ["by value", "stage 3"]),
    (lambda *of: trainer(*of, strategy(2)).fit(Without()), ["no optimizer", "stage 2"]),
    (gone, ["FSDP that no longer exists", "zero.unwrap(trainer.strategy.model)"]),
    (lambda *of: strategy(4), ["stage=4"]),
    (lambda *of: strategy(3, oss={"partition": "whole"}), ["OSS is for stages 1 and 2"]),
    (
        lambda *of: averaging(*of, pl.callbacks.EMAWeightAveraging(), 2, checkpoint="sharded"),
        ["EMAWeightAveraging", "checkpoint='full'"],
    ),
    (lambda *of: averaging(*of, SWA_ELSEWHERE(), 3), ["StochasticWeightAveraging(device='meta')", "device=None"]),
    (other_units, ["EMAWeightAveraging", "Name classes"]),
    (lambda *of: strategy(2, checkpoint="local"), ["checkpoint='local'"]),
]


def refusals(rank: int, world: int) -> None:
    for call, words in REFUSED:
        told = ranks.refusal(partial(call, rank, world))
        assert all(word in told for word in ["ValueError", *words]), (told, words)
