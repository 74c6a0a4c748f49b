"""What steps the shards whose state is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.comm import Comm
from zero.measure.built import state_made_by
from zero.measure.shapes import shard_shape
from zero.shards.layout import Span
from zero.shards.shard_group import ShardGroup


@dataclass
class SteppedShards:
    """An optimizer of shards: that inside of an OSS, or the user's of an FSDP, whose parameters are the shards.

    A parameter in no shard group is unsharded, and the same on every rank.

    param_groups: those that the user sees. part: returns the shard of one of their parameters.
    keeps_masters: whether shards are master weights. loaded: called after a state was loaded.
    """

    optim: Optimizer
    shard_groups: list[ShardGroup]
    comm: Comm
    param_groups: list[dict[str, Any]]
    part: Callable[[nn.Parameter], nn.Parameter] = lambda param: param
    keeps_masters: bool = False
    loaded: Callable[[], object] = lambda: None

    @property
    def kind(self) -> str:
        return type(self.optim).__name__

    @cached_property
    def makes_state(self) -> bool:
        """Whether its steps make state of parameters."""
        return any(state_made_by(self.optim, group, torch.float32, of_torchs=True) for group in self.param_groups)


def of_user(optimizer: Optimizer, shard_groups: list[ShardGroup], comm: Comm) -> SteppedShards:
    """Returns the user's optimizer of an FSDP with these shard groups."""
    return SteppedShards(optimizer, shard_groups, comm, optimizer.param_groups)


# -------------------------------------------------------------------------------------------------- retired optimizers
#
# Optimizers that step and hold nothing any more, whoever still has them: given to an OSS, or those of a model that was
# unwrapped.

_retired: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()


def retire(optimizer: Optimizer, why: str, *, saves: bool = False) -> None:
    """Has what would step an optimizer, or save or load its state, raise RuntimeError from now on. why: the text.
    saves: what it has is its full state still, and may be saved."""
    # From the class: an optimizer that shards another has more to say when a hook is registered.
    Optimizer.register_step_pre_hook(optimizer, partial(_refuse, why))
    if not saves:
        _retired[optimizer] = why
        Optimizer.register_state_dict_pre_hook(optimizer, partial(_refuse, why))
        Optimizer.register_load_state_dict_pre_hook(optimizer, partial(_refuse, why))


def _refuse(why: str, *_: Any) -> NoReturn:
    raise RuntimeError(why)


def refuse_retired(optimizer: Optimizer, kind: type[Exception] = RuntimeError) -> None:
    """Raises for an optimizer that was retired."""
    if (why := _retired.get(optimizer)) is not None:
        raise kind(why)


# ------------------------------------------------------------------------------------------------------------ one shard
#
# The shard of one parameter that one rank owns, and its slice of the optimizer's state: elements of an entry with the
# parameter's shape, and single values, such as a step count, which are the same for all shards.


@dataclass(frozen=True)
class ParamShard:
    """Elements [span.start, span.stop) of a parameter, which rank `owner` owns.

    number: position of the parameter in all groups of the optimizer. group, index: its shard group and place there.
    empty: the rank owns nothing, and the optimizer steps an empty shard.
    """

    number: int
    group: ShardGroup
    index: int
    owner: int
    span: Span
    empty: bool = False

    @property
    def param(self) -> nn.Parameter:
        return self.group.params[self.index]

    @property
    def name(self) -> str:
        return self.group.names[self.index]

    @property
    def full_shape(self) -> torch.Size:
        return self.group.shapes.full[self.index]

    @property
    def cut(self) -> bool:
        return self.span.numel < self.group.layout.numels[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that the owner steps."""
        return shard_shape(self.full_shape, self.span.numel) if self.cut or self.empty else self.full_shape

    def slot(self, full: Tensor) -> Tensor:
        """This shard's elements of a tensor in full shape, flat: a view if they lie in the order of the layout."""
        return self.group.shapes.in_memory_order(self.index, full)[self.span.start : self.span.stop]
