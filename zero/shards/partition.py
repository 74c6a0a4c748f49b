"""Chooses the cut for an optimizer, lays parameters out in shard groups, and says where each lies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from zero.measure.kinds import Finding, Kind
from zero.shards import layout
from zero.shards.layout import Layout, Span
from zero.shards.placement import Placement
from zero.shards.shapes import alignment, by_kind
from zero.shards.shard_group import IN_PLACE, GroupOptions, ShardGroup

# ------------------------------------------------------------------------------------------------------ shares of ranks
#
# Which rank gets how much: whole parameters by what their steps cost, and of those that are cut as much as makes memory
# equal.
#
# An optimizer such as Muon needs each matrix whole, and takes for its step a time that grows faster than the matrix.
# Ranks with equal times then have unequal memory, which the parameters beside the matrices, an embedding above all,
# make up for.


@dataclass(frozen=True)
class Division:
    """owners: the ranks of parameters that stay whole. ends: of the bytes of the parameters that are cut, trained ones
    (True) and frozen ones, the part that lies before the end of each rank's; None: all ranks get the same."""

    owners: Mapping[nn.Parameter, int]
    ends: Mapping[bool, Sequence[float] | None]


class Shares:
    """What each rank has been given so far.

    still_cut: bytes of trained parameters beside those of the first `divide`, such as another optimizer's, which will
        be cut and can make memory equal.
    """

    def __init__(self, world: int, *, still_cut: int = 0) -> None:
        self._still_cut = still_cut
        # By whether parameters are trained: the bytes of each rank, and what its steps of whole parameters cost.
        self._bytes = {trained: np.zeros(world) for trained in (True, False)}
        self._costs = {trained: np.zeros(world) for trained in (True, False)}

    def copy(self) -> Shares:
        made = Shares(len(self._bytes[True]), still_cut=self._still_cut)
        made._bytes = {trained: held.copy() for trained, held in self._bytes.items()}
        made._costs = {trained: held.copy() for trained, held in self._costs.items()}
        return made

    def divide(self, params: Sequence[nn.Parameter], whole: Collection[nn.Parameter]) -> Division:
        """Gives each rank its share of more parameters. whole: those that stay whole."""
        owners: dict[nn.Parameter, int] = {}
        ends: dict[bool, Sequence[float] | None] = {}
        for trained in (True, False):
            alike = [param for param in params if param.requires_grad == trained]
            kept = [param for param in alike if param in whole]
            cut = sum(param.nbytes for param in alike) - sum(param.nbytes for param in kept)
            owners |= self._assign(kept, trained, cut + self._still_cut * trained)
            ends[trained] = self._fill(trained, cut)
        self._still_cut = 0
        return Division(owners, ends)

    def _assign(self, params: Sequence[nn.Parameter], trained: bool, cut: int) -> dict[nn.Parameter, int]:
        """Returns owners by cost, if what is cut can make memory equal; else by bytes. cut: bytes."""
        sizes, prices = [param.nbytes for param in params], [cost(param) for param in params]
        held, spent = self._bytes[trained], self._costs[trained]
        owners = assign(prices, spent)
        after = _with(held, owners, sizes)
        if len(held) * after.max() - after.sum() > cut:
            owners = assign(sizes, held)
            after = _with(held, owners, sizes)
        self._bytes[trained], self._costs[trained] = after, _with(spent, owners, prices)
        return dict(zip(params, owners, strict=True))

    def _fill(self, trained: bool, cut: int) -> Sequence[float] | None:
        held = self._bytes[trained]
        if not cut or np.ptp(held) == 0:
            return None
        level = _level(held, cut)
        given = np.maximum(level - held, 0)
        self._bytes[trained] = np.maximum(held, level)
        return [*map(float, np.cumsum(given) / given.sum())]


def cost(param: nn.Parameter) -> int:
    """What a step of a whole parameter costs beside others: elements times the smaller side of the matrix, as of the
    products by which Muon makes it orthogonal (K. Jordan, Muon, 2024)."""
    rows = param.shape[0] if param.dim() > 1 else 1
    return param.numel() * min(rows, param.numel() // max(rows, 1))


def assign(sizes: Sequence[int], loads: Sequence[float] | NDArray[np.float64]) -> list[int]:
    """Returns an owner for each parameter, such that loads are as equal as uncut parameters allow.

    Longest processing time first (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969): the largest
    parameter goes to the rank with the smallest load, whatever the order of the parameters.
    """
    held = np.array(loads, dtype=np.float64)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        rank = int(held.argmin())  # with many ranks cheaper than a heap, unless there are very many parameters
        owners[index] = rank
        held[rank] += sizes[index]
    return owners


def _with(held: NDArray[np.float64], owners: Sequence[int], amounts: Sequence[int]) -> NDArray[np.float64]:
    return held + np.bincount(np.array(owners, dtype=int), np.array(amounts, dtype=float), len(held))


def _level(held: NDArray[np.float64], amount: float) -> float:
    """To which load ranks are filled up by this amount: as water, ranks that have more get nothing."""
    lowest = np.sort(held)
    levels = (np.cumsum(lowest) + amount) / np.arange(1, len(held) + 1)
    # The first k ranks are filled if the level does not reach the next one.
    return float(levels[np.append(levels[:-1] <= lowest[1:], True).argmax()])


# -------------------------------------------------------------------------------------------------------- the partition


EvenOrWhole = Literal["even", "whole"]

Partition = Literal["auto", "even", "whole"] | Callable[[str, nn.Parameter], EvenOrWhole]
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
    for kind in by_kind(params):
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
