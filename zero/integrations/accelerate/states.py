"""The files of sharded models and optimizers that `save_state` writes and `load_state` reads.

FULL_STATE_DICT: `model.safetensors` (or `pytorch_model.bin`) and `optimizer.bin`, as Accelerate without zero writes
them. SHARDED_STATE_DICT: a zero.checkpoint of each model with its optimizers, in `zero`, `zero_1` and so on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import (
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    load,
    save,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from zero import checkpoint
from zero._torch import named_as_compiled
from zero.fsdp import FSDP
from zero.integrations.accelerate.sharding import Sharding, inside
from zero.oss import OSS
from zero.scripts import full_state_dict

_SHARDED = "zero"


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
        optimizer.saved.forget()
        return found
    holder = sharding.wrapper_of(optimizer)
    return holder.optim_state_dict(optimizer, to) if isinstance(holder, FSDP) else optimizer.state_dict()


def save_sharded(folder: str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Collective. Saves a checkpoint of each model and its optimizers, which replaces an existing one."""
    for number, model in enumerate(models):
        checkpoint.save(_place(folder, number), model, _of(model, optimizers), keep=1)


def load_sharded(folder: str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Collective."""
    for number, model in enumerate(models):
        checkpoint.load(_place(folder, number), model, _of(model, optimizers))


def is_sharded(folder: str) -> bool:
    return Path(_place(folder, 0)).is_dir()


def save_weights(weights: dict[str, Any], folder: str, number: int, *, safe: bool, each_node: bool) -> None:
    """Writes a file, on the ranks that Accelerate has write."""
    name = SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME
    path = Path(folder, name.replace(".", f"_{number}.") if number else name)
    save(OrderedDict(weights), path, save_on_each_node=each_node, safe_serialization=safe)


def save_optimizer(state: dict[str, Any] | None, folder: str, number: int, *, each_node: bool) -> None:
    save(state, _optimizer_file(folder, number), save_on_each_node=each_node)


def load_weights(model: nn.Module, folder: str, number: int, **options: Any) -> None:
    """Collective at stage 3."""
    safe = Path(folder, SAFE_WEIGHTS_NAME.replace(".", f"_{number}.") if number else SAFE_WEIGHTS_NAME)
    if safe.exists():
        weights = load_file(safe)
    else:
        weights = load(Path(folder, WEIGHTS_NAME.replace(".", f"_{number}.") if number else WEIGHTS_NAME))
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


def load_optimizer(optimizer: Any, folder: str, number: int, **options: Any) -> None:
    """optimizer: a ShardedAcceleratedOptimizer."""
    optimizer.load_state_dict(load(_optimizer_file(folder, number), map_location="cpu", **options))


def _optimizer_file(folder: str, number: int) -> Path:
    return Path(folder, f"{OPTIMIZER_NAME}_{number}.bin" if number else f"{OPTIMIZER_NAME}.bin")


def _place(folder: str, number: int) -> str:
    return str(Path(folder, f"{_SHARDED}_{number}" if number else _SHARDED))


def _of(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    params = {*inside(model).parameters()}
    return [
        one for one in optimizers if any(param in params for group in one.param_groups for param in group["params"])
    ]
