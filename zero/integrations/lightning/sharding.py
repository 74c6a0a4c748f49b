"""The code that ZeroStrategy and ZeroFabricStrategy share."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero.fsdp import FSDP
from zero.fsdp.model import sharded_params
from zero.full_state import full_optimizer_state_dict
from zero.grad_scaler import GradScaler
from zero.measure.param_groups import steps
from zero.oss import OSS
from zero.scripts import no_sync
from zero.sdp import ShardedDDP

REST = "lightning.ckpt"
"""The file in the directory of a sharded checkpoint with what Lightning saves besides weights and optimizer state."""
SHARDS = "zero_checkpoint"
"""The entry in it that names the zero.checkpoint in that directory: whenever a save ends, both are of one step."""


class MappedCheckpointIO(TorchCheckpointIO):
    """Lightning's own reader, onto the CPU, by which each rank takes its elements of one tensor after another.

    copied: whether an entry is copied as it is loaded. Such entries are mapped from the file: they take no memory until
    they are read, and the ranks of a host share that. Others are copied here: callbacks may keep their tensors, under
    which the file must not be written again.
    """

    copied: Callable[[str], bool] = ("state_dict", "optimizer_states", "current_model_state").__contains__

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        on_disk = Path(path).is_file() and zipfile.is_zipfile(path)  # others are elsewhere, or of a torch before 1.6
        if weights_only is False or not on_disk:
            return super().load_checkpoint(path, map_location, weights_only)
        found: dict[str, Any] = torch.load(path, map_location=map_location, mmap=True, weights_only=True)
        return {name: value if self.copied(name) else deepcopy(value) for name, value in found.items()}


class ShardedStrategy:
    """How a strategy shards a model. Comes before Lightning's own DDPStrategy, which gets the options in `lightnings`.

    oss: options of OSS, at stages 1 and 2. options: of the model's wrapper: DistributedDataParallel, ShardedDDP, FSDP.
    checkpoint: "full", one file, or "sharded", directories that zero.checkpoint writes.
    sync_each_batch: at stages 2 and 3, whether backwards that accumulate reduce gradients, or leave them full.
    Raises ValueError for an unknown stage or checkpoint, and for options that the stage does not have.
    """

    lightnings: tuple[str, ...] = (
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "process_group_backend"),
        *("timeout", "start_method"),
    )
    root_device: torch.device

    def __init__(
        self,
        stage: int,
        *,
        oss: Mapping[str, Any] | None = None,
        checkpoint: Literal["full", "sharded"] = "full",
        sync_each_batch: bool = True,
        **options: Any,
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"stage={stage!r} is unknown. Choose 1 (OSS), 2 (ShardedDDP) or 3 (FSDP).")
        if stage == 3 and oss:
            raise ValueError(f"oss={dict(oss)}: OSS is for stages 1 and 2. At stage 3 pass options of FSDP.")
        if checkpoint not in ("full", "sharded"):
            raise ValueError(f"checkpoint={checkpoint!r} is unknown. Choose 'full' or 'sharded'.")
        self._stage, self._in_shards, self._oss = stage, checkpoint == "sharded", dict(oss or {})
        self._syncs_each_batch = sync_each_batch and stage > 1
        theirs = {name: options.pop(name) for name in self.lightnings if name in options}
        theirs["checkpoint_io"] = theirs.get("checkpoint_io") or MappedCheckpointIO()
        self._options = options
        super().__init__(**theirs)

    def _shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Collective. At stages 1 and 2 the OSS that replaces the optimizer; at stage 3 the optimizer itself."""
        if self._stage == 3 or isinstance(optimizer, OSS):
            return optimizer
        return OSS.from_optimizer(optimizer, **self._oss)

    def _wrap(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Collective. optimizers: those of `_shard_optimizer`, at stage 2."""
        if self._stage == 3:
            wrapped = FSDP(module, **{"device_id": self.root_device, **self._options})
            _sharded[module] = ref(wrapped)
            return wrapped
        if self._stage == 2:
            return ShardedDDP(module, [one for one in optimizers if isinstance(one, OSS)], **self._options)
        ids = None if self.root_device.type == "cpu" else [self.root_device.index]
        # Without views it would hold every gradient twice.
        return DistributedDataParallel(module, **{"device_ids": ids, "gradient_as_bucket_view": True, **self._options})

    def _accumulating(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context for the forward and backward of a batch that no step follows."""
        return nullcontext() if self._syncs_each_batch else no_sync(module)

    def _refuse_clipping_by_value(self) -> None:
        """Raises ValueError at stages 2 and 3."""
        if self._stage > 1:
            raise ValueError(
                f"clipping gradients by value is not available at stage {self._stage}, where they are sharded. Clip by "
                "norm (gradient_clip_algorithm='norm'; max_norm= of Fabric.clip_gradients), or take stage 1."
            )


# For each module the FSDP with which a strategy has wrapped it last.
_sharded: WeakKeyDictionary[nn.Module, ReferenceType[FSDP]] = WeakKeyDictionary()


def sharded_before(module: nn.Module) -> FSDP | None:
    """The FSDP with which a strategy, this one or another, has wrapped the module, if it is still wrapped.

    Raises ValueError if that strategy, and with it the wrapper, no longer exists.
    """
    if isinstance(module, FSDP):
        return module
    if sharded_params().isdisjoint(module.parameters()):
        return None
    wrapper = _sharded[module]() if module in _sharded else None
    if wrapper is None:
        raise ValueError(
            f"the {type(module).__name__} is sharded by an FSDP that no longer exists, nor does the Trainer or Fabric "
            "that made it. Keep the first Trainer, or call zero.unwrap(trainer.strategy.model) before you drop it."
        )
    return wrapper


def fsdp_of(optimizer: Optimizer) -> FSDP | None:
    """The FSDP of a strategy that holds the optimizer's parameters."""
    wrappers = [wrapper for known in _sharded.values() if (wrapper := known()) is not None]
    return next((one for one in wrappers if steps(optimizer, one.module)), None)


def full_state(optimizer: Optimizer) -> dict[str, Any]:
    """Collective. The full state in the plain optimizer's format, on rank 0's CPU; {} elsewhere."""
    return full_optimizer_state_dict(fsdp_of(optimizer) or nn.Module(), optimizer, to=0)  # an OSS needs no model


def scale_for_shards(plugin: Any) -> None:
    """Replaces a precision plugin's torch GradScaler by zero's, with the same options: if one rank has an overflow, all
    ranks skip the step."""
    scaler = getattr(plugin, "scaler", None)
    if type(scaler) is torch.amp.GradScaler:
        plugin.scaler = GradScaler(plugin.device, enabled=scaler.is_enabled())
        if scaler.is_enabled():
            plugin.scaler.load_state_dict(scaler.state_dict())


def is_in_shards(path: Any) -> bool:
    """Whether a checkpoint is a directory that zero.checkpoint has written."""
    return Path(path, REST).is_file()


def remove_others(path: Path, shards: str) -> None:
    """Removes the checkpoints in the directory that REST named before it named this one."""
    for old in path.glob("[0-9]" * len(shards)):
        if old.name != shards:
            shutil.rmtree(old)
