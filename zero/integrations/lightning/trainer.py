"""ZeroStrategy: Lightning's Trainer at any stage.

fit          stages 1, 2: optimizers are configured, sharded by OSS, then the model is wrapped; stage 3: the reverse
teardown     stages 1, 2: the plain module is back; stage 3: it stays sharded, for test() and for saving
otherwise    stages 1, 2: the plain module, made the same on all ranks; stage 3: sharded, also if it was not before

Averages of weights that callbacks keep are shards at stage 3, laid out as the shards of the model: an average of each
element depends on that element alone, so the averages of the shards are the shards of the averages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from zero import checkpoint as saved
from zero._torch.optimizers import follow
from zero.checkpoint.read import load_state
from zero.checkpoint.storage import place
from zero.comm import Comm
from zero.comm.together import alike
from zero.fsdp import FSDP
from zero.full_state import full_state_dict
from zero.integrations.lightning import sharding
from zero.load_full import load_full_optimizer_state_dict, load_full_state_dict
from zero.oss import OSS
from zero.scripts import unwrap

_CURRENT = "current_model_state"  # WeightAveraging's, of weights in a checkpoint whose "state_dict" has averages


class ShardedAverage(FSDP):
    """An average of a model's weights. Its `state_dict` is full on rank 0, and empty elsewhere, as the model's is."""

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        """Collective."""
        found = {} if destination is None else destination
        found.update({prefix + name: value for name, value in full_state_dict(self, to=0).items()})
        return found


def _averaging(trainer: Any) -> list[Any]:
    """The callbacks of a Trainer that average weights, also EMAWeightAveraging."""
    return [one for one in trainer.callbacks if isinstance(one, WeightAveraging | StochasticWeightAveraging)]


class ZeroStrategy(sharding.ShardedStrategy, DDPStrategy):
    """ZeRO for Lightning's Trainer. Numbers are those of strategy="ddp".

        trainer = Trainer(strategy=ZeroStrategy(stage=2), precision="bf16-mixed", devices=8)

    stage: 1 (OSS), 2 (ShardedDDP) or 3 (FSDP). `strategy="zero_stage_2"` is ZeroStrategy(stage=2).
    oss: options of OSS at stages 1 and 2, such as partition.
    checkpoint: "full" writes one file from rank 0, which every strategy loads. "sharded" writes a directory by
        zero.checkpoint, in which each rank writes its shards. Every stage reads both kinds, on any number of ranks.
    sync_each_batch: at stages 2 and 3, whether accumulate_grad_batches reduces the gradients of each batch, so that a
        rank holds its share of them. False sends them once, and holds them in full until then.
    options: of the stage's wrapper: DistributedDataParallel, ShardedDDP or FSDP. Other arguments are DDPStrategy's.
    """

    model: Any
    accelerator: Any
    cluster_environment: Any
    lightning_module: pl.LightningModule
    _wrapper: FSDP | None = None  # of stage 3, while `model` is the plain module

    def setup_environment(self) -> None:
        """Collective where the model is sharded from the run before, and callbacks will copy it: it becomes plain."""
        super().setup_environment()
        if _averaging(self.lightning_module.trainer):
            sharding.end(self.lightning_module)

    def setup(self, trainer: pl.Trainer) -> None:
        """Collective. Shards the model and its optimizers, for the run that begins."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._take_precision(self.precision_plugin)
        for callback in _averaging(trainer) if fitting and self._in_shards else ():
            if isinstance(callback, WeightAveraging):  # checkpoints are directories, which hold the weights once
                raise ValueError(f"{type(callback).__name__} saves two sets of weights. Use checkpoint='full'.")
        before = sharding.sharded_before(self.lightning_module) if self._stage == 3 else None
        if self._stage < 3:
            sharding.end(self.lightning_module)
        if before is None:
            if fitting and self._layer_sync:
                self.model = self._layer_sync.apply(self.lightning_module)
            self.model = self.precision_plugin.convert_module(self.lightning_module)
        if self._stage == 3:
            self.model = self._wrapper = before or self._wrap(self.lightning_module, ())  # type: ignore[assignment]
            for callback in _averaging(trainer) if fitting else ():  # which hold full copies of the plain module
                of_weights, root = isinstance(callback, WeightAveraging), self.root_device
                holder, name = (callback._average_model, "module") if of_weights else (callback, "_average_model")
                average = ShardedAverage(getattr(holder, name), **{"device_id": root, **self._options})
                setattr(holder, name, average)
                there = callback._device is None or torch.device(callback._device).type == root.type
                same = [one.shape for one in self.model.parameters()] == [one.shape for one in average.parameters()]
                with alike([Comm()], f"the averages of {type(callback).__name__}"):
                    if not there or not same:
                        raise ValueError(
                            "at stage 3 pass device=None, and name classes of modules in FSDP's options, not single "
                            "modules."
                        )
        else:
            self.model_to_device()
        if fitting:
            self._round(self.lightning_module)
            self.setup_optimizers(trainer)
        if self._stage < 3:
            if fitting:
                self.model = self._wrap(self.lightning_module, self.optimizers)
            else:
                Comm().broadcast([*self.lightning_module.parameters(), *self.lightning_module.buffers()])
        self.setup_precision_plugin()

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

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The context of batches that accumulate."""
        with self._accumulating(self.model):
            yield

    def teardown(self) -> None:
        """Leaves the model on its device, and sharded at stage 3: test() and save_checkpoint() still use it."""
        if self.model is not None and self._stage < 3:
            self.model = unwrap(self.model)
            if self._layer_sync:
                self.model = self._layer_sync.revert(self.model)
        elif self._wrapper is not None and self._start_method != "popen":  # the launcher asks for its state_dict()
            self._full = FSDP.summon_full_params(self._wrapper, writeback=False, offload_to_cpu=True)
            self._full.__enter__()
        for one in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            one.teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """At stage 3: each rank loads its shards, so the model must be sharded first. Below, `configure_optimizers` and
        `on_fit_start` find the checkpoint loaded, as with DDP. Optimizers load later at every stage."""
        return self._stage == 3

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective. Full weights on rank 0's CPU, {} elsewhere; {} where they are saved in shards."""
        return {} if self._in_shards else full_state_dict(self._whole(), to=0)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Collective. The full state in the plain optimizer's format, as the weights."""
        return {} if self._in_shards else sharding.full_state(getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Collective where it is saved in shards, into a directory."""
        write = super().save_checkpoint
        if not self._in_shards:
            self._remove_shards(filepath)
            write(checkpoint, filepath, storage_options)
            return
        save = lambda entry, file: write({**checkpoint, **entry}, file, storage_options)  # noqa: E731
        optimizers = [*self.optimizers] if "optimizer_states" in checkpoint else []
        self._save_shards(self.broadcast(filepath), self._whole(), optimizers or None, save)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Of a directory, which this strategy has written at any stage: where the rest is, to be loaded when asked."""
        rest = sharding.rest_of(checkpoint_path)
        found = super().load_checkpoint(rest or checkpoint_path, weights_only)
        if rest is not None:
            found[sharding.SHARDS] = (place(checkpoint_path) / found[sharding.SHARDS]).url
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Collective. Takes full weights, or shards."""
        if sharding.SHARDS in checkpoint:
            saved.load(checkpoint[sharding.SHARDS], self._whole())
        else:
            weights: Mapping[str, Any] = checkpoint["state_dict"]
            callbacks = _averaging(self.lightning_module.trainer) if isinstance(self.model, FSDP) else []
            if _CURRENT in checkpoint and any(one._average_model is not None for one in callbacks):
                # WeightAveraging has put averages in the place of the model's weights, which it would later load into
                # the plain module, which holds shards: that is given its own tensors instead.
                weights = checkpoint[_CURRENT]
                checkpoint[_CURRENT] = self.lightning_module.state_dict(keep_vars=True)  # type: ignore[index]
            load_full_state_dict(self._whole(), weights, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective. Takes full state, of any strategy, or shards."""
        for one in self.optimizers:
            if isinstance(one, OSS):  # BaseFinetuning has put groups into its list that it must be given
                known = len(one.optim.param_groups)
                one.param_groups, added = one.param_groups[:known], one.param_groups[known:]
                for group in added:
                    one.add_param_group(group)
        if sharding.SHARDS in checkpoint:
            load_state(checkpoint[sharding.SHARDS], self._whole(), self.optimizers)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_optimizer_state_dict(self._whole(), optimizer, state)

    def _whole(self) -> Any:
        """The model as zero.checkpoint takes it."""
        return sharding.sharded_before(self.lightning_module) or self.model
