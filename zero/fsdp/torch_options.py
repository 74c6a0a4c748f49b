"""Options of PyTorch's FSDP1 that have another name in zero, its mixed precision, and the methods of FSDP1 and FSDP2,
which say what to call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypedDict

import torch
from torch import nn

from zero._torch.modules import buffers_of, parameters_of
from zero.fsdp.options import GivenOptions


class MoreOptions(TypedDict, total=False):
    """Further options of FSDP: `offload` (zero.offload), and those of PyTorch's FSDP1 that have another name here."""

    offload: Any
    cpu_offload: Any
    backward_prefetch: Any
    device_id: int | torch.device | None
    forward_prefetch: bool
    ignored_states: Iterable[nn.Module] | Iterable[nn.Parameter] | None
    limit_all_gathers: bool
    use_orig_params: bool


_PREFETCH = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
_BACKWARD = {"BACKWARD_PRE": 3, "BACKWARD_POST": 2, None: 1}
NAMES = (*_PREFETCH, "device_id", "ignored_states", "use_orig_params")


_SAVE = "zero.full_state_dict(model) is always full; zero.checkpoint.save(path, model) writes each rank's shards"
_LOAD = "zero.load_full_optimizer_state_dict(model, optimizer, state) takes full state and cuts it"
_METHODS = {
    **dict.fromkeys(("state_dict_type", "set_state_dict_type", "get_state_dict_type"), _SAVE),
    **dict.fromkeys(
        ("full_optim_state_dict", "optim_state_dict"), "zero.full_optimizer_state_dict(model, optimizer, to=0)"
    ),
    "sharded_optim_state_dict": "zero.checkpoint.save(path, model, optimizer) writes each rank's shards",
    **dict.fromkeys(
        (
            *("optim_state_dict_to_load", "load_optim_state_dict", "shard_full_optim_state_dict"),
            *("scatter_full_optim_state_dict", "flatten_sharded_optim_state_dict", "rekey_optim_state_dict"),
        ),
        _LOAD,
    ),
    "fsdp_modules": "one FSDP has all units, and modules inside it are the plain ones: model.module",
    "check_is_root": "one FSDP has all units, and is the root",
    # of FSDP2
    **dict.fromkeys(
        ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"),
        "run forward and backward of all micro-batches but the last in `with zero.no_sync(model):`",
    ),
    "unshard": "forward and backward unshard by themselves, and `with model.summon_full_params():` outside of them",
    **dict.fromkeys(
        ("set_reshard_after_forward", "set_reshard_after_backward", "set_unshard_in_backward"),
        "pass zero.FSDP(model, reshard_after_forward=...); backward unshards what it needs, and reshards it",
    ),
    **dict.fromkeys(
        ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
        "pass zero.FSDP(model, prefetch=...), how many units are in flight",
    ),
    **dict.fromkeys(
        ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"),
        "gradients are averaged over the ranks; multiply the loss by a factor of your own",
    ),
    **dict.fromkeys(
        (
            *("register_comm_hook", "set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"),
            *("set_allocate_memory_from_process_group_for_comm", "set_force_sum_reduction_for_comms"),
            *("set_post_optim_event", "set_reduce_scatter_max_input_buffers", "set_reduce_scatter_unused_params"),
            *("set_separate_reduce_scatter_group", "set_symm_mem_for_comm", "reset_iter_state"),
        ),
        "zero sends by itself; leave the call out. zero.MixedPrecision(reduce_dtype=...) sends gradients in 16 bits",
    ),
}


class _Elsewhere:
    """In the place of a method of PyTorch's FSDP1 or FSDP2. Raises AttributeError with what to call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> None:
        refuse_method(self._name)


def refuse_method(name: str) -> None:
    """Raises AttributeError for a method that PyTorch's FSDP1 or FSDP2 has, with what to call."""
    if name in _METHODS:
        raise AttributeError(f"zero's FSDP has no {name}: {_METHODS[name]}.")


TorchMethods = type("TorchMethods", (), {name: _Elsewhere(name) for name in _METHODS})
"""A base class that has them."""


def from_torch(given: dict[str, Any], asked: GivenOptions) -> None:
    """Takes PyTorch's options out of `given`, and sets what they mean.

    Raises ValueError for options that zero does not have, and if two options set the same thing.
    """
    own = {name: given.pop(name) for name in NAMES if name in given}
    if not isinstance(own.get("use_orig_params"), bool | None):
        raise ValueError(f"use_orig_params={own['use_orig_params']!r}: leave it out. Parameters are always original.")
    for ignored in own.get("ignored_states") or ():
        if isinstance(ignored, nn.Module):
            asked.ignored_modules.append(ignored)
        elif isinstance(ignored, nn.Parameter):
            asked.ignored_parameters.append(ignored)
        else:
            got = type(ignored).__name__
            raise ValueError(f"ignored_states holds a {got}. Pass modules and parameters of the model.")
    asked.prefetch = _prefetch(own, asked.prefetch)
    device = _device(own.get("device_id"))
    if device is not None:
        asked.before.append(partial(_move, device))


def _move(device: torch.device, module: nn.Module) -> None:
    """Moves parameters and buffers that have values to the device. Parameters remain the same objects."""
    for param in parameters_of(module):
        if not param.is_meta and param.device != device:
            param.data = param.data.to(device)
    for holder in module.modules():
        for name, buffer in holder.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                buffers_of(holder)[name] = buffer.to(device)


def of_fsdp1(given: Mapping[str, Any]) -> int | None:
    """The number that stands for options of PyTorch's FSDP1: BACKWARD_PRE (3), BACKWARD_POST (2) and None (1), by enum
    or name; limit_all_gathers=False (3). forward_prefetch says no more: a number holds for forward and backward.

    Raises ValueError for other values."""
    for name in _PREFETCH[1:]:
        if not isinstance(given.get(name, False), bool):
            raise ValueError(f"{name}={given[name]!r}: pass True or False, or leave it out and pass prefetch.")
    if not given.get("limit_all_gathers", True):
        return 3
    if "backward_prefetch" not in given:
        return None
    name = getattr(given["backward_prefetch"], "name", given["backward_prefetch"])
    if name not in _BACKWARD:
        raise ValueError(f"backward_prefetch={name!r} is unknown. Choose BACKWARD_PRE, BACKWARD_POST or None.")
    return _BACKWARD[name]


def _prefetch(given: Mapping[str, Any], own: Any) -> Any:
    names = [name for name in _PREFETCH if name in given]
    if names and own is not None:
        raise ValueError(f"prefetch and {names[0]} both say what is gathered ahead. Pass one of them.")
    return of_fsdp1(given) if names else own


def _device(given: Any) -> torch.device | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and torch.cuda.is_available():
        device = torch.device("cuda", given)
    elif isinstance(given, torch.device):
        device = given
    else:
        raise ValueError(
            f"device_id={given!r}: pass the number of a GPU that torch can use (there are "
            f"{torch.cuda.device_count()}), a torch.device, or leave it out and move the model yourself."
        )
    if device.type != "cuda":
        return device
    current = torch.device("cuda", torch.cuda.current_device())
    if device.index not in (None, current.index):
        raise ValueError(
            f"device_id={given!r}, but this rank's current GPU is number {current.index}, which NCCL and meta modules "
            f"use. Call torch.cuda.set_device({device.index}) first."
        )
    return current
