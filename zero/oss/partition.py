"""Which cut suits which optimizer, and a list of parameters laid out by it in flat groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from zero.oss import layout
from zero.oss.comm import Comm
from zero.oss.flat import FlatGroup, Home, alignment, alike
from zero.oss.layout import Layout, Loads

Partition = Literal["auto", "even", "whole"]

_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 20, 1 << 25

ELEMENTWISE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""Optimizers whose step of one element reads no other element, so that a part is stepped as the whole would be."""

NEED_WHOLE = frozenset(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))
"""torch's optimizers that read a whole parameter to step one element of it."""

NEED_ALL = frozenset({torch.optim.LBFGS})
"""torch's optimizers that read all parameters at once, which no rank has."""


def partition_problem(
    partition: object, optim: Callable[..., object] | None = None, granularity: int | None = None
) -> str | None:
    """What is wrong with a choice of partition (for an optimizer), in words for the user; None if nothing."""
    if partition not in ("auto", "even", "whole"):
        return f"partition={partition!r} is unknown. Choose 'auto', 'even' or 'whole'."
    if granularity is not None and (granularity < 1 or partition == "whole"):
        return (
            f"granularity={granularity} with partition={partition!r}: it is a number of elements, at least 1, that a "
            "cut inside a parameter does not divide. Leave it out where parameters are not cut."
        )
    kind = _class_of(optim)
    if kind is None:
        return None
    if kind in NEED_ALL:
        return f"{kind.__name__} computes with all parameters at once and cannot be sharded. Use it without zero."
    if partition == "even" and kind in NEED_WHOLE:
        return (
            f"partition='even' cuts inside parameters, but {kind.__name__} needs each parameter whole. "
            "Choose partition='whole', or leave it at 'auto'."
        )
    return None


def cut_for(
    partition: Partition, optim: Callable[..., object], granularity: int | None = None
) -> Literal["even", "whole"]:
    """`auto` is `even` for torch's own element-wise optimizers and where the user says at which multiples one may cut,
    and `whole` for all that are not known to be so."""
    if partition == "auto":
        return "even" if granularity is not None or _class_of(optim) in ELEMENTWISE else "whole"
    return partition


def bucket_limit(params: Sequence[nn.Parameter]) -> int:
    """Bytes of a bucket where the user does not say: an eighth of the model, between 1 and 32 MiB."""
    return min(max(sum(param.nbytes for param in params) // 8, _SMALLEST_BUCKET), _LARGEST_BUCKET)


@dataclass(frozen=True)
class Arrangement:
    """Parameters that share a flat group: their indices in the list that was given, in the order of the layout."""

    members: tuple[int, ...]
    layout: Layout


def arrange(
    params: Sequence[nn.Parameter],
    world: int,
    *,
    cut: Literal["even", "whole"],
    loads: Loads,
    granularity: int | None = None,
    limit: int | None = None,
    limit_numel: int | None = None,
) -> list[Arrangement]:
    """The flat groups that parameters are laid in, in their order: of at most `limit` bytes, or `limit_numel`
    elements, one parameter at least.

    Arithmetic alone: parameters may be on the meta device, and the world need not exist.

    loads: bytes of trained parameters that each rank owns already, of a whole cut; what is arranged here is added to
        it. A whole cut balances over all groups that share `loads`, and orders parameters within a group by owner.
    """
    sizes = [param.nbytes for param in params]
    owners = [0] * len(params)
    if cut == "whole":
        trained = [size if param.requires_grad else 0 for size, param in zip(sizes, params, strict=True)]
        owners = layout.assign(trained, loads)
    arranged = []
    for kind in alike(params):
        first = params[kind[0]]
        itemsize, align = first.element_size(), alignment(first.dtype)
        runs = [range(len(kind))]
        if limit is not None:
            runs = layout.runs([sizes[i] for i in kind], limit)
        elif limit_numel is not None:
            runs = layout.runs([sizes[i] // itemsize for i in kind], limit_numel)
        for run in runs:
            members = sorted([kind[i] for i in run], key=owners.__getitem__)
            numels = [sizes[i] // itemsize for i in members]
            if cut == "even":
                geometry = layout.even(numels, world, align=align, granularity=granularity)
            else:
                geometry = layout.whole(numels, [owners[i] for i in members], world, align=align)
                for rank in {owners[i] for i in members} if first.requires_grad else ():
                    loads[rank] += (geometry.bounds[rank + 1] - geometry.bounds[rank]) * itemsize
            arranged.append(Arrangement(tuple(members), geometry))
    return arranged


def lay_out(
    params: Sequence[nn.Parameter],
    names: Sequence[str],
    comm: Comm,
    *,
    cut: Literal["even", "whole"],
    loads: Loads,
    granularity: int | None = None,
    limit: int | None = None,
    limit_numel: int | None = None,
    own_part: bool = False,
    compute_dtype: torch.dtype | None = None,
    part_in_whole: bool = False,
    home: Home | None = None,
    label: str | None = None,
) -> list[FlatGroup]:
    """The parameters, bound into flat groups; see `arrange` for which, and FlatGroup for the other options."""
    return [
        FlatGroup(
            [params[i] for i in arranged.members],
            [names[i] for i in arranged.members],
            arranged.layout,
            comm,
            own_part=own_part,
            part_in_whole=part_in_whole,
            home=home,
            label=label,
            compute_dtype=compute_dtype if params[arranged.members[0]].is_floating_point() else None,
        )
        for arranged in arrange(
            params,
            comm.world,
            cut=cut,
            loads=loads,
            granularity=granularity,
            limit=limit,
            limit_numel=limit_numel,
        )
    ]


def _class_of(optim: Callable[..., object] | None) -> type | None:
    while isinstance(optim, partial):
        optim = optim.func
    return optim if isinstance(optim, type) else None
