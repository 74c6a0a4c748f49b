"""Which cut suits which optimizer, and a list of parameters laid out by it in flat groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from zero.oss import layout
from zero.oss.comm import Comm
from zero.oss.flat import FlatGroup, alignment, alike

Partition = Literal["auto", "even", "whole"]

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


def lay_out(
    params: Sequence[nn.Parameter],
    names: Sequence[str],
    comm: Comm,
    *,
    cut: Literal["even", "whole"],
    loads: list[int],
    granularity: int | None = None,
    limit: int | None = None,
    own_part: bool = False,
    compute_dtype: torch.dtype | None = None,
    part_in_whole: bool = False,
    label: str | None = None,
) -> list[FlatGroup]:
    """The parameters, bound into flat groups of at most `limit` bytes (but one parameter at least), in their order.

    loads: bytes of trained parameters that each rank owns already; what is added here is added to it. A whole cut
    balances over all groups that share `loads`, and orders parameters within a group by owner.
    """
    sizes = [param.nbytes for param in params]
    owners = [0] * len(params)
    if cut == "whole":
        trained = [size if param.requires_grad else 0 for size, param in zip(sizes, params, strict=True)]
        owners = layout.assign(trained, loads)
    groups = []
    for kind in alike(params):
        runs = layout.runs([sizes[i] for i in kind], limit) if limit is not None else [range(len(kind))]
        for run in runs:
            members = sorted((kind[i] for i in run), key=lambda i: owners[i])
            numels = [params[i].numel() for i in members]
            align = alignment(params[members[0]].dtype)
            geometry = (
                layout.even(numels, comm.world, align=align, granularity=granularity)
                if cut == "even"
                else layout.whole(numels, [owners[i] for i in members], comm.world, align=align)
            )
            if params[members[0]].requires_grad:
                for rank in range(comm.world):
                    segment = geometry.segment(rank)
                    loads[rank] += (segment.stop - segment.start) * params[members[0]].element_size()
            group = FlatGroup(
                [params[i] for i in members],
                [names[i] for i in members],
                geometry,
                comm,
                own_part=own_part,
                part_in_whole=part_in_whole,
                label=label,
                compute_dtype=compute_dtype if params[members[0]].is_floating_point() else None,
            )
            groups.append(group)
    return groups


def _class_of(optim: Callable[..., object] | None) -> type | None:
    while isinstance(optim, partial):
        optim = optim.func
    return optim if isinstance(optim, type) else None
