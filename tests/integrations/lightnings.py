"""What ranks do in test_lightning: a model, data and a Trainer, on ranks that there are already."""

import contextlib
import io
import json
import logging
import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision, TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import ranks
import zero.integrations.lightning
from processes import within
from runs import norm_of_gradients
from zoo import Block

# Each Trainer tells of accelerators that there are not, of where it stops and of a service, at the level of news.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

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
        trained = [param for param in self.parameters() if param.requires_grad]
        decayed = [param for param in trained if param.dim() > 1]
        others = [param for param in trained if param.dim() <= 1]
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
    """Of a stage; 0 is Lightning's own DistributedDataParallel, which has no options."""
    return zero.integrations.lightning.ZeroStrategy(stage, **options) if stage else pl.strategies.DDPStrategy()


def trainer(rank: int, world: int, strategy: Any, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = {"enable_checkpointing": False, "max_epochs": 1, "num_sanity_val_steps": 1}
    plugins = [TorchElasticEnvironment(), *options.pop("plugins", [])]
    return pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, plugins=plugins, **{**quiet, **saves, **options}
    )


def record(module: Module, values: list[Any]) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """What a run has seen, what it has made of the weights, and more."""
    return module.losses, zero.full_state_dict(module.trainer.strategy.model, to=None), values


class Manual(Module):
    """Takes its steps itself, after the first batch and then two batches each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], number: int) -> None:
        loss = super().training_step(batch, number)
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class TwoOptimizers(Manual):
    """Two halves of one model, each clipped and stepped by an optimizer of its own."""

    def training_step(self, batch: list[Tensor], number: int) -> None:
        self.manual_backward(Module.training_step(self, batch, number))
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9) for half in (self.blocks, self.head)]


class Keeping(Module):
    """Keeps the batches that it saw, and what was sent until its training ended."""

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        vars(self).setdefault("batches", []).append(batch)
        return super().training_step(batch, number)

    def on_train_end(self) -> None:
        self.sent = zero.traffic()


def in_16_bits(rank: int, world: int, stage: int, asked: str, precision: str, max_norm: float | None) -> None:
    """Lightning's word is that of zero.setup: bit for bit, with as many bytes sent. What is cast is the batch of
    training_step, targets too."""
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**24, growth_interval=2)
    plugin = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler())]} if asked == "16-mixed" else {"precision": asked}
    without = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "max_epochs": 2}
    module, before = Keeping(), zero.traffic()
    trainer(rank, world, strategy(stage), gradient_clip_val=max_norm, **without, **plugin).fit(module)
    sent, weights = module.sent - before, record(module, [])[1]
    plain, losses, before = Module(), list[float](), zero.traffic()
    made = plain.configure_optimizers()
    model, optimizer = zero.setup(plain, made["optimizer"], stage=stage, precision=precision)
    scaled = scaler(enabled=precision == "fp16")
    for x, targets in module.batches:
        loss = (model(x) - targets).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        scaled.scale(loss).backward()
        if max_norm is not None:
            scaled.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaled.step(optimizer)
        scaled.update()
        made["lr_scheduler"]["scheduler"].step()
    again = zero.traffic() - before
    assert (module.losses, sent.gather, sent.reduce) == (losses, again.gather, again.reduce)
    masters = zero.unwrap(model).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in masters.items())
    again = trainer(rank, world, strategy(stage), **{**without, **plugin, "max_epochs": 1})
    again.fit(module)
    again.test(module, verbose=False)


class Seen(pl.Callback):
    """Reads, between backward and step, what the page shows to log."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.report = zero.report(trainer.strategy.model, trainer.optimizers)
        self.norm = norm_of_gradients(trainer.strategy.model).item()


CASES: dict[str, tuple[type[Module], dict[str, Any]]] = {
    "plain": (Module, {}),
    "accumulated": (Module, {"accumulate_grad_batches": 2}),
    "by hand": (Manual, {}),
    "two optimizers": (TwoOptimizers, {}),
    "clipped": (Module, {"gradient_clip_val": 0.5}),
}


def logger(rows: list[list[float]]) -> Any:
    """Adds what it is handed to these."""
    log = lambda metrics, step: rows.append([*metrics.values()])  # noqa: E731
    return mock.Mock(spec=pl.loggers.Logger, save_dir=None, group_separator="/", log_metrics=log)


def all_cases(rank: int, world: int, stage: int) -> dict[str, Any]:
    """fit, which validates, then test and predict of what is left."""
    found = {}
    for name, (kind, options) in CASES.items():
        module, seen, rates = kind(), Seen(), []
        monitor = pl.callbacks.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        more = {"callbacks": [monitor], "logger": logger(rates)} if name == "accumulated" else {"callbacks": [seen]}
        run = trainer(rank, world, strategy(stage), **options, **more, log_every_n_steps=1)
        torch.manual_seed(rank)
        run.fit(module)
        values = [run.callback_metrics["val_loss"].item(), run.optimizers[0].param_groups[0]["lr"], rates]
        if name == "clipped":
            values.append(seen.norm)
        if name == "plain":
            assert seen.report.stage == str(stage) and seen.report.gradients > 0
            values += [run.test(module, verbose=False), run.predict(module), run.validate(module, verbose=False)]
        found[name] = record(module, values)
    return found


class Held(pl.Callback):
    """Of the gradients' bytes the share that this rank holds between two batches of a step."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            full = sum(param.nbytes for param in Module().parameters())
            self.share = zero.report(trainer.strategy.model, trainer.optimizers).gradients / full


def held(rank: int, world: int, stage: int, **options: Any) -> float:
    counted = Held()
    trainer(rank, world, strategy(stage, **options), accumulate_grad_batches=2, callbacks=[counted]).fit(Module())
    return counted.share


def resumed(rank: int, world: int, pairs: list[tuple[int, int]], folder: str, kind: str = "full") -> None:
    """An epoch at a stage, another at a second."""
    whole = Module()
    trainer(rank, world, strategy(0), max_epochs=2).fit(whole)
    expected, expected_weights, _ = record(whole, [])
    for first in dict(pairs):
        run = trainer(rank, world, strategy(first, checkpoint=kind))
        run.fit(Module())
        run.save_checkpoint(f"{folder}/{first}")  # after fit
    for first, second in pairs:
        run = trainer(rank, world, strategy(second, checkpoint=kind), max_epochs=2)
        run.fit(module := Module(), ckpt_path=f"{folder}/{first}")
        losses, weights, _ = record(module, [])
        assert losses == expected[len(expected) // 2 :], (first, second)
        assert all(torch.equal(weights[name], value) for name, value in expected_weights.items()), (first, second)


def interrupted(rank: int, world: int, folder: str) -> None:
    """A save ends between the shards and what Lightning saves beside them, into the directory of an earlier one."""
    whole = Module()
    trainer(rank, world, strategy(0), max_epochs=2).fit(whole)
    path = Path(folder, "trainer")
    run = trainer(rank, world, strategy(2, checkpoint="sharded"))
    run.fit(Module())
    for _ in range(2):
        run.save_checkpoint(path)
    assert len([*path.glob("0*")]) == 1
    run = trainer(rank, world, strategy(2, checkpoint="sharded"), max_epochs=3)
    run.fit(Module(), ckpt_path=path)
    with mock.patch.object(pl.strategies.Strategy, "save_checkpoint", side_effect=OSError):
        assert ranks.refusal(lambda: run.save_checkpoint(path)).startswith("OSError")
    module = Module()
    trainer(rank, world, strategy(3), max_epochs=2).fit(module, ckpt_path=path)
    assert module.losses == whole.losses[BATCHES:]


def saved_by_callback(rank: int, world: int, folder: str) -> None:
    """ModelCheckpoint's best file has every weight, and is found by test()."""
    for stage in (2, 3):
        module = Module()
        callback = pl.callbacks.ModelCheckpoint(
            Path(folder, str(stage)), monitor="val_loss", save_last=True, save_weights_only=stage == 2
        )
        run = trainer(rank, world, strategy(stage), enable_checkpointing=True, callbacks=[callback])
        run.fit(module)
        best = callback.best_model_score.item()
        assert run.callback_metrics["val_loss"].item() == best
        run.test(module, ckpt_path="best", verbose=False)
        assert run.callback_metrics["val_loss"].item() == best
        plain = Module()
        found = torch.load(callback.best_model_path, weights_only=False)["state_dict"]
        assert list(found) == list(plain.state_dict())
        plain.load_state_dict(found)


def saves_at_the_second_try(save: Callable[[str], object], path: str) -> None:
    """Where rank 0 cannot write, each rank raises, and what was there is there."""
    before = files(path)
    with mock.patch.object(TorchCheckpointIO, "save_checkpoint", side_effect=OSError("the disk is full")):
        told = ranks.refusal(partial(save, path))
    assert told.startswith("OSError") and "the disk is full" in told, told
    assert files(path) == before or not before
    save(path)


def files(path: str) -> dict[str, bytes]:
    """What is under all names that begin as this one."""
    found = [one for one in Path(path).parent.rglob("*") if str(one).startswith(path) and one.is_file()]
    return {str(one): one.read_bytes() for one in found}


def saved_in_turn(rank: int, world: int, path: str) -> None:
    for kind, epochs in [("sharded", 1), ("full", 2), ("sharded", 3)]:
        run = trainer(rank, world, strategy(2, checkpoint=kind), limit_train_batches=1, max_epochs=epochs)
        run.fit(module := Module())
        saves_at_the_second_try(run.save_checkpoint, path)
        assert Path(path).is_dir() == (kind == "sharded")
        trainer(rank, world, strategy(1)).test(fresh := Module(), ckpt_path=path, verbose=False)
        assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in module.state_dict().items()), kind


def built_empty(rank: int, world: int, stage: int, folder: str) -> Any:
    """A model without values goes on where another was saved. At stage 3 its modules can also initialise themselves."""
    run = trainer(rank, world, strategy(0))
    run.fit(Module())
    run.save_checkpoint(f"{folder}/{stage}")
    for epochs, path in [(1, None), (2, f"{folder}/{stage}")][stage < 3 :]:
        run = trainer(rank, world, strategy(stage), max_epochs=epochs)
        with run.init_module(empty_init=True):
            module = Module()
        assert {param.device.type for param in module.parameters()} == {"meta" if stage == 3 else "cpu"}
        run.fit(module, ckpt_path=path)
        assert path or all(0 < value.abs().max() < 1 for value in record(module, [])[1].values())
    return record(module, [])


class Phased(Module):
    """What it saves decides, before it is trained again, by which schedule and on which scale of the loss."""

    phase, scale = 1, 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["phase"] = 2

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.phase = checkpoint["phase"]

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(made["optimizer"], 0.5 / self.phase)
        return made

    def on_fit_start(self) -> None:
        self.scale = self.phase

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        return super().training_step(batch, number) * self.scale


class Count(pl.Callback):
    """Its state is there before it is trained again."""

    epochs = seen = 0

    def on_fit_start(self, *_: Any) -> None:
        self.seen = self.epochs

    def on_train_epoch_end(self, *_: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def resumed_in_phases(rank: int, world: int, stage: int, kind: str, folder: str) -> Any:
    for epochs, path in [(1, None), (2, f"{folder}/{stage} {kind}")]:
        module, count = Phased(), Count()
        run = trainer(rank, world, strategy(stage, checkpoint=kind), max_epochs=epochs, callbacks=[count])
        run.fit(module, ckpt_path=path)
        run.save_checkpoint(f"{folder}/{stage} {kind}")
    return record(module, [count.seen, module.scale])


class Finetuned(Module):
    """Its blocks are frozen until the second epoch, by a callback."""

    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], lr=0.01, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(super().train_dataloader().dataset, batch_size=8 // self.trainer.world_size)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [pl.callbacks.BackboneFinetuning(1, backbone_initial_lr=1e-3)]


def finetuned(rank: int, world: int, stage: int, folder: str) -> list[Any]:
    """Two epochs that follow on a checkpoint from before the blocks are trained, or from after."""
    found = []
    for middle, kind in [(1, "sharded"), (2, "full"), (2, "sharded")]:
        for epochs, path in [(middle, None), (middle + 2, f"{folder}/{stage} {middle} {kind}")]:
            run = trainer(rank, world, strategy(stage, checkpoint=kind), max_epochs=epochs)
            run.fit(module := Finetuned(), ckpt_path=path)
            run.save_checkpoint(f"{folder}/{stage} {middle} {kind}")
        found.append(record(module, [group["lr"] for group in run.optimizers[0].param_groups]))
    return found


class Normed(Module):
    """Has buffers, which averages have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Added(Normed):
    """What a Module lacks, parameters and buffers, no optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)


def loaded_in_part(rank: int, world: int, stage: int, kind: str, folder: str) -> list[Any]:
    """By strict_loading=False: what only the model has, and what only the checkpoint has."""
    found = []
    for saved, loaded in [(Module, Added), (Added, Module)]:
        path = f"{folder}/{stage} {kind} {saved.__name__}"
        run = trainer(rank, world, strategy(stage, checkpoint=kind))
        run.fit(saved())
        run.save_checkpoint(path)
        run, module = trainer(rank, world, strategy(stage, checkpoint=kind), max_epochs=2), loaded()
        told = ranks.refusal(lambda: run.fit(module, ckpt_path=path))  # noqa: B023 (called at once)
        assert "norm.weight" in told and "norm.running_mean" in told, told
        run, module = trainer(rank, world, strategy(stage, checkpoint=kind), max_epochs=2), loaded()
        module.strict_loading = False
        run.fit(module, ckpt_path=path)
        found.append(record(module, []))
    return found


class Adapted(Module):
    """Trains its head, which is a base with an adapter to `exclude_frozen_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


def without_frozen(rank: int, world: int, stage: int, kind: str, folder: str) -> Any:
    """A bias that is frozen after it was trained is saved, the blocks are not."""
    path, options = f"{folder}/{stage} {kind}", {"checkpoint": kind, "exclude_frozen_parameters": True}
    run = trainer(rank, world, strategy(stage, **options))
    run.fit(module := Adapted())
    module.head.bias.requires_grad_(False)
    run.save_checkpoint(path)
    if stage:
        assert saved_names(path) == ["head.bias", "head.weight"]
        with torch.no_grad():
            for param in (other := Adapted()).parameters():
                param.fill_(0.5)
        run = trainer(rank, world, strategy(stage, **options))
        run.validate(other, ckpt_path=path, verbose=False)
        weights, expected = record(other, [])[1], zero.full_state_dict(module, to=None)
        assert all(torch.equal(weights[name], expected[name]) for name in saved_names(path))
        assert all(bool((value == 0.5).all()) for name, value in weights.items() if name.startswith("blocks"))
    run = trainer(rank, world, strategy(stage, **options), max_epochs=2)
    run.fit(module := Adapted(), ckpt_path=path)
    return record(module, [])


def saved_names(path: str) -> list[str]:
    """Of the weights in a checkpoint of either kind."""
    if Path(path).is_dir():
        (index,) = Path(path).glob("0*/index.json")
        stored = json.loads(index.read_text())["tensors"]
        return sorted(name.removeprefix("model/") for name in stored if name.startswith("model/"))
    return sorted(torch.load(path, weights_only=True)["state_dict"])


def saved_by_plugin(rank: int, world: int, folder: str) -> None:
    """One of Lightning's, which writes on a thread; one that is given to the strategy; and the default."""
    from zero.integrations.lightning import MappedCheckpointIO

    class Given(TorchCheckpointIO):
        def __init__(self) -> None:
            self.stored: dict[str, Any] = {}

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            self.stored[str(path)] = checkpoint

        def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
            return self.stored[str(path)]

    ways = [
        (strategy(2), [AsyncCheckpointIO()], AsyncCheckpointIO),
        (strategy(2, checkpoint_io=Given()), [], Given),
        (strategy(2), [], MappedCheckpointIO),
    ]
    for number, (how, plugins, kind) in enumerate(ways):
        callback = pl.callbacks.ModelCheckpoint(Path(folder, str(number)), filename="saved")
        options = {"enable_checkpointing": True, "callbacks": [callback], "limit_train_batches": 1}
        run, module = trainer(rank, world, how, plugins=plugins, **options), Module()
        run.fit(module)
        assert type(run.strategy.checkpoint_io) is kind
        path: Any = "its own://saved" if kind is Given else Path(folder, str(number), "another.ckpt")
        if kind is not Given:  # a save in shards has failed there
            path.mkdir()
            Path(path, "latest").touch()
        run.save_checkpoint(path)
        run.strategy.checkpoint_io.teardown()  # it is written then
        fresh = Module()
        run.validate(fresh, ckpt_path=path, verbose=False)
        assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in module.state_dict().items())


def again(rank: int, world: int) -> None:
    """One module is trained by one stage after another, and comes back plain."""
    module, plain, runs = Module(), Module(), []
    for stage in (3, 3, 2):
        runs.append(trainer(rank, world, strategy(stage), limit_train_batches=1))
        runs[-1].fit(module)
        trainer(rank, world, strategy(0), limit_train_batches=1).fit(plain)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items())


def example(rank: int, world: int, folder: str) -> None:
    script = Path(__file__).parents[2] / "docs" / "examples" / "lightning_train.py"
    with mock.patch.object(sys, "argv", [str(script), "zero_stage_3", str(world)]), within(folder):
        made = runpy.run_path(str(script), run_name="__main__")
    assert type(made["trainer"].strategy.model) is zero.FSDP and made["trainer"].world_size == world


AVERAGES: dict[str, Callable[[], Any]] = {
    "EMA": lambda: pl.callbacks.EMAWeightAveraging(decay=0.5),
    "SWA": lambda: pl.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2, device=None),
}


def averaged(rank: int, world: int, stage: int, folder: str) -> list[Any]:
    """Trains, goes on from its middle with another Trainer, and tests what became of it."""
    found = []
    for name, callback in AVERAGES.items():
        path = Path(folder, f"{name} {stage}")
        for middle in (None, path / "epoch=0.ckpt")[: 1 + (name == "EMA")]:
            module, saves = Normed(), pl.callbacks.ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
            options = {"max_epochs": 2, "callbacks": [callback(), saves], "enable_checkpointing": True}
            run = trainer(rank, world, strategy(stage), **options)
            run.fit(module, ckpt_path=middle)
            # At stage 3 the module is sharded now, and callbacks copy it for each run.
            found.append(record(module, [run.callback_metrics["val_loss"].item(), run.test(module, verbose=False)]))
    return found


class Raises(pl.Callback):
    """In the second epoch."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("on purpose")


class Found(Module):
    """Its learning rate can be found, by a batch of each sample, and callbacks write to its list."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.lr, self.batch_size, self.seen = 0.01, batch_size, list[Any]()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(super().train_dataloader().dataset, self.batch_size)


# By what a run has beside its Trainer's defaults, given a folder.
CALLBACKS: dict[str, Callable[[str], list[pl.Callback]]] = {
    "ModelCheckpoint": lambda folder: [
        pl.callbacks.ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1, save_last=True)
    ],
    "EarlyStopping": lambda _: [pl.callbacks.EarlyStopping("val_loss", stopping_threshold=1e9)],
    "GradientAccumulationScheduler": lambda _: [pl.callbacks.GradientAccumulationScheduler({1: 2})],
    "StochasticWeightAveraging": lambda _: [AVERAGES["SWA"]()],
    "WeightAveraging": lambda _: [pl.callbacks.WeightAveraging()],
    "EMAWeightAveraging": lambda _: [AVERAGES["EMA"]()],
    "DeviceStatsMonitor": lambda _: [pl.callbacks.DeviceStatsMonitor(cpu_stats=True)],
    "ThroughputMonitor": lambda _: [pl.callbacks.ThroughputMonitor(len)],
    "ModelSummary": lambda _: [pl.callbacks.ModelSummary(2)],
    "Timer": lambda _: [pl.callbacks.Timer(interval="step")],
    "LearningRateFinder": lambda _: [
        AVERAGES["EMA"](),
        pl.callbacks.LearningRateFinder(1e-5, 1e-3, num_training_steps=16, early_stop_threshold=None),
    ],
    "LambdaCallback": lambda _: [
        pl.callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, module: module.seen.append(trainer.global_step))
    ],
    "OnExceptionCheckpoint": lambda folder: [pl.callbacks.OnExceptionCheckpoint(folder, "raised"), Raises()],
}


def with_callback(rank: int, world: int, name: str, stage: int, folder: str) -> Any:
    module, callbacks = Found(1 if name == "LearningRateFinder" else 4), CALLBACKS[name](folder)
    logs = {"logger": logger([])} if name.endswith("Monitor") else {}
    options = {"max_epochs": 2, "enable_checkpointing": True, "log_every_n_steps": 1, "default_root_dir": folder}
    run = trainer(rank, world, strategy(stage), callbacks=callbacks, **options, **logs)
    if name == "OnExceptionCheckpoint":
        assert "on purpose" in ranks.refusal(lambda: run.fit(Found()))
        run = trainer(rank, world, strategy(stage), max_epochs=2)
    with contextlib.redirect_stderr(io.StringIO()):  # the finder's progress
        run.fit(module, ckpt_path=f"{folder}/raised.ckpt" if name == "OnExceptionCheckpoint" else None)
    assert (module.lr != 0.01) == (name == "LearningRateFinder")
    saved = sorted(os.listdir(folder)) if name == "ModelCheckpoint" else []
    return record(module, [module.lr, module.seen, run.global_step, saved])


def by_value(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    clipping = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    trainer(rank, world, strategy(stage), **clipping).fit(module := Module())
    return record(module, [])[1]


def refusals(rank: int, world: int) -> None:
    averages = {"callbacks": [pl.callbacks.EMAWeightAveraging()]}
    sharded, bf16 = strategy(2, checkpoint="sharded"), MixedPrecision("bf16-mixed", "cpu")
    pruned = {"callbacks": [pl.callbacks.ModelPruning("l1_unstructured")]}
    part, of_fabric = strategy(1, exclude_frozen_parameters=True), zero.integrations.lightning.ZeroFabricStrategy(3)
    for call, words in [
        (lambda: strategy(4), ["stage=4"]),
        (lambda: trainer(rank, world, sharded, **averages).fit(Module()), ["EMAWeightAveraging", "checkpoint='full'"]),
        (lambda: trainer(rank, world, part, **averages).fit(Module()), ["EMAWeightAveraging", "_parameters=False"]),
        (lambda: trainer(rank, world, strategy(1), **pruned).fit(Module()), ["ModelPruning", "strategy='ddp'"]),
        (lambda: trainer(rank, world, of_fabric), ["ZeroFabricStrategy(stage=3", "a Trainer takes ZeroStrategy"]),
        (lambda: strategy(2, precision="fp16")._take_precision(bf16), ["precision='bf16-mixed' of Li", "float16"]),
    ]:
        told = ranks.refusal(call)
        assert told.startswith("ValueError") and all(word in told for word in words), (told, words)


class Sharded(Module):
    """By PyTorch's FSDP2, as Lightning's users shard it."""

    def configure_model(self) -> None:
        for part in (*self.blocks, self.head):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class ModelParallel(pl.strategies.ModelParallelStrategy):
    """On CPUs, as Lightning has not expected it."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")


def by_fsdp2(rank: int, world: int, path: str) -> Any:
    """The losses of its second epoch, and of runs that go on from its first one at each stage."""
    module = Sharded()
    keep = pl.callbacks.ModelCheckpoint(dirpath=path, filename="{epoch}", save_top_k=-1)
    by = ModelParallel(data_parallel_size=world, tensor_parallel_size=1)
    trainer(rank, world, by, enable_checkpointing=True, callbacks=[keep], max_epochs=2).fit(module)
    found = []
    for stage in (1, 2, 3):
        again = Module()
        trainer(rank, world, strategy(stage), max_epochs=2).fit(again, ckpt_path=f"{path}/epoch=0.ckpt")
        found.append(again.losses)
    return module.losses[BATCHES:], found
