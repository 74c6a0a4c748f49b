"""Lightning's Trainer and Fabric, at any stage. Importing this registers `zero_stage_1` to `zero_stage_3`, as in
lightning.Trainer(strategy="zero_stage_2", devices=8) and lightning.Fabric(strategy="zero_stage_3", devices=8).

fit          stages 1, 2: optimizers are configured, sharded by OSS, then the model is wrapped; stage 3: the reverse
teardown     stages 1, 2: the plain module is back; stage 3: it stays sharded, for test() and for saving
otherwise    stages 1, 2: the plain module, made the same on all ranks; stage 3: sharded, also if it was not before

Averages of weights that callbacks keep are shards at stage 3, laid out as the shards of the model: an average of each
element depends on that element alone, so the averages of the shards are the shards of the averages.
"""

# ruff: noqa: E402 (the imports below are what fails with an older version)

from __future__ import annotations

from zero.integrations.versions import refuse_older

refuse_older("lightning")

import inspect
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import precision as fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricsDDPStrategy
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import precision as pytorch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.compiling import name_without_compile
from zero._torch.optimizers import follow
from zero.checkpoint.read import load_part
from zero.checkpoint.shards import names_left_out
from zero.checkpoint.storage import LATEST, beside, checkpoints, place
from zero.checkpoint.write import save_in_place
from zero.comm import Comm
from zero.comm.together import alike, together
from zero.fsdp import FSDP
from zero.fsdp.model import sharded_params
from zero.full_state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from zero.measure.param_groups import steps
from zero.oss import OSS
from zero.precision import Rounding, refuse_precision
from zero.sdp import AveragingDDP, ShardedDDP
from zero.wrap.precision import MixedPrecision, as_precision
from zero.wrappers import no_sync, unwrap, unwrapped, wrapper_of

# In the directory of a sharded checkpoint: the file with what Lightning saves besides weights and optimizer state, and
# its entry that names the zero.checkpoint there. Whenever a save ends, both are of one step.
_REST, SHARDS = "lightning.ckpt", "zero_checkpoint"


class MappedCheckpointIO(TorchCheckpointIO):
    """Collective. Lightning's own reader, onto the CPU, by which ranks take their elements of one tensor after another.

    copied: entries that are copied as they are loaded; "" is all. They are mapped from the file, without memory until
    they are read. Others are copied here: callbacks may keep their tensors, under which the file may be written again.
    """

    copied: Collection[str] = ("state_dict", "optimizer_states", "current_model_state")

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        with together():  # before they are loaded, which ranks do in step
            if weights_only is False or not Path(path).is_file() or not zipfile.is_zipfile(path):  # elsewhere, or old
                return super().load_checkpoint(path, map_location, weights_only)
            found: dict[str, Any] = torch.load(path, map_location=map_location, mmap=True, weights_only=True)
        return {name: value if {name, ""} & {*self.copied} else deepcopy(value) for name, value in found.items()}


class ShardedStrategy:
    """How a strategy shards a model: before Lightning's own DDPStrategy, which gets its own options."""

    root_device: torch.device
    is_global_zero: bool

    def __init__(
        self,
        stage: int,
        *,
        oss: Any = None,
        checkpoint: str = "full",
        exclude_frozen_parameters: bool = False,
        sync_each_batch: bool = True,
        **options: Any,
    ) -> None:
        self._policy, self._roundings = as_precision(options.pop("precision", None)), dict[nn.Module, Rounding]()
        if stage not in (1, 2, 3) or checkpoint not in ("full", "sharded"):
            raise ValueError(f"{stage=}, {checkpoint=}. Choose 1, 2 or 3, and 'full' or 'sharded'.")
        self._stage, self._in_shards, self._oss = stage, checkpoint == "sharded", dict(oss or {})
        self._without_frozen = exclude_frozen_parameters
        self._syncs_each_batch = sync_each_batch and stage > 1
        self._averaging: list[ReferenceType[nn.Module]] = []  # no WeakSet, which launchers that spawn cannot pickle
        known = inspect.signature(super().__init__).parameters
        theirs = {name: options.pop(name) for name in [*options] if name in known}
        self._options = options
        super().__init__(**theirs)

    def setup_environment(self) -> None:
        """Lightning's own reader becomes the one that maps files: in the constructor it would rule out a plugin."""
        super().setup_environment()  # type: ignore[misc]
        if type(self.checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io: Any = MappedCheckpointIO()

    def __repr__(self) -> str:  # Lightning shows it where the other class is needed
        of_fabric = isinstance(self, FabricsDDPStrategy)
        whose = "Fabric; a Trainer takes ZeroStrategy" if of_fabric else "a Trainer; Fabric takes ZeroFabricStrategy"
        return f"{type(self).__name__}(stage={self._stage}, for {whose})"

    def _take_precision(self, plugin: Any) -> None:
        """Has the plugin of "bf16-mixed" and "16-mixed" mean `precision`, as at every stage: its autocast ends."""
        if isinstance(plugin, (fabric.MixedPrecision, pytorch.MixedPrecision)):
            dtype = torch.float16 if plugin.precision == "16-mixed" else torch.bfloat16
            if self._policy == MixedPrecision():
                self._policy = MixedPrecision(dtype)
            if self._policy.param_dtype != dtype:
                raise ValueError(
                    f"precision={plugin.precision!r} of Lightning and {self._policy} of the strategy both say in which "
                    "dtype the model computes. Pass one of them."
                )
            vars(plugin)["forward_context"] = nullcontext

    def _round(self, module: nn.Module) -> None:
        """Collective at stages 1 and 2 in 16 bits: before the module's optimizers are sharded."""
        if self._stage < 3:
            refuse_precision(self._policy, module, self._stage)
            rounding = self._roundings[module] = Rounding(self._policy, module, None, Comm())
            rounding.start_alike()

    def _device(self, empty_init: bool | None) -> AbstractContextManager[Any]:
        """Where `init_module` builds: at stage 3 as Lightning's FSDPStrategy, also what no device can hold in full."""
        return torch.device("meta" if empty_init else "cpu") if self._stage == 3 else nullcontext()

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Collective. At stages 1 and 2 the OSS that replaces the optimizer; at stage 3 the optimizer itself."""
        if self._stage == 3 or isinstance(optimizer, OSS):
            return optimizer
        rounded = {param: dtype for one in self._roundings.values() for param, dtype in one.dtypes.items()}
        sharded = OSS.from_optimizer(optimizer, precision=self._policy, rounded=rounded, **self._oss)
        for known in self._averaging:  # set up before, without its optimizer
            if isinstance(model := known(), AveragingDDP) and steps(sharded, model):
                model.adopt(sharded)
        return sharded

    def _wrap(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Collective. optimizers: those of `setup_optimizer`."""
        if self._stage == 3:
            wrapped = FSDP(module, **{"device_id": self.root_device, "precision": self._policy, **self._options})
            _sharded[module] = ref(wrapped)
            for one in optimizers:
                wrapped.register_optimizer(one)
            return wrapped
        own = [one for one in optimizers if isinstance(one, OSS)]
        kind = ShardedDDP if self._stage == 2 else AveragingDDP
        model = self._roundings.pop(module).wrap(kind, own, **self._options)
        if isinstance(model, AveragingDDP) and not own:
            self._averaging.append(ref(model))
        return model

    def _saved_weights(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Collective. The full weights that are saved, on rank 0's CPU; {} elsewhere."""
        found = full_state_dict(model, to=0)
        if not self._without_frozen:
            return found
        left_out = names_left_out(model, optimizers)
        return {name: value for name, value in found.items() if name_without_compile(name) not in left_out}

    def _load_weights(self, model: nn.Module, weights: Mapping[str, Any], strict: bool) -> None:
        """Collective. Frozen parameters that were left out keep their values."""
        named = unwrapped(model)[0].named_parameters(remove_duplicate=False) if self._without_frozen else ()
        frozen = {name for name, param in named if not param.requires_grad}
        missing, unexpected = load_full_state_dict(model, weights, strict and not frozen)
        if strict and frozen and (differing := [*({*missing} - frozen), *unexpected]):
            raise RuntimeError(
                f"only the checkpoint, or only the model, has {differing}, which are no frozen parameters. Build the "
                "model that was saved, or load with strict=False (strict_loading of a LightningModule)."
            )

    @contextmanager
    def _replacing(self, path: Any) -> Iterator[Any]:
        """Collective. Where a checkpoint is written that then is at a path: there, or beside one of the other kind."""
        first = self.is_global_zero
        with together() as step:
            taken = first and (place(path).is_file() if self._in_shards else bool(rest_of(path, LATEST)))
            if not step.agree(int(taken)):
                yield path
                return
            with beside(place(path), moves=first) as new:
                yield new.url
                step.agree()
                if first:
                    self.checkpoint_io.teardown()  # one that writes on a thread has written then

    def _save_shards(self, path: Any, model: nn.Module, optimizers: Any, save: Callable[[Any, str], None]) -> None:
        """Collective. Saves a directory; what was there before is removed. save: writes this entry and all else."""
        with self._replacing(path) as new:
            directory = place(new)
            shards = place(save_in_place(new, model, optimizers, frozen=not self._without_frozen).path).name
            save({SHARDS: shards}, (directory / _REST).url)
            if self.is_global_zero:
                self.checkpoint_io.teardown()
                for old in (one for one in checkpoints(directory) if one.name != shards):
                    old.remove()


_sharded: WeakKeyDictionary[nn.Module, ReferenceType[FSDP]] = WeakKeyDictionary()  # by module its last wrapper


def sharded_before(module: nn.Module) -> FSDP | None:
    """The FSDP by which any strategy still has the module wrapped. Raises ValueError if it exists no longer."""
    if isinstance(module, FSDP):
        return module
    if sharded_params().isdisjoint(module.parameters()):
        return None
    wrapper = _sharded[module]() if module in _sharded else None
    if wrapper is None:
        raise ValueError("the module is sharded by an FSDP that is gone. Keep its Trainer, or call zero.unwrap before.")
    return wrapper


def full_state(optimizer: Optimizer) -> dict[str, Any]:
    """Collective. The full state in the plain optimizer's format, on rank 0's CPU; {} elsewhere."""
    wrappers = [wrapper for known in _sharded.values() if (wrapper := known()) is not None]  # an OSS needs no model
    return full_optimizer_state_dict(wrapper_of(optimizer, wrappers), optimizer, to=0)


def rest_of(path: Any, *more: str) -> str | None:
    """What Lightning has saved in a directory by zero.checkpoint, or torch's; or one of more files; None elsewhere."""
    with suppress(ValueError, ImportError):  # an address that only the user's CheckpointIO knows
        for name in (_REST, _METADATA_FILENAME, *more):
            if (rest := place(path) / name).exists():
                return rest.url
    return None


def _shards_in(path: Any, rest: dict[str, Any]) -> str:
    """Where the shards are, in such a directory."""
    own = rest.pop(SHARDS, None)
    return place(path).url if own is None else (place(path) / own).url


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


class ZeroStrategy(ShardedStrategy, DDPStrategy):
    """ZeRO for Lightning's Trainer. Numbers are those of strategy="ddp".

        trainer = Trainer(strategy=ZeroStrategy(stage=2), precision="bf16-mixed", devices=8)

    stage: 1 (OSS), 2 (ShardedDDP) or 3 (FSDP). `strategy="zero_stage_2"` is ZeroStrategy(stage=2).
    oss: options of OSS at stages 1 and 2, such as partition.
    checkpoint: "full" writes one file from rank 0, which every strategy loads. "sharded" writes a directory by
        zero.checkpoint, in which each rank writes its shards. Every stage reads both kinds, on any number of ranks.
    exclude_frozen_parameters: leaves out of checkpoints what is frozen (requires_grad=False) and has no state in an
        optimizer, such as the base of adapters. The model keeps its own values of them when it loads; strategies
        without this option load a full one with `strict_loading=False`.
    sync_each_batch: at stages 2 and 3, whether accumulate_grad_batches reduces the gradients of each batch, so that a
        rank holds its share of them. False sends them once, and holds them in full until then.
    options: of the stage's wrapper: DistributedDataParallel, ShardedDDP or FSDP. Other arguments are DDPStrategy's.
    """

    model: Any
    accelerator: Any
    cluster_environment: Any
    lightning_module: pl.LightningModule
    _wrapper: FSDP | None = None  # of stage 3, while `model` is the plain module
    _awaited: tuple[Mapping[str, Any], bool] | None = None  # a checkpoint, and whether its names must be the model's

    def setup_environment(self) -> None:
        """Collective where the model is sharded from the run before, and callbacks will copy it: it becomes plain."""
        super().setup_environment()
        if _averaging(self.lightning_module.trainer) and (before := sharded_before(self.lightning_module)) is not None:
            unwrap(before)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """The context of `trainer.init_module`."""
        with super().tensor_init_context(empty_init), self._device(empty_init):
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Collective. Shards the model and its optimizers, for the run that begins."""
        self.accelerator.setup(trainer)
        awaited, self._awaited = self._awaited, None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._take_precision(self.precision_plugin)
        pruned = any(isinstance(one, ModelPruning) for one in trainer.callbacks)  # type: ignore[attr-defined]
        if fitting and pruned:
            raise ValueError("ModelPruning gives parameters other data, which are sharded here. Use strategy='ddp'.")
        for callback in _averaging(trainer) if fitting and (self._in_shards or self._without_frozen) else ():
            if isinstance(callback, WeightAveraging):  # checkpoints are directories, which hold the weights once
                raise ValueError(
                    f"{type(callback).__name__} saves two sets of weights, and loads them in full. Use "
                    "checkpoint='full' and exclude_frozen_parameters=False."
                )
        before = sharded_before(self.lightning_module)
        if self._stage < 3 and before is not None:
            unwrap(before)
            before = None
        if before is None:
            if fitting and self._layer_sync:
                self.model = self._layer_sync.apply(self.lightning_module)
            self.model = self.precision_plugin.convert_module(self.lightning_module)
        if self._stage == 3:
            self.model = self._wrapper = before or self._wrap(self.lightning_module, ())  # type: ignore[assignment]
            if awaited is not None:
                self.load_model_state_dict(*awaited)
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
        sharded = {one: self.setup_optimizer(one) for one in held}
        self.optimizers = [sharded.get(one, one) for one in self.optimizers]
        for config in self.lr_scheduler_configs:
            if config.scheduler.optimizer in sharded:
                follow(config.scheduler, sharded[config.scheduler.optimizer])  # else monitors log both optimizers

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The context of batches that accumulate."""
        with nullcontext() if self._syncs_each_batch else no_sync(self.model):
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

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective. Full weights on rank 0's CPU, {} elsewhere; {} where they are saved in shards."""
        return {} if self._in_shards else self._saved_weights(self._whole(), self.optimizers)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Collective. The full state in the plain optimizer's format, as the weights."""
        return {} if self._in_shards else full_state(getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Collective. Where it is saved in shards, into a directory."""
        write = super().save_checkpoint
        if not self._in_shards:
            with self._replacing(filepath) as path:
                write(checkpoint, path, storage_options)
            return
        save = lambda entry, file: write({**checkpoint, **entry}, file, storage_options)  # noqa: E731
        optimizers = [*self.optimizers] if "optimizer_states" in checkpoint else []
        self._save_shards(self.broadcast(filepath), self._whole(), optimizers or None, save)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Collective. Of a directory, which this strategy has written at any stage, or Lightning's FSDPStrategy and
        ModelParallelStrategy: where the rest is, to be loaded when asked."""
        with together():
            rest = rest_of(checkpoint_path)
            found = super().load_checkpoint(rest or checkpoint_path, weights_only)
        if rest is not None:
            found[SHARDS] = _shards_in(checkpoint_path, found)
            found.setdefault("optimizer_states", [])  # Lightning asks whether there are any
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Collective. Takes full weights, or shards. `configure_optimizers` and `on_fit_start` find them loaded."""
        before = sharded_before(self.lightning_module)
        if self._stage == 3 and before is None and not _averaging(self.lightning_module.trainer):
            self._awaited = checkpoint, strict  # `setup` loads it, so that each rank reads its shards alone
        elif SHARDS in checkpoint:
            load_part(checkpoint[SHARDS], self._whole(), strict=strict)
        else:
            self._load_weights(self._whole(), checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective. Takes full state, of any strategy, or shards."""
        for one in self.optimizers:
            if isinstance(one, OSS):  # BaseFinetuning has put groups into its list that it must be given
                known = len(one.optim.param_groups)
                one.param_groups, added = one.param_groups[:known], one.param_groups[known:]
                for group in added:
                    one.add_param_group(group)
        if SHARDS in checkpoint:
            strict = self.lightning_module.strict_loading
            load_part(checkpoint[SHARDS], self._whole(), self.optimizers, weights=False, strict=strict)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_optimizer_state_dict(self._whole(), optimizer, state)

    def _whole(self) -> Any:
        """The model as zero.checkpoint takes it."""
        return sharded_before(self.lightning_module) or self.model


_KINDS = (nn.Module, Optimizer)


class ZeroFabricStrategy(ShardedStrategy, FabricsDDPStrategy):
    """ZeRO for Lightning Fabric. Numbers are those of strategy="ddp".

        fabric = Fabric(strategy=ZeroFabricStrategy(stage=3), precision="bf16-mixed", devices=8)
        model, optimizer = fabric.setup(model, optimizer)

    Arguments as in ZeroStrategy; sync_each_batch=False lets `no_backward_sync` at stages 2 and 3 leave gradients full.
    Set up model and optimizers together; `setup_module` alone works at stage 3, and at 1 in float32. A directory, with
    checkpoint="sharded", is of one model.
    """

    def __init__(self, stage: int, **options: Any) -> None:
        super().__init__(stage, **options)
        self._backward_sync_control: Any = self

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Collective. Schedulers then schedule the sharded optimizers."""
        self._take_precision(self.precision)
        self._round(module)
        sharded = [self.setup_optimizer(one) for one in optimizers]
        return self._wrap(module, sharded), sharded, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Collective. Raises RuntimeError at stage 2, which shards gradients by the optimizer."""
        if self._stage == 2:
            raise RuntimeError(
                "fabric.setup_module() at stage 2: the optimizer is needed. fabric.setup(model, optimizer)"
            )
        return self.setup_module_and_optimizers(module, [])[0]

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """The context of `fabric.init_module`."""
        with super().module_init_context(empty_init), self._device(empty_init):
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Moves the module at stages 1 and 2. At stage 3 FSDP moves it, and initialises meta parameters."""
        if self._stage < 3:
            super().module_to_device(module)

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """What `fabric.no_backward_sync` enters."""
        return no_sync(module) if enabled and not self._syncs_each_batch else nullcontext()

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any | Tensor]:
        """Collective. Full weights on rank 0's CPU, {} elsewhere."""
        return full_state_dict(sharded_before(module) or module, to=0)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Collective."""
        self._load_weights(sharded_before(module) or module, state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Collective. The full state in the plain optimizer's format, as the weights."""
        return full_state(optimizer)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Collective."""
        write = super().save_checkpoint
        if not self._in_shards:
            with self._replacing(path) as new:
                if self._without_frozen:
                    model, optimizers, _ = _divided(state)
                    weights = self._saved_weights(model, optimizers or [])
                    state = {name: weights if isinstance(one, nn.Module) else one for name, one in state.items()}
                write(new, state, storage_options, filter)
            return
        if filter:
            raise ValueError("filter: a sharded checkpoint has the full model. Leave it out, or use checkpoint='full'.")
        model, optimizers, rest = _divided(state)
        save = lambda entry, file: write(file, {**rest, **entry}, storage_options)  # noqa: E731
        self._save_shards(path, model, optimizers, save)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Collective. Loads both kinds of checkpoints."""
        given = state if isinstance(state, dict) else {"": state}
        with together():
            if (of_lightning := rest_of(path)) is None:
                if isinstance(self.checkpoint_io, MappedCheckpointIO):
                    self.checkpoint_io.copied = [name for name, value in given.items() if isinstance(value, _KINDS)]
                return super().load_checkpoint(path, state, strict, weights_only)
            model, optimizers, rest = _divided(given)
            remainder = super().load_checkpoint(of_lightning, rest, strict, weights_only)
            load_part(_shards_in(path, remainder), model, optimizers, strict=strict)
            given.update(rest)
            return remainder


def _divided(state: dict[str, Any]) -> tuple[nn.Module, list[Optimizer] | None, dict[str, Any]]:
    """The model, the optimizers, and all other values. Raises ValueError unless there is one model."""
    models = [sharded_before(value) or value for value in state.values() if isinstance(value, nn.Module)]
    if len(models) != 1:
        raise ValueError(
            f"a checkpoint in shards, or without frozen parameters, holds one model, but there are {len(models)}. Use "
            "checkpoint='full' and exclude_frozen_parameters=False."
        )
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)] or None
    return models[0], optimizers, {name: value for name, value in state.items() if not isinstance(value, _KINDS)}


for _stage in (1, 2, 3):
    _title = f"ZeRO stage {_stage}"
    StrategyRegistry.register(f"zero_stage_{_stage}", ZeroStrategy, _title, override=True, stage=_stage)
    STRATEGY_REGISTRY.register(f"zero_stage_{_stage}", ZeroFabricStrategy, _title, override=True, stage=_stage)

__all__ = ["ZeroFabricStrategy", "ZeroStrategy"]
