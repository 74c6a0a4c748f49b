"""Chooses the cut for an optimizer, lays parameters out in shard groups, and says where each lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import nn

from zero.measure.kinds import Finding, Kind
from zero.shards import layout
from zero.shards.group_state import IN_PLACE, GroupOptions
from zero.shards.layout import Layout, Span
from zero.shards.placement import Placement
from zero.shards.shapes import alignment, alike
from zero.shards.shard_group import ShardGroup
from zero.shards.shares import Division

Cut = Literal["even", "whole"]

Partition = Literal["auto", "even", "whole"] | Callable[[str, nn.Parameter], Cut]
"""How parameters are cut; a function of each one's name and the parameter returns "even" or "whole"."""

_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 20, 1 << 25

# Times the elements that padding may add to whole parameters.
_PADS_UP_TO = 1.25

# Bytes of the largest bucket that is sent beside the computing.
_LARGEST_BESIDE = 1 << 28


def refuse_partition(partition: object) -> None:
    """Raises ValueError for what is no choice of partition."""
    if not callable(partition) and partition not in ("auto", "even", "whole"):
        raise ValueError(
            f"partition={partition!r} is unknown. Choose 'auto', 'even' or 'whole', or pass a function of (name, "
            "parameter) that returns 'even' or 'whole'."
        )


def described(partition: Partition) -> str:
    """The choice in what ranks compare, where functions differ in their addresses."""
    return "by a function" if callable(partition) else partition


def whole_among(partition: Partition, named: Iterable[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, str]:
    """Returns the parameters that stay whole, with their names. partition: "auto" counts as "even".

    Raises ValueError for what a function returns besides "even" and "whole".
    """
    if not callable(partition):
        return {param: name for name, param in named} if partition == "whole" else {}
    found = dict[nn.Parameter, str]()
    for name, param in named:
        asked = partition(name, param)
        if asked == "whole":
            found[param] = name
        elif asked != "even":
            raise ValueError(f"partition({name!r}, parameter) returned {asked!r}. Return 'even' or 'whole'.")
    return found


def refuse_optimizer(optim: str, found: Finding, partition: Partition, *, of: str = "") -> None:
    """Raises ValueError if an optimizer with this finding cannot be sharded so.

    of: "FSDP" if the partition is an argument of FSDP.
    """
    whole, even = (f"{of}(partition={cut!r})" if of else f"partition={cut!r}" for cut in ("whole", "even"))
    if found.kind is Kind.COUPLED:
        raise ValueError(
            f"{optim} computes a step of one parameter from others, too: {found.reason}. A rank steps the parameters "
            f"that it owns, and would train to other numbers, whatever the partition: {optim} cannot be sharded. "
            "Use it without zero (stage 0); if one of its options does so, such as a clipping by the norm of all "
            "gradients, or rounding at random, switch that off."
        )
    if found.kind is Kind.COLLECTIVE:
        raise ValueError(
            f"{optim} calls collectives of its own ({found.reason}): it spreads its step over the ranks, as zero does, "
            "and would count on ranks that step other parameters now. It cannot be sharded. Pass the optimizer that "
            "steps all parameters on every rank, such as torch.optim.Muon, or use it without zero (stage 0)."
        )
    if found.kind is Kind.HOOKED:
        raise ValueError(
            f"{optim} takes gradients in hooks that it registers on parameters, which are not called for the shards "
            "that a rank steps: it cannot be sharded. Pass a plain optimizer; to step it on the CPU, or during "
            "backward, is an option of zero's own (docs/precision_and_memory.md)."
        )
    if found.kind is Kind.TENSORWISE and partition == "even":
        raise ValueError(
            f"partition='even' cuts inside parameters, but {optim} needs each parameter whole: {found.reason}. "
            f"Choose {whole}, or leave it at 'auto'."
        )
    if found.kind is Kind.UNKNOWN and partition == "auto":
        raise ValueError(
            f"{optim} is not known, and could not be measured: {found.reason}. If it treats each element of a "
            f"parameter by itself, say {even}; if it reads the whole of one parameter to step that, but no other, "
            f"{whole}. Otherwise it cannot be sharded: use it without zero (stage 0)."
        )


def cut_for(partition: Partition, found: Finding | None) -> Partition:
    """Resolves "auto": "even" for element-wise optimizers, otherwise "whole"."""
    if partition == "auto":
        return "even" if found is not None and found.kind is Kind.ELEMENTWISE else "whole"
    return partition


def bucket_limit(params: Sequence[nn.Parameter], *, overlaps: bool = False) -> int:
    """The default size of a bucket in bytes. overlaps: whether buckets are sent beside the computing."""
    # A sixteenth of the model, between 1 and 32 MiB: while one is filled, another is on its way. Larger ones would take
    # more memory, smaller ones more messages.
    size = sum(param.nbytes for param in params)
    # Beside the computing an eighth of a small model, and up to a twentieth of a large one or 256 MiB: each takes the
    # host of a GPU about a millisecond, in which the GPU computes for more than 32 MiB.
    largest = max(_LARGEST_BUCKET, min(size // 20, _LARGEST_BESIDE)) if overlaps else _LARGEST_BUCKET
    return min(max(size // (8 if overlaps else 16), _SMALLEST_BUCKET), largest)


def arrange(
    params: Sequence[nn.Parameter],
    world: int,
    division: Division,
    *,
    limit: int | None = None,
    limit_numel: int | None = None,
    beside: bool = False,
) -> Iterator[tuple[list[int], Layout]]:
    """Divides parameters into shard groups of at most `limit` bytes, or `limit_numel` elements, or of one parameter.

    Yields for each group the indices of its parameters in the order of the layout, and the layout. Computes with shapes
    only: parameters may be on the meta device, and the ranks need not exist.

    division: of these parameters, perhaps among others.
    beside: transfers overlap computing, and are faster for segments of equal length: whole parameters are padded to it
        where that costs little.
    """
    sizes = [param.nbytes for param in params]
    pads = _PADS_UP_TO if beside else 1.0
    for kind in alike(params):
        first = params[kind[0]]
        itemsize, align = first.element_size(), alignment(first.dtype)
        runs = [range(len(kind))]
        if limit is not None:
            runs = layout.runs([sizes[i] for i in kind], limit)
        elif limit_numel is not None:
            runs = layout.runs([sizes[i] // itemsize for i in kind], limit_numel)
        ends = division.ends[first.requires_grad]
        for run in runs:
            members = [kind[i] for i in run]
            owners = [division.owners.get(params[i]) for i in members]
            numels = [sizes[i] // itemsize for i in members]
            if ends is None and owners.count(None) == len(owners):
                yield members, layout.even(numels, world, align=align)
            else:
                ends = ends or [(rank + 1) / world for rank in range(world)]
                order, geometry = layout.mixed(numels, owners, ends, align=align)
                yield [members[i] for i in order], layout.padded(geometry, align=align, pads_up_to=pads)


def lay_out(
    params: Sequence[nn.Parameter],
    names: Sequence[str],
    placement: Placement,
    division: Division,
    *,
    options: GroupOptions = IN_PLACE,
    label: str | None = None,
    **how: Any,
) -> list[ShardGroup]:
    """Binds parameters into shard groups. how: arguments of `arrange`. Only floats get `options.compute_dtype`."""
    groups = []
    beside = any(placement.comm.link.overlaps(param.device) for param in params)
    for members, geometry in arrange(params, placement.comm.world, division, beside=beside, **how):
        own = [params[i] for i in members]
        kept = options if own[0].is_floating_point() else replace(options, compute_dtype=None)
        groups.append(ShardGroup(own, [names[i] for i in members], geometry, placement, kept, label))
    return groups


class Place(NamedTuple):
    """The shard group of a parameter, and its position there."""

    group: ShardGroup
    position: int

    @property
    def name(self) -> str:
        return self.group.names[self.position]

    @property
    def span(self) -> Span | None:
        """The elements that this rank owns; None if it owns none."""
        return self.group.shapes.spans.get(self.position)


def places_in(groups: Iterable[ShardGroup]) -> dict[nn.Parameter, Place]:
    """The places of all parameters of the groups."""
    return {param: Place(group, i) for group in groups for i, param in enumerate(group.params)}
