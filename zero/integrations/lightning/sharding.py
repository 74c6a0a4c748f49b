"""What ZeroStrategy and ZeroFabricStrategy share: wrapping, loss scaling, and checkpoints in shards."""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from lightning.fabric.plugins import precision as fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins import precision as pytorch
from torch import nn
from torch.optim import Optimizer

from zero.checkpoint.directory import checkpoints
from zero.checkpoint.storage import place
from zero.checkpoint.write import save_in_place
from zero.comm import Comm
from zero.fsdp import FSDP
from zero.fsdp.model import sharded_params
from zero.full_state import full_optimizer_state_dict
from zero.measure.param_groups import steps
from zero.oss import OSS
from zero.precision import Rounding, refuse_precision
from zero.scripts import no_sync, unwrap
from zero.sdp import AveragingDDP, ShardedDDP
from zero.wrap.precision import MixedPrecision, as_precision

# In the directory of a sharded checkpoint: the file with what Lightning saves besides weights and optimizer state, and
# its entry that names the zero.checkpoint there. Whenever a save ends, both are of one step.
_REST, SHARDS = "lightning.ckpt", "zero_checkpoint"


class MappedCheckpointIO(TorchCheckpointIO):
    """Lightning's own reader, onto the CPU, by which each rank takes its elements of one tensor after another.

    copied: entries that are copied as they are loaded; "" is all. They are mapped from the file, without memory until
    they are read. Others are copied here: callbacks may keep their tensors, under which the file may be written again.
    """

    copied: Collection[str] = ("state_dict", "optimizer_states", "current_model_state")

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        if weights_only is False or not Path(path).is_file() or not zipfile.is_zipfile(path):  # elsewhere, or old
            return super().load_checkpoint(path, map_location, weights_only)
        found: dict[str, Any] = torch.load(path, map_location=map_location, mmap=True, weights_only=True)
        return {name: value if {name, ""} & {*self.copied} else deepcopy(value) for name, value in found.items()}


class ShardedStrategy:
    """How a strategy shards a model. Comes before Lightning's own DDPStrategy, which gets its own options; all are said
    in ZeroStrategy. Raises ValueError for an unknown stage or checkpoint."""

    root_device: torch.device
    is_global_zero: bool

    def __init__(
        self, stage: int, *, oss: Any = None, checkpoint: str = "full", sync_each_batch: bool = True, **options: Any
    ) -> None:
        self._policy, self._roundings = as_precision(options.pop("precision", None)), dict[nn.Module, Rounding]()
        if stage not in (1, 2, 3) or checkpoint not in ("full", "sharded"):
            raise ValueError(f"{stage=}, {checkpoint=}. Choose 1, 2 or 3, and 'full' or 'sharded'.")
        self._stage, self._in_shards, self._oss = stage, checkpoint == "sharded", dict(oss or {})
        self._syncs_each_batch, self._averaging = sync_each_batch and stage > 1, WeakSet[AveragingDDP]()
        known = inspect.signature(super().__init__).parameters
        theirs = {name: options.pop(name) for name in [*options] if name in known}
        self._options = options
        super().__init__(**theirs)

    def setup_environment(self) -> None:
        """Lightning's own reader becomes the one that maps files: in the constructor it would rule out a plugin."""
        super().setup_environment()  # type: ignore[misc]
        if type(self.checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io: Any = MappedCheckpointIO()

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
        if self._stage < 3 and self._policy.param_dtype is not None:
            refuse_precision(self._policy, module, self._stage)
            rounding = self._roundings[module] = Rounding(self._policy, module, None, Comm())
            rounding.start_alike()

    def _shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Collective. At stages 1 and 2 the OSS that replaces the optimizer; at stage 3 the optimizer itself."""
        if self._stage == 3 or isinstance(optimizer, OSS):
            return optimizer
        rounded = {param: dtype for one in self._roundings.values() for param, dtype in one.dtypes.items()}
        sharded = OSS.from_optimizer(optimizer, precision=self._policy, rounded=rounded, **self._oss)
        for model in self._averaging:  # set up before, without its optimizer
            if steps(sharded, model):
                model.adopt(sharded)
        return sharded

    def _wrap(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Collective. optimizers: those of `_shard_optimizer`."""
        if self._stage == 3:
            wrapped = FSDP(module, **{"device_id": self.root_device, "precision": self._policy, **self._options})
            _sharded[module] = ref(wrapped)
            for one in optimizers:
                wrapped.register_optimizer(one)
            return wrapped
        own = [one for one in optimizers if isinstance(one, OSS)]
        rounding, kind = self._roundings.pop(module, None), ShardedDDP if self._stage == 2 else AveragingDDP
        if rounding is not None:
            model = rounding.wrap(kind, own, **self._options)
        else:
            model = kind(module, own, precision=self._policy, **self._options)
        if isinstance(model, AveragingDDP) and not own:
            self._averaging.add(model)
        return model

    def _accumulating(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context for the forward and backward of a batch that no step follows."""
        return nullcontext() if self._syncs_each_batch else no_sync(module)

    def _save_shards(self, path: Any, model: nn.Module, optimizers: Any, save: Callable[[Any, str], None]) -> None:
        """Collective. Saves a directory; what was there before is removed. save: writes this entry and all else."""
        directory = place(path)
        if self.is_global_zero and directory.exists() and not directory.inside():
            directory.remove()  # a full checkpoint, which is a file
        shards = place(save_in_place(path, model, optimizers).path).name
        save({SHARDS: shards}, (directory / _REST).url)
        for old in checkpoints(directory) if self.is_global_zero else ():
            if old.name != shards:
                old.remove()

    def _remove_shards(self, path: Any) -> None:
        """Removes a sharded checkpoint where a full one is about to be saved, which would be put inside."""
        if self.is_global_zero and rest_of(path) is not None:
            self.checkpoint_io.remove_checkpoint(path)


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


def end(module: nn.Module) -> None:
    """Collective. Makes a module plain that a strategy has left sharded."""
    if (before := sharded_before(module)) is not None:
        unwrap(before)


def full_state(optimizer: Optimizer) -> dict[str, Any]:
    """Collective. The full state in the plain optimizer's format, on rank 0's CPU; {} elsewhere."""
    wrappers = [wrapper for known in _sharded.values() if (wrapper := known()) is not None]
    holders = [one for one in wrappers if steps(optimizer, one)]  # an OSS needs no model
    holder = holders[0] if len(holders) == 1 else nn.ModuleList(holders)
    return full_optimizer_state_dict(holder, optimizer, to=0)


def rest_of(path: Any) -> str | None:
    """What Lightning has saved in a directory that zero.checkpoint has written; None for other checkpoints."""
    with suppress(ValueError, ImportError):  # an address that only the user's CheckpointIO knows
        if (rest := place(path) / _REST).exists():
            return rest.url
    return None
