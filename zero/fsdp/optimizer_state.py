"""The state of a user's optimizer that steps shards of an FSDP, as it is saved and loaded.

Hooks on the optimizer mark this rank's shard, so that no other rank loads it as its own, and convert to and from full
state.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer

from zero._torch.modules import OwnHook
from zero._torch.optimizers import takes_state_hooks
from zero._torch.tensors import as_plain_tensors
from zero.comm import Comm
from zero.fsdp.model import Model
from zero.measure.param_groups import SHARD_MARK, params_of
from zero.shards.shard_group import ShardGroup
from zero.shards.sharded_parameter import mark_states, plain_state
from zero.state import optimizer_state as state
from zero.state.empty import share
from zero.state.own_dtypes import keep_dtypes
from zero.state.shard_mark import mark, texts_of
from zero.state.stepped import SteppedShards, of_user


def register(model: Model, optimizer: Optimizer) -> None:
    """Registers hooks on the optimizer's state_dict() and load_state_dict(). The second time does nothing.

    state_dict() marks this rank's shard. load_state_dict() cuts a full state, and raises ValueError for another rank's
    shard.
    """
    known = _registered.setdefault(model, WeakSet())
    if optimizer in known:
        return
    # Before any return: FSDP.unwrap refuses later steps of all of these, also with one rank.
    known.add(optimizer)
    if model.comm.world == 1 or not takes_state_hooks(optimizer):
        return
    shard_groups, comm = model.index.groups, model.comm  # not the model, which the hooks would keep alive

    taken: list[dict[str, Any]] = []
    empty = {param for param, place in model.index.items() if place.span is None}

    def cut(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
        stepped = of_user(optimizer, shard_groups, comm)
        if given.get(SHARD_MARK) == state.OWN:
            return None
        if not _marked_as_own(stepped, given["param_groups"]):
            given = state.numbered(optimizer, *state.own_shard(stepped, given))
        taken[:] = [given]
        return given

    def keep(optimizer: Optimizer) -> None:
        if taken:
            keep_dtypes(optimizer, taken.pop())
        share(optimizer, empty)
        mark_states(optimizer)

    optimizer.register_state_dict_post_hook(_Marks(shard_groups, comm))
    optimizer.register_load_state_dict_pre_hook(cut)
    optimizer.register_load_state_dict_post_hook(keep)


def cut_full(model: Model, optimizer: Optimizer) -> None:
    """Cuts the state that an optimizer had before its parameters were cut, the same on every rank. Raises ValueError
    where it does not fit them."""
    groups, held = model.index.groups, optimizer.state
    with as_plain_tensors():
        is_full = any(
            isinstance(value, Tensor) and value.dim() and value.shape == full != own.shape
            for group in groups
            for param, own, full in zip(group.params, group.shard_views, group.shapes.full, strict=True)
            for value in held.get(param, {}).values()
        )
    if is_full:
        states = {number: held[param] for number, param in enumerate(params_of(optimizer)) if held.get(param)}
        own_states = state.cut(_shards(model, optimizer), state.leaves_of(states))
        held.clear()
        for param, of_shard in own_states.items():
            held[param] = of_shard
        share(optimizer, {param for param, place in model.index.items() if place.span is None})
        mark_states(optimizer)


class _Marks(OwnHook):
    """Marks the state as this rank's shard."""

    def __init__(self, shard_groups: list[ShardGroup], comm: Comm) -> None:
        self._shard_groups, self._comm = shard_groups, comm

    def __call__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["state"] = {number: plain_state(of_one) for number, of_one in state_dict["state"].items()}
        mark(state_dict, state.fingerprint(of_user(optimizer, self._shard_groups, self._comm)))


# By model: the optimizers that have hooks, all that have stepped its parameters.
_registered: WeakKeyDictionary[Model, WeakSet[Optimizer]] = WeakKeyDictionary()


def registered(model: Model) -> list[Optimizer]:
    """The optimizers that have stepped parameters of the model."""
    return [*_registered.get(model, ())]


def refuse_other_state(model: Model, optimizer: Optimizer) -> None:
    """Raises RuntimeError for an optimizer that has loaded another rank's shard."""
    try:
        _marked_as_own(_shards(model, optimizer), optimizer.param_groups)
    except ValueError as error:
        told = f"{type(optimizer).__name__} has loaded what does not belong to it: {error}"
        raise RuntimeError(told) from None


def _shards(model: Model, optimizer: Optimizer) -> SteppedShards:
    return of_user(optimizer, model.index.groups, model.comm)


def _marks_of(groups: list[dict[str, Any]]) -> set[str]:
    return {text for group in groups for text in texts_of(group.get(SHARD_MARK))}


def _marked_as_own(stepped: SteppedShards, groups: list[dict[str, Any]]) -> bool:
    """Whether the groups have marks of this rank's shard. Raises ValueError for marks of another shard."""
    marks = _marks_of(groups)
    remedy = "Save state that loads anywhere: zero.full_optimizer_state_dict, or zero.checkpoint."
    state.refuse_other_shard(stepped, marks, remedy)
    return bool(marks)
