"""Full weights and state of sharded models and optimizers, and the files that `save_state` writes.

FULL_STATE_DICT: `model.safetensors` (or `pytorch_model.bin`) and `optimizer.bin`, as Accelerate without zero writes
them. SHARDED_STATE_DICT: a zero.checkpoint of each model with its optimizers, in `zero`, `zero_1` and so on.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, load, save
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from zero import checkpoint
from zero._torch import named_as_compiled
from zero.fsdp import FSDP
from zero.full_state import full_optimizer_state_dict, full_state_dict
from zero.integrations.accelerate.sharding import Sharding, inside
from zero.load_full import load_full_optimizer_state_dict
from zero.measure.param_groups import steps
from zero.oss import OSS

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads full state, or this rank's own."""
        holder = self._accelerator.sharding.wrapper_of(self.optimizer)
        if isinstance(holder, FSDP):
            load_full_optimizer_state_dict(holder, self.optimizer, state_dict)
            _take_masters(self.optimizer)
        else:
            self.optimizer.load_state_dict(state_dict)


@torch.no_grad()
def _take_masters(optimizer: Optimizer) -> None:
    """Moves master weights, which stages 1 and 2 have saved with the state, into the shards of stage 3, which are the
    masters there. Elements that are not the master rounded were loaded from elsewhere, and stay."""
    for param, state in optimizer.state.items():
        if (master := state.pop("master", None)) is not None:
            same = (param == master.bfloat16()) | (param == master.half())
            param.copy_(torch.where(same, master, param))


def full_weights(model: nn.Module, to: int | None, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Collective. The full weights on rank `to`, on the CPU; other ranks get none. None: every rank gets them.

    dtype: to which floating-point tensors are cast.
    """
    found = full_state_dict(model, to=to, device="cpu" if to is not None else None)
    if dtype is None:
        return found
    of: dict[Tensor, Tensor] = {}
    for name, value in found.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            found[name] = of.setdefault(value, value.to(dtype))  # tied weights share a copy
    return found


def full_state(sharding: Sharding, optimizer: Optimizer, to: int | None) -> dict[str, Any] | None:
    """Collective. The optimizer's full state in the plain optimizer's format on rank `to`; None: on every rank."""
    if isinstance(optimizer, OSS):
        optimizer.consolidate_state_dict(to)
        here = to is None or optimizer.comm.rank == to
        found = optimizer.state_dict() if here else None
        optimizer.state_dicts.forget()
        return found
    holder = sharding.wrapper_of(optimizer)
    return full_optimizer_state_dict(holder, optimizer, to) if isinstance(holder, FSDP) else optimizer.state_dict()


def save_sharded(folder: str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Collective. Saves a checkpoint of each model and its optimizers, which replaces an existing one."""
    for number, model in enumerate(models):
        own = [one for one in optimizers if steps(one, inside(model))]
        checkpoint.save(_numbered(folder, _SHARDED, number), model, own, keep=1)


@torch.no_grad()
def load_sharded(
    folder: str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], loaded: Sequence[nn.Module] = ()
) -> None:
    """Collective. loaded: those of the models that keep their weights; their optimizers take their state."""
    for number, model in enumerate(models):
        own = [one for one in optimizers if steps(one, inside(model))]
        kept = [*model.parameters(), *model.buffers()] if model in loaded else []
        values = [tensor.detach().clone() for tensor in kept]
        if own or model not in loaded:
            checkpoint.load(_numbered(folder, _SHARDED, number), model, own)
        for tensor, value in zip(kept, values, strict=True):
            tensor.copy_(value)


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


def save_full(
    folder: str, weights: Mapping[int, dict[str, Any]], optimizers: Iterable[Any], *, safe: bool, each_node: bool
) -> None:
    """Writes a file for each model's weights, by the model's number, and each optimizer's state, on the ranks that
    Accelerate has write."""
    for number, one in weights.items():
        path = _numbered(folder, SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME, number)
        save(OrderedDict(one), path, save_on_each_node=each_node, safe_serialization=safe)
    for number, state in enumerate(optimizers):
        save(state, _numbered(folder, _OPTIMIZER, number), save_on_each_node=each_node)


def load_weights(model: nn.Module, folder: str, number: int, **options: Any) -> None:
    """Collective at stage 3."""
    safe = _numbered(folder, SAFE_WEIGHTS_NAME, number)
    weights = load_file(safe) if safe.exists() else load(_numbered(folder, WEIGHTS_NAME, number))
    target = model if isinstance(model, FSDP) else inside(model)
    target.load_state_dict(with_ties(inside(model), weights), **options)


def with_ties(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights by the names of the module, with those of tied tensors added that a safetensors file leaves out."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(tensor, []).append(name)
    weights = named_as_compiled(module, weights)
    found = dict(weights)
    for tied in names.values():
        there = [name for name in tied if name in weights]
        found.update({name: weights[there[0]] for name in tied if there and name not in weights})
    return found


def load_optimizer(optimizer: ShardedAcceleratedOptimizer, folder: str, number: int, **options: Any) -> None:
    optimizer.load_state_dict(load(_numbered(folder, _OPTIMIZER, number), map_location="cpu", **options))


def _numbered(folder: str, name: str, number: int) -> Path:
    """Accelerate's path of a file: all but the first have their number in the name."""
    stem, dot, suffix = name.partition(".")
    return Path(folder, f"{stem}_{number}{dot}{suffix}" if number else name)
