"""Options of FSDP: what they mean, which are compared between ranks, and which values are refused; sharding strategies
with their groups of ranks; and what the caller asked for by several names."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from zero._torch.modules import buffers_of, parameters_of
from zero.comm import Comm
from zero.comm.together import alike
from zero.measure.param_groups import nearest
from zero.shards.offload import Offload
from zero.shards.partition import Partition, described
from zero.shards.placement import Placement
from zero.wrap.precision import MixedPrecision


@dataclass(frozen=True)
class Options:
    """How the units of an FSDP are laid out, stored and gathered.

    partition, precision, prefetch: as the arguments of FSDP, understood.
    reshard_after_forward: whether units are resharded between forward and backward.
    synced: whether all ranks start from the first rank's values.
    offload: where shards lie.
    """

    partition: Partition
    precision: MixedPrecision
    reshard_after_forward: bool
    synced: bool
    offload: Offload
    prefetch: int | None

    def signature(self) -> str:
        """Returns what must be the same on every rank, as text."""
        return (
            f"reshard_after_forward {self.reshard_after_forward}, partition {described(self.partition)}, "
            f"{self.precision}, {self.offload.alike}, prefetch {self.prefetch}"
        )


def as_prefetch(given: Any) -> int | None:
    """Returns the number, None for the default. Raises ValueError for other values."""
    if given is None or (type(given) is int and given in (1, 2, 3)):
        return given
    raise ValueError(
        f"prefetch={given!r}: pass how many units are in flight at once, 1, 2 or 3, or None for the default."
    )


def in_flight(given: int | None, *, overlaps: bool) -> int:
    """Resolves the default. overlaps: whether transfers overlap computing."""
    return given or (3 if overlaps else 2)


class ShardingStrategy(enum.Enum):
    """What is sharded, and for how long, by PyTorch's names."""

    FULL_SHARD = "parameters, gradients and optimizer state in shards; parameters released after forward"
    SHARD_GRAD_OP = "FULL_SHARD, but parameters stay unsharded from forward to backward"
    NO_SHARD = "everything unsharded on every rank, as with DistributedDataParallel"
    HYBRID_SHARD = "FULL_SHARD within a group, replicated across groups"
    HYBRID_SHARD_ZERO2 = "SHARD_GRAD_OP within a group, replicated across groups"

    @property
    def hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


def as_strategy(given: Any) -> ShardingStrategy:
    """Converts PyTorch's enum, or a name, to a ShardingStrategy. Raises ValueError for others."""
    name = given if isinstance(given, str) else getattr(given, "name", given)
    if isinstance(name, str):
        name = name.removeprefix("_")  # PyTorch's _HYBRID_SHARD_ZERO2
    if not isinstance(name, str) or name not in ShardingStrategy.__members__:
        known = ", ".join(ShardingStrategy.__members__)
        raise ValueError(f"sharding_strategy={given!r} is unknown. Choose one of {known}.")
    return ShardingStrategy[name]


def placed(what: str, strategy: Any, process_group: Any, device_mesh: Any) -> tuple[ShardingStrategy, Placement]:
    """Returns the strategy and its groups. Raises ValueError for unusable arguments on every rank: collective then.

    what: is given, in errors.
    process_group: one group, or for hybrid strategies a pair: the shard group and the replicate group.
    device_mesh: the groups as a DeviceMesh of one dimension, or of two for hybrid strategies: (replicas, shards).
    """
    groups = [process_group]
    if device_mesh is not None:
        groups = [device_mesh.get_group(dim) for dim in range(device_mesh.ndim)][::-1]
    elif isinstance(process_group, (tuple, list)):
        groups = list(process_group)
    try:
        if device_mesh is not None and process_group is not None:
            raise ValueError("process_group and device_mesh both say which ranks to shard over. Pass one of them.")
        known = as_strategy(strategy)
        if not known.hybrid:
            if len(groups) != 1:
                raise ValueError(
                    f"{known.name} takes one process group, but was given {len(groups)}. HYBRID_SHARD takes two."
                )
            comm = Comm(groups[0])
            alone = known is ShardingStrategy.NO_SHARD
            return known, Placement(Comm.alone(), comm) if alone else Placement(comm)
        if len(groups) != 2:
            raise ValueError(
                f"{known.name} needs two groups: process_group=(to shard within, to replicate across), or a "
                "DeviceMesh of two dimensions, (replicas, shards)."
            )
        if not any(isinstance(group, Comm) for group in groups):  # else a plan's ranks, which do not exist
            shards, replicas = ([*dist.get_process_group_ranks(group)] for group in groups)
            if set(shards) & set(replicas) != {dist.get_rank()}:
                raise ValueError(
                    f"{known.name} was given, as process_group, the ranks {shards} to shard within and {replicas} to "
                    "replicate across. They must have this rank in common and no other, as rows and columns of a "
                    "DeviceMesh."
                )
        return known, Placement(Comm(groups[0]), Comm(groups[1]))
    except ValueError:
        with alike([Comm(groups[0] if groups else None)], what):  # where ranks that have a placement compare first
            raise


def refuse_unknown(given: dict[str, Any], known: Iterable[str], own: Iterable[str]) -> None:
    """Raises TypeError for options that nobody knows. own: FSDP's; known: names beside these."""
    for unknown in sorted(given.keys() - {*known}):
        near = nearest(unknown, [*own, *known]) or f" Besides its own names it takes {', '.join(sorted(known))}."
        raise TypeError(f"FSDP has no option {unknown}=.{near}")


def refuse_number_of_ranks(reshard_after_forward: Any) -> None:
    """Raises ValueError for a number of ranks, which FSDP2 takes beside True, False and None."""
    if not isinstance(reshard_after_forward, bool | None):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r}: zero reshards parameters over all ranks (True) or keeps "
            "them until backward (False), not over fewer ranks in between. Pass True or False, or shard within a "
            "smaller group by sharding_strategy='HYBRID_SHARD'."
        )


# ---------------------------------------------------------------------------------------------------- PyTorch's options
#
# Options of PyTorch's FSDP1 that have another name in zero, its mixed precision, and the methods of FSDP1 and FSDP2,
# which say what to call.


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
    **dict.fromkeys(
        ("finalize_backward", "set_manual_backward_finalization"),
        "each backward ends by itself, and all that it sends with it; leave the call out",
    ),
    "unshard": "forward and backward unshard by themselves, and `with model.summon_full_params():` outside of them",
    **dict.fromkeys(
        (
            *("set_reshard_after_forward", "set_reshard_after_backward", "set_unshard_in_backward"),
            "set_keep_unsharded_storage",
        ),
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


def from_torch(
    given: dict[str, Any], prefetch: Any, modules: list[nn.Module], parameters: list[nn.Parameter]
) -> tuple[Any, torch.device | None]:
    """Takes PyTorch's options out of `given`. Adds to the lists what they ignore, and returns `prefetch`, or what they
    mean by it, and the device to which the model is to be moved.

    Raises ValueError for options that zero does not have, and if two options set the same thing.
    """
    own = {name: given.pop(name) for name in NAMES if name in given}
    if not isinstance(own.get("use_orig_params"), bool | None):
        raise ValueError(f"use_orig_params={own['use_orig_params']!r}: leave it out. Parameters are always original.")
    for ignored in own.get("ignored_states") or ():
        if isinstance(ignored, nn.Module):
            modules.append(ignored)
        elif isinstance(ignored, nn.Parameter):
            parameters.append(ignored)
        else:
            got = type(ignored).__name__
            raise ValueError(f"ignored_states holds a {got}. Pass modules and parameters of the model.")
    if names := [name for name in _PREFETCH if name in own]:
        if prefetch is not None:
            raise ValueError(f"prefetch and {names[0]} both say what is gathered ahead. Pass one of them.")
        prefetch = of_fsdp1(own)
    device_id = own.get("device_id")
    if device_id is None:
        return prefetch, None
    if isinstance(device_id, int) and not isinstance(device_id, bool) and torch.cuda.is_available():
        device = torch.device("cuda", device_id)
    elif isinstance(device_id, torch.device):
        device = device_id
    else:
        raise ValueError(
            f"device_id={device_id!r}: pass the number of a GPU that torch can use (there are "
            f"{torch.cuda.device_count()}), a torch.device, or leave it out and move the model yourself."
        )
    if device.type != "cuda":
        return prefetch, device
    current = torch.device("cuda", torch.cuda.current_device())
    if device.index not in (None, current.index):
        raise ValueError(
            f"device_id={device_id!r}, but this rank's current GPU is number {current.index}, which NCCL and meta "
            f"modules use. Call torch.cuda.set_device({device.index}) first."
        )
    return prefetch, current


def move(module: nn.Module, device: torch.device) -> None:
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
