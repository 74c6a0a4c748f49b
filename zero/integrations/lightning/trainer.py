"""ZeroStrategy: Lightning's Trainer at any stage.

fit          stages 1, 2: optimizers are configured, sharded by OSS, then the model is wrapped; stage 3: the reverse
teardown     stages 1, 2: the plain module is back; stage 3: it stays sharded, for test() and for saving
otherwise    stages 1, 2: the plain module, made the same on all ranks; stage 3: sharded, also if it was not before
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from zero import checkpoint as saved
from zero._torch import follow
from zero.comm import Comm
from zero.fsdp import FSDP
from zero.full_state import full_state_dict
from zero.integrations.lightning import averages, sharding
from zero.integrations.lightning.launcher import Launcher
from zero.load_full import load_full_optimizer_state_dict, load_full_state_dict
from zero.scripts import clip_grad_norm_, unwrap


class ZeroStrategy(sharding.ShardedStrategy, DDPStrategy):
    """ZeRO for Lightning's Trainer. Numbers are those of strategy="ddp".

        trainer = Trainer(strategy=ZeroStrategy(stage=2, oss={"master_dtype": torch.float32}), devices=8)

    stage: 1 (OSS), 2 (ShardedDDP) or 3 (FSDP). `strategy="zero_stage_2"` is ZeroStrategy(stage=2).
    oss: options of OSS at stages 1 and 2, such as partition.
    checkpoint: "full" writes one file from rank 0, which every strategy loads. "sharded" writes a directory by
        zero.checkpoint, in which each rank writes its shards; every stage loads it on any number of ranks.
        `load_checkpoint` reads both kinds.
    sync_each_batch: at stages 2 and 3, whether accumulate_grad_batches reduces the gradients of each batch, so that a
        rank holds its share of them. False sends them once, and holds them in full until then.
    options: of the stage's wrapper: DistributedDataParallel, ShardedDDP or FSDP. Other arguments are DDPStrategy's.

    After fit the module is plain again at stages 1 and 2. At stage 3 it stays sharded until the next run;
    `zero.unwrap(trainer.strategy.model)` returns the plain module.
    """

    lightnings = (*sharding.ShardedStrategy.lightnings, "precision_plugin")
    accelerator: Any
    cluster_environment: Any
    lightning_module: pl.LightningModule
    _wrapper: nn.Module | None = None
    """The FSDP of stage 3. Between runs `model` is the plain module."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = Launcher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        """Collective where the model is sharded from the run before, and callbacks will copy it: it becomes plain."""
        super().setup_environment()
        if averages.averaging(self.lightning_module.trainer):
            before = sharding.sharded_before(self.lightning_module)
            if before is not None:
                unwrap(before)

    def setup(self, trainer: pl.Trainer) -> None:
        """Collective. Shards the model and its optimizers, for the run that begins."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            self._refuse_clipping_by_value()
        if fitting and self._in_shards:
            averages.refuse_directories(trainer)
        before = sharding.sharded_before(self.lightning_module)
        if before is not None and self._stage < 3:
            unwrap(before)
            before = None
        if before is None:
            if fitting and self._layer_sync:
                self.model = self._layer_sync.apply(self.lightning_module)
            self.model = self.precision_plugin.convert_module(self.lightning_module)
        if self._stage == 3:
            sharded: Any = before or self._wrap(self.lightning_module, ())
            self.model = self._wrapper = sharded
            if fitting:
                averages.shard_averages(trainer, sharded, self._options)
        else:
            self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        if self._stage < 3:
            if fitting:
                self.model = self._wrap(self.lightning_module, self.optimizers)
            else:
                Comm().broadcast([*self.lightning_module.parameters(), *self.lightning_module.buffers()])
        self._setup_gradients()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Collective at stages 1 and 2. Shards the optimizers of configure_optimizers(), with their schedulers."""
        super().setup_optimizers(trainer)
        held = [one for one in self.optimizers if any(group["params"] for group in one.param_groups)]
        if not held and self._stage == 2:
            raise ValueError("configure_optimizers() returned no optimizer, which stage 2 needs. Take stage 1 or 3.")
        if isinstance(self.model, FSDP):
            for one in held:
                self.model.register_optimizer(one)
            return
        sharded = {one: self._shard_optimizer(one) for one in held}
        self.optimizers = [sharded.get(one, one) for one in self.optimizers]
        for config in self.lr_scheduler_configs:
            if config.scheduler.optimizer in sharded:
                follow(config.scheduler, sharded[config.scheduler.optimizer])  # else monitors log both optimizers

    def _setup_gradients(self) -> None:
        """Replaces clipping and loss scaling of the precision plugin, which knows neither model nor ranks."""
        self.setup_precision_plugin()
        plugin: Any = self.precision_plugin
        sharding.scale_for_shards(plugin)
        plugin.clip_grad_by_norm = self._clip_by_norm
        if self._stage > 1:
            plugin.clip_grad_by_value = lambda *_: self._refuse_clipping_by_value()

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_grad_norm_(cast("nn.Module", self.model), optimizer, float(clip_val))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The context of batches that accumulate."""
        with self._accumulating(cast("nn.Module", self.model)):
            yield

    def teardown(self) -> None:
        """Leaves the model on its device, and sharded at stage 3: test() and save_checkpoint() still use it."""
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        if self.model is not None and self._stage < 3:
            self.model = unwrap(self.model)
            if self._layer_sync:
                self.model = self._layer_sync.revert(self.model)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Always true: each rank loads its shards, so the model must be sharded first."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective. Full weights on rank 0's CPU, {} elsewhere; {} where they are saved in shards."""
        return {} if self._in_shards else full_state_dict(self._whole(), to=0)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Collective. The full state in the plain optimizer's format, as the weights."""
        return {} if self._in_shards else sharding.full_state(getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Collective where it is saved in shards, into a directory."""
        if not self._in_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        shards = Path(saved.save(path, self._whole(), self._optimizers_in(checkpoint)).path).name
        super().save_checkpoint({**checkpoint, sharding.SHARDS: shards}, path / sharding.REST, storage_options)
        if self.is_global_zero:
            sharding.remove_others(path, shards)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Collective where the checkpoint is a directory that this strategy, at any stage, has written."""
        if not sharding.is_in_shards(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        found = super().load_checkpoint(Path(checkpoint_path, sharding.REST), weights_only)
        saved.load(Path(checkpoint_path, found[sharding.SHARDS]), self._whole(), self._optimizers_in(found))
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Collective at stage 3. Takes full weights."""
        if sharding.SHARDS in checkpoint:
            return  # which have been loaded
        weights = checkpoint["state_dict"]
        if isinstance(self.model, FSDP):
            weights = averages.weights_to_load(cast("dict[str, Any]", checkpoint), self.lightning_module)
        load_full_state_dict(self._whole(), weights, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective. Takes full state, of any strategy."""
        if sharding.SHARDS not in checkpoint:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                load_full_optimizer_state_dict(self._whole(), optimizer, state)

    def _optimizers_in(self, checkpoint: Mapping[str, Any]) -> list[Optimizer] | None:
        return [*self.optimizers] or None if "optimizer_states" in checkpoint else None

    def _whole(self) -> Any:
        """The model as zero.checkpoint takes it."""
        return sharding.sharded_before(self.lightning_module) or self.model
