"""The files that `save_state` writes, and the optimizer that loads them.

FULL_STATE_DICT: `model.safetensors` (or `pytorch_model.bin`) and `optimizer.bin`, as Accelerate without zero writes
them. SHARDED_STATE_DICT: a zero.checkpoint of each model with its optimizers, in `zero`, `zero_1` and so on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from torch import Tensor, nn
from torch.optim import Optimizer

from zero import checkpoint
from zero.checkpoint.read import load_state
from zero.integrations.accelerate import full_files
from zero.integrations.accelerate.sharding import inside
from zero.load_full import load_full_optimizer_state_dict
from zero.measure.param_groups import steps

_SHARDED, _OPTIMIZER = "zero", f"{OPTIMIZER_NAME}.bin"


class ShardedAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Loads full state, at every stage. Moves no state: it is on the shards' device.

    accelerator: zero's. Its `before_step` is called before each real step, and not before those that only accumulate.
    """

    def __init__(self, optimizer: Optimizer, accelerator: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=accelerator.scaler)
        self._accelerator = accelerator

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Collective."""
        if self.gradient_state.sync_gradients:
            self._accelerator.before_step(self.optimizer)
        super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Collective. Loads full state, of every rank or of rank 0 and None elsewhere; or this rank's own."""
        load_full_optimizer_state_dict(self._accelerator.sharding.holder_of(self.optimizer), self.optimizer, state_dict)
        if self._accelerator.zero_plugin.stage == 3:
            _take_masters(self.optimizer)


@torch.no_grad()
def _take_masters(optimizer: Optimizer) -> None:
    """Moves master weights, which stages 1 and 2 have saved with the state, into the shards of stage 3, which are the
    masters there. Elements that are not the master rounded were loaded from elsewhere, and stay."""
    for param, state in optimizer.state.items():
        if (master := state.pop("master", None)) is not None:
            shard, master = param.as_subclass(Tensor), master.as_subclass(Tensor)
            same = (shard == master.bfloat16()) | (shard == master.half())
            shard.copy_(torch.where(same, master, shard))


def save_sharded(folder: str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Collective. Saves a checkpoint of each model and its optimizers, which replaces an existing one."""
    for number, model in enumerate(models):
        own = [one for one in optimizers if steps(one, inside(model))]
        checkpoint.save(_numbered(folder, _SHARDED, number), model, own, keep=1)


def load_sharded(
    folder: str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], loaded: Sequence[nn.Module] = ()
) -> None:
    """Collective. loaded: those of the models that keep their weights; their optimizers take their state."""
    for number, model in enumerate(models):
        path, own = _numbered(folder, _SHARDED, number), [one for one in optimizers if steps(one, inside(model))]
        if model not in loaded:
            checkpoint.load(path, model, own)
        elif own:
            load_state(path, model, own)


def is_sharded(folder: str) -> bool:
    return Path(folder, _SHARDED).is_dir()


def remove_other_kinds(folder: str, numbers: Iterable[int], *, sharded: bool, safe: bool = True) -> None:
    """Removes the models and optimizers of these numbers that a state of another kind has left in the folder: who loads
    from it next could take them for those that are about to be saved."""
    of_full = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, _OPTIMIZER)
    stale = of_full if sharded else (_SHARDED, WEIGHTS_NAME if safe else SAFE_WEIGHTS_NAME)
    for path in (_numbered(folder, name, number) for name in stale for number in numbers):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def weights_file(folder: str, number: int, *, safe: bool) -> Path:
    return _numbered(folder, SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME, number)


def optimizer_file(folder: str, number: int) -> Path:
    return _numbered(folder, _OPTIMIZER, number)


def load_full(
    folder: str,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    loaded: Sequence[nn.Module],
    *,
    strict: bool,
    **options: Any,
) -> None:
    """Collective. loaded: those of the models that keep their weights. options: of `torch.load`."""
    for number, model in enumerate(models):
        if model not in loaded:
            full_files.load_weights(model, partial(_weights_there, folder, number), strict=strict)
    for number, optimizer in enumerate(optimizers):
        read = partial(full_files.mapped, optimizer_file(folder, number), **options)
        optimizer.load_state_dict(full_files.on_first("the state of an optimizer", read))


def _weights_there(folder: str, number: int) -> list[Path]:
    safe = weights_file(folder, number, safe=True)
    return [safe if safe.exists() else weights_file(folder, number, safe=False)]


def _numbered(folder: str, name: str, number: int) -> Path:
    """Accelerate's path of a file: all but the first have their number in the name."""
    stem, dot, suffix = name.partition(".")
    return Path(folder, f"{stem}_{number}{dot}{suffix}" if number else name)
