"""Options of FSDP: what they mean, which are compared between ranks, and which values are refused; sharding strategies
with their groups of ranks; and what the caller asked for by several names."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from zero._torch.modules import parameters_of
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
    stays: whether units stay unsharded from forward to backward.
    synced: whether all ranks start from the first rank's values.
    offload: where shards lie.
    """

    partition: Partition
    precision: MixedPrecision
    stays: bool
    synced: bool
    offload: Offload
    prefetch: int | None

    def signature(self) -> str:
        """Returns what must be the same on every rank, as text."""
        return (
            f"reshard_after_forward {not self.stays}, partition {described(self.partition)}, {self.precision}, "
            f"{self.offload.alike}, prefetch {self.prefetch}"
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

    @property
    def keeps_parameters(self) -> bool:
        return self in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)


def as_strategy(given: Any) -> ShardingStrategy:
    """Converts PyTorch's enum, or a name, to a ShardingStrategy. Raises ValueError for others."""
    name = given if isinstance(given, str) else getattr(given, "name", given)
    if isinstance(name, str):
        name = name.removeprefix("_")  # PyTorch's _HYBRID_SHARD_ZERO2
    if not isinstance(name, str) or name not in ShardingStrategy.__members__:
        known = ", ".join(ShardingStrategy.__members__)
        raise ValueError(f"sharding_strategy={given!r} is unknown. Choose one of {known}.")
    return ShardingStrategy[name]


def place(what: str, strategy: Any, process_group: Any, device_mesh: Any) -> tuple[ShardingStrategy, Placement]:
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
        return known, _placement_of(known, groups)
    except ValueError:
        with alike([Comm(groups[0] if groups else None)], what):  # where ranks that have a placement compare first
            raise


def _placement_of(strategy: ShardingStrategy, groups: Sequence[Any]) -> Placement:
    """groups: one, or for hybrid strategies the shard group and the replicate group. Raises ValueError for groups that
    do not suit the strategy."""
    if strategy.hybrid:
        return _hybrid(strategy.name, groups)
    if len(groups) != 1:
        raise ValueError(
            f"{strategy.name} takes one process group, but was given {len(groups)}. HYBRID_SHARD takes two."
        )
    comm = Comm(groups[0])
    return Placement(Comm.alone(), comm) if strategy is ShardingStrategy.NO_SHARD else Placement(comm)


def _hybrid(strategy: str, groups: Sequence[Any]) -> Placement:
    if len(groups) != 2:
        raise ValueError(
            f"{strategy} needs two groups: process_group=(to shard within, to replicate across), or a "
            "DeviceMesh of two dimensions, (replicas, shards)."
        )
    if not any(isinstance(group, Comm) for group in groups):  # else a plan's ranks, which do not exist
        shards, replicas = ([*dist.get_process_group_ranks(group)] for group in groups)
        if set(shards) & set(replicas) != {dist.get_rank()}:
            raise ValueError(
                f"{strategy} was given, as process_group, the ranks {shards} to shard within and {replicas} to "
                "replicate across. They must have this rank in common and no other, as rows and columns of a "
                "DeviceMesh."
            )
    return Placement(Comm(groups[0]), Comm(groups[1]))


@dataclass
class GivenOptions:
    """What the caller asked for in options that may have several names.

    prefetch: None if it was not asked for. before: called with the module before it is looked at.
    """

    prefetch: Any = None
    ignored_modules: list[nn.Module] = field(default_factory=list)
    ignored_parameters: list[nn.Parameter] = field(default_factory=list)
    before: list[Callable[[nn.Module], None]] = field(default_factory=list)

    @property
    def ignored(self) -> list[nn.Parameter]:
        """All ignored parameters, including those of ignored modules."""
        of_modules = (param for module in self.ignored_modules for param in parameters_of(module))
        return [*dict.fromkeys([*of_modules, *self.ignored_parameters])]


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
