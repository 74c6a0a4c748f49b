"""Optimizer state of parameters that are parts of larger tensors (zero/tensor_parallel): full state has whole tensors.

An entry in the shape of the part is a part as well; single values are the same for all parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from zero.measure.param_groups import params_of
from zero.shards.partition import Place, places_in
from zero.state import leaves
from zero.state.optimizer_state import consolidate
from zero.state.shard_mark import marks_of
from zero.state.stepped import SteppedShards
from zero.tensor_parallel import parts
from zero.tensor_parallel.parts import is_first


def has_parts(optimizer: SteppedShards) -> bool:
    return parts.ranks(params_of(optimizer)) is not None


def consolidate_whole(optimizer: SteppedShards, to: int | None, *, settle: bool = True) -> dict[str, Any] | None:
    """Collective, also among the ranks that have the parts. See `consolidate`. One of these returns the state."""
    full = consolidate(optimizer, to, settle=settle)
    if full is None or not has_parts(optimizer):
        return full

    def whole(place: Place, key: str, param: nn.Parameter, value: Tensor) -> Tensor:
        shape = place.group.shapes.full[place.position]
        if value.shape == shape:
            return parts.whole(param, value)
        if parts.others(param) is None:
            return value
        raise ValueError(
            f"the state {leaves.entry_of(key)!r} of {place.name} has the shape {list(value.shape)}, but this rank's "
            f"part of the parameter has {list(shape)}: only the optimizer knows how such parts make up a whole. Save "
            "each rank's own state_dict()."
        )

    full = _mapped(optimizer, full, whole)
    return full if to is None or is_first(params_of(optimizer)) else None


def cut_whole(optimizer: SteppedShards, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a full state with this rank's parts of whole tensors. Raises ValueError for other shapes."""

    def cut(place: Place, key: str, param: nn.Parameter, value: Tensor) -> Tensor:
        try:
            return parts.cut(param, value)
        except ValueError as error:
            raise ValueError(
                f"the state {leaves.entry_of(key)!r} of {place.name} {error}. Load full state, such as "
                "zero.full_optimizer_state_dict returns."
            ) from None

    is_whole = not marks_of(state_dict) and has_parts(optimizer)
    return _mapped(optimizer, state_dict, cut) if is_whole else state_dict


def _mapped(
    optimizer: SteppedShards, full: dict[str, Any], change: Callable[[Place, str, nn.Parameter, Tensor], Tensor]
) -> dict[str, Any]:
    """Returns a full state with each tensor that has dimensions changed."""
    places = places_in(optimizer.shard_groups)
    keys = [key for group in full["param_groups"] for key in group["params"]]
    states = {}
    for number, param in zip(keys, params_of(optimizer), strict=False):
        state = full["state"].get(number)
        if state is not None and param in places:
            opened = {
                key: change(places[param], key, param, leaf) if isinstance(leaf, Tensor) and leaf.dim() else leaf
                for key, leaf in leaves.opened(state).items()
            }
            states[number] = leaves.closed(opened)
    return {**full, "state": {**full["state"], **states}}
