"""The parameters of one module, which are unsharded while it computes and sharded at rest; and their gradients."""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from zero.shards.partition import Place, places_in
from zero.shards.shard_group import GroupState, ShardGroup
from zero.tensor_parallel.shown import Shown
from zero.wrap.bucket import GradBucket
from zero.wrap.precision import MixedPrecision

# ------------------------------------------------------------------------------------------------------------ gradients
#
# The gradients of one shard group of a unit: this rank's shards of them at rest, and the full ones in backward.
#
# at rest       `param.grad` is this rank's shard of the averaged gradient, in the shard's shape, for any optimizer
# in backward   `param.grad` is autograd's own full gradient; the shard's earlier gradient is set aside
# no_sync       `param.grad` stays this rank's own full gradient, as with DistributedDataParallel: what is written into
# it
#               counts, and None drops it, with the gradient that was set aside


class UnitBucket(GradBucket):
    """The bucket of a shard group whose `param.grad` is a full gradient in backward, and a shard at rest.

    `set_aside`: the gradients of shards from before this backward, by position. `left_full`: positions of the
        parameters whose `param.grad` no_sync has left full, unless the user has cleared it.
    """

    def __init__(self, group: ShardGroup, *, sent_as: torch.dtype | None = None) -> None:
        super().__init__(group, sent_as=sent_as)
        self.set_aside: dict[int, Tensor] = {}
        # Whether a backward under no_sync has gone through the unit since the last one that reduces. It may have left
        # gradients on other ranks only, so all reduce then.
        self._left = False
        self.left_full: set[int] = set()

    @property
    def left_unreduced(self) -> bool:
        """Whether no_sync has left gradients that a backward is to reduce."""
        return self._left or any(self.group.params[index].requires_grad for index in self.left_full)

    # ------------------------------------------------------------------------------------------- a backward

    def pre_backward(self) -> None:
        """Sets `param.grad` up for the full gradients that autograd writes from here on: adds to those that no_sync has
        left, and sets those of shards aside. No reduction is in flight.

        Raises RuntimeError for a shard's gradient in the place of a full one that no_sync has left.
        """
        assert self._handle is None, "a reduction is in flight"
        self._left = False
        for index in self.trained:
            param, full = self.group.params[index], self.group.shapes.full[index]
            grad = param.grad
            if grad is None:
                self.set_aside.pop(index, None)
            elif index not in self.left_full:
                param.grad, self.set_aside[index] = None, self.group.as_shard(index, grad)
            elif grad.shape != full:
                raise RuntimeError(
                    f"{self.group.names[index]} has a `param.grad` of shape {list(grad.shape)} in place of the full "
                    f"gradient of shape {list(full)} that the last backward under no_sync() has left, and that no "
                    "backward has averaged yet. Write into that in place (`param.grad.mul_(0.5)`), or set it to None, "
                    "which drops it."
                )
        self.left_full.difference_update(self.trained)

    def take_written(self) -> None:
        """Takes what autograd has written, once backward has passed the unit. Of parameters that this backward did not
        reach, that is what was accumulated under no_sync."""
        for index in self.trained:
            param = self.group.params[index]
            if index not in self.taken:
                gradient, param.grad = param.grad, None
                self.take(index, gradient)

    def keep_unreduced(self) -> None:
        """Leaves what autograd has written in `param.grad`. The parameters are resharded."""
        self._left = True
        for index in self.trained:
            param = self.group.params[index]
            if param.grad is None:  # this backward has no gradient of it
                self._set(index, self.set_aside.pop(index, None))
            else:
                self.left_full.add(index)

    def finish(self) -> None:
        """Waits for this rank's shards of the gradients, and adds them to those that were set aside."""
        # Before super(), which adds the new gradients to what `param.grad` has.
        for index in self.set_aside.keys() & self.trained:
            self._set(index, self.set_aside.pop(index))
        super().finish()

    def _held(self, index: int) -> Tensor | None:
        return self.params[index].grad

    def _set(self, index: int, gradient: Tensor | None) -> None:
        self.group.set_gradient(index, gradient)

    def decide(self, used: Mapping[int, bool]) -> None:
        """Adds what only other ranks have used. A gradient of which this rank owns nothing is an empty tensor, so that
        no rank alone finds None where there is a gradient."""
        super().decide(used)
        for index in self.reduced - self.group.shapes.spans.keys():
            param = self.group.params[index]
            if param.grad is None:
                self._set(index, torch.empty_like(self.group.shard_views[index]))

    # ---------------------------------------------------------------------------------------------- at rest

    def unreduced(self, index: int) -> bool:
        """Returns whether `param.grad` of the parameter is a gradient from no_sync that was not reduced."""
        return index in self.left_full and self.group.params[index].grad is not None

    def name_of_unreduced(self, params: Container[nn.Parameter]) -> str | None:
        """Returns the name of one of these parameters with such a gradient, if there is one."""
        of_group = self.group.params
        found = (index for index in self.left_full if self.unreduced(index) and of_group[index] in params)
        return next((self.group.names[index] for index in found), None)

    # -------------------------------------------------------------------------------------------- exceptions

    def restore(self) -> None:
        """Puts these gradients back into `param.grad`. Unreduced gradients remain."""
        for index in self.set_aside.keys() - self.left_full:
            self._set(index, self.set_aside.pop(index))


# ---------------------------------------------------------------------------------------------------------------- units


_AS_ONE_UNIT = (
    "If ranks choose between modules, gather these as one unit: FSDP(as_one_unit=...); or have the unit around them "
    "hold their parameters: auto_wrap_policy=ModuleWrapPolicy({Block})."
)


class Need(enum.Enum):
    """Why a unit is to stay unsharded, beside a running forward of its own or of a unit that reads its parameters."""

    __hash__ = object.__hash__  # enum's own is Python, and takes longer than all else that is done with a Need

    AHEAD = "gathered ahead of its forward"
    KEPT = "kept from forward to backward"
    BACKWARD = "in backward"
    SUMMONED = "within summon_full_params, perhaps on another rank only"


# What ends when a unit is resharded.
_WHILE_UNSHARDED = {Need.AHEAD, Need.KEPT}


@dataclass(eq=False)
class Call:
    """One forward of a unit.

    begun, ended: how many forwards of units had begun when this one began, and when it ended.
    has_exit_hook: whether a hook is called when its backward is complete; else that is complete at the end of backward.
    """

    begun: int
    ended: float = math.inf
    has_exit_hook: bool = True


class Unit:
    """The parameters that are unsharded together for one module.

    stays: whether they stay unsharded from forward to backward.
    `params`: the parameters of all its shard groups.
    `needed_by`: why it is unsharded: a Need, or the units that run and read its parameters, as itself. Once that is
        empty it is resharded, whatever else ends.
    `running`: its running calls, the innermost last: more than one where a module calls itself.
    `calls`: those that the running backward is to pass.
    `buckets`: the gradients of its shard groups.
    `shown`: its DTensors while it runs, if it has any.

    It keeps neither its module nor other units alive: the hooks on modules keep units.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: list[ShardGroup],
        *,
        precision: MixedPrecision,
        stays: bool,
    ) -> None:
        self.name, self._module, self.groups = name, ref(module), groups
        self.params = {param for group in groups for param in group.params}
        self.precision, self.stays = precision, stays
        self.buckets = [UnitBucket(group, sent_as=precision.reduce_dtype) for group in groups]
        self.shown: Shown | None = None
        self.needed_by: set[object] = set()
        # The module whose call began the running forward, if it is not the unit's own.
        self.entry_module: nn.Module | None = None
        self.running: list[Call] = []
        # The autograd nodes of the inputs of the running forwards.
        self.inputs: set[Node] = set()
        self.calls: set[Call] = set()
        self._set_title()

    def _set_title(self) -> None:
        self.title = f"unit {self.name!r}" if self.name else "the root unit"
        if self.groups:
            channel = self.groups[0].comm.channel  # the same ranks gather all groups
            self._for_forward = channel(f"the gathering of {self.title} for forward", _AS_ONE_UNIT if self.name else "")
            self._for_backward = channel(f"the gathering of {self.title} for backward")

    def move_below(self, prefix: str) -> None:
        """Renames the unit and its parameters for a larger model, which has the module below `prefix`."""
        self.name = f"{prefix}.{self.name}".rstrip(".")
        self._set_title()
        for group in self.groups:
            group.rename([f"{prefix}.{name}" for name in group.names], self.title)

    @property
    def exists(self) -> bool:
        """Whether its module does, which may have been taken out of the model."""
        return self._module() is not None

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, f"the module of {self.title} does not exist any more"
        return module

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.groups})"

    def forget_forward(self) -> None:
        """Forgets forwards that an exception has ended."""
        self.needed_by &= {Need.BACKWARD, Need.SUMMONED}
        self.running.clear()
        self.entry_module = None
        self.inputs.clear()
        if self.shown is not None:
            self.shown.hide()

    # ------------------------------------------------------------------------------------------ parameters

    @property
    def unsharded(self) -> bool:
        return all(group.state is GroupState.UNSHARDED for group in self.groups)

    @property
    def readable(self) -> bool:
        """Whether the parameters are full on this rank."""
        return all(group.readable for group in self.groups)

    @property
    def summoned(self) -> bool:
        return Need.SUMMONED in self.needed_by

    @property
    def gathering(self) -> bool:
        return any(group.state is GroupState.GATHERING for group in self.groups)

    @property
    def overlaps(self) -> bool:
        """Whether all-gathers of its parameters overlap computing."""
        return any(group.overlaps for group in self.groups)

    def unshard(self, *, for_backward: bool = False, ahead: bool = False) -> None:
        """Collective. Unshards the parameters. ahead: they are needed later, and their all-gather is only launched.

        Raises RuntimeError if an earlier all-gather of them failed.
        """
        for group in self.groups:
            if group.state is GroupState.SHARDED:
                channel = self._for_backward if for_backward else self._for_forward
                group.launch_unshard(channel, ahead=ahead)
            elif group.state is GroupState.LOST and not ahead:
                raise RuntimeError(
                    f"the parameters of {self.title} of FSDP have not arrived: an earlier all-gather of them failed. "
                    "Look for the first error, and initialise the process group again."
                )
        if not ahead:
            self.finish_unshard()

    def finish_unshard(self) -> None:
        """Waits until the parameters are unsharded.

        Raises RuntimeError if a parameter was given other data, which all would lose.
        """
        for group in self.groups:
            if group.state is GroupState.GATHERING:
                group.finish_unshard()

    def reshard(self) -> None:
        """Releases the full parameters; this rank's shards remain. Raises as `finish_unshard` does."""
        self.needed_by -= _WHILE_UNSHARDED
        for group in self.groups:
            if group.state is GroupState.GATHERING:
                group.finish_unshard()
            if group.state is GroupState.UNSHARDED:
                group.reshard()

    def summon(self, to: int | None = None, *, on_cpu: bool = False) -> None:
        """Collective. Has full parameters, in memory of their own, until `dismiss`. See ShardGroup.summon."""
        if self.groups:
            self.needed_by.add(Need.SUMMONED)
        for group in self.groups:
            group.summon(to, on_cpu=on_cpu)

    def dismiss(self, *, keep: bool) -> None:
        """Ends `summon`. keep: what was written into the full parameters is copied into the shards."""
        self.needed_by.discard(Need.SUMMONED)
        for group in self.groups:
            # If summoning has raised, the groups after that one are still sharded.
            if group.state is GroupState.SUMMONED:
                group.dismiss(keep=keep)

    def release(self, *needs: object) -> None:
        """Ends needs of it, and reshards it if nothing else needs the parameters."""
        self.needed_by.difference_update(needs)
        if not self.needed_by:
            self.reshard()

    # -------------------------------------------------------------------------------------------- backward

    def pre_backward(self) -> None:
        """Prepares for full gradients, which autograd writes from here on. The parameters are unsharded."""
        self.needed_by.add(Need.BACKWARD)
        for bucket in self.buckets:
            bucket.pre_backward()

    def post_backward(self) -> None:
        """Its gradients were taken: those of its shards take their place, so it is resharded."""
        self.calls.clear()
        self.needed_by -= {Need.BACKWARD, Need.KEPT}
        self.reshard()

    def synchronize(self) -> None:
        """Waits until the host may read and write the shards and their gradients."""
        for group in self.groups:
            group.synchronize()

    def interrupt(self) -> None:
        """Restores the gradients from before a backward that an exception has ended. Waits for no other rank."""
        if Need.BACKWARD in self.needed_by:
            for bucket in self.buckets:
                for index in bucket.trained:
                    bucket.params[index].grad = None
            self.post_backward()
        if any(bucket.set_aside.keys() - bucket.left_full for bucket in self.buckets) and not self.gathering:
            self.reshard()
            for bucket in self.buckets:
                bucket.restore()

    def abandon(self) -> None:
        """Forgets a forward or backward that an exception has ended."""
        for bucket in self.buckets:
            bucket.abandon()
        self.forget_forward()
        self.finish_unshard()
        self.interrupt()
        self.post_backward()


class Index(dict[nn.Parameter, Place]):
    """Maps each parameter to its shard group and position. `units`: the `root` first; `groups`: those of all units.

    `empty`: of whose elements this rank has none. `running`: units whose forward is running, from the outside in, in
    the thread `thread`. `reads`: the units whose parameters the forward of another one was seen to read.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units, self.root = units, units[0]
        self.running: list[Unit] = []
        self.thread = 0
        self.reads: dict[Unit, list[Unit]] = {unit: [] for unit in units}
        self.groups: list[ShardGroup] = [group for unit in units for group in unit.groups]
        self._units = {group: unit for unit in units for group in unit.groups}
        super().__init__(places_in(self.groups))
        self.empty = {param for param, place in self.items() if place.span is None}

    def unit_of(self, param: nn.Parameter) -> Unit:
        return self._units[self[param].group]

    def units_of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        """Those that hold any of the parameters, in the order of the model, which is the same on all ranks."""
        held = {self[param].group for param in params}
        return [unit for unit in self.units if not held.isdisjoint(unit.groups)]


# Who needs a unit full for longer than a forward.
_BUSY = {Need.BACKWARD, Need.SUMMONED}


def refuse_busy(units: Sequence[Unit], call: str) -> None:
    """Raises RuntimeError if `call` is made within forward, backward or summon_full_params()."""
    busy = [unit.title for unit in units if unit.running or not unit.needed_by.isdisjoint(_BUSY)]
    if busy:
        raise RuntimeError(
            f"{call} was called while {busy[0]} is unsharded already: within forward, backward or another "
            "summon_full_params(). Call it between steps, and once."
        )
