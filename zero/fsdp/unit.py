"""The parameters of one module, which are unsharded while it computes and sharded at rest; and their gradients."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zero._torch.autograd import base_of, shape_expected_by, writes_so_far
from zero._torch.modules import buffers_of
from zero._torch.tensors import as_plain_tensors, shares_memory
from zero.shards.partition import Place, places_in
from zero.shards.shard_group import GroupState, ShardGroup
from zero.shards.sharded_parameter import Lent
from zero.tensor_parallel.shown import Shown
from zero.wrap.bucket import GradBucket
from zero.wrap.precision import MixedPrecision
from zero.wrap.tensors import Edges, map_tensors, tensors_in

# ------------------------------------------------------------------------------------------------------------ gradients
#
# The gradients of one shard group of a unit: this rank's shards of them at rest, and the full ones in backward.
#
# at rest       `param.grad` is this rank's shard of the averaged gradient, in the shard's shape, for any optimizer
# in backward   `param.grad` is autograd's own full gradient; the shard's earlier gradient is set aside
# no_sync       `param.grad` stays this rank's own full gradient, as with DistributedDataParallel: what is written into
#               it counts, and None drops it. An earlier gradient of shards was gathered into it


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
        # By position of those beside which a gradient stays apart: torch's count of writes when they were left.
        self._written: dict[int, int] = {}
        # Whether a backward is running that writes full gradients, and whether it reduces them.
        self.writes = self._reduces = False
        # Whether the running backward adds to what no_sync has left.
        self.took = False

    @property
    def left_unreduced(self) -> bool:
        """Whether no_sync has left gradients that a backward is to reduce."""
        return self._left or any(self.group.params[index].requires_grad for index in self.left_full)

    # ------------------------------------------------------------------------------------------- a backward

    def enter_backward(self, *, reduces: bool) -> None:
        """Sets `param.grad` up for the full gradients that autograd writes from here on: adds to those that no_sync has
        left, and sets those of shards aside. No reduction is in flight. reduces: whether this backward does; if not,
        collective where there are gradients of shards, which are gathered: what is added to them and written into them
        is averaged with them, as with DistributedDataParallel. Where units compute in fewer bits they stay apart.

        Raises RuntimeError for a shard's gradient in the place of a full one that no_sync has left, and for a full one
        that was written while another stays apart.
        """
        assert self._handle is None, "a reduction is in flight"
        self._left, self.writes, self._reduces, self.took, group = False, True, reduces, False, self.group
        for index in self.trained:
            param, full = group.params[index], group.shapes.full[index]
            grad = param.grad
            if grad is None:
                self.set_aside.pop(index, None)
                continue
            if index not in self.left_full:
                param.grad, self.set_aside[index] = None, group.as_shard(index, grad)
                continue
            self.took = self.took or reduces
            if grad.shape != full:
                raise RuntimeError(
                    f"{group.names[index]} has a `param.grad` of shape {list(grad.shape)} in place of the full "
                    f"gradient of shape {list(full)} that the last backward under no_sync() has left, and that no "
                    "backward has averaged yet. Write into that in place (`param.grad.mul_(0.5)`), or set it to None, "
                    "which drops it."
                )
            if index in self.set_aside and writes_so_far([grad]) != self._written[index]:
                # Written in place since. Zeros clear what is apart, too, which has no share in any other write.
                if self._written[index] < 0 or grad.any():
                    raise RuntimeError(
                        f"{group.names[index]} has a gradient that was written under no_sync(), while FSDP keeps apart "
                        "what the backward before has averaged in more bits. Write into gradients before that one or "
                        "after the next backward outside of no_sync(), which averages them; or clear them, zero_grad()."
                    )
                self.set_aside.pop(index)
        self.left_full.difference_update(self.trained)
        gathers = not reduces and group.full.dtype == group.shard.dtype  # else it would be rounded
        held = {index: grad for index, grad in self.set_aside.items() if gathers and index in self.trained}
        if held:
            gathered = group.full.new_zeros(group.layout.numel)
            own = group.shapes.views_of_shard(gathered[group.layout.segment(group.comm.rank)])
            with as_plain_tensors():
                for index, grad in held.items():
                    own[index].copy_(grad)
            group.gather(gathered).wait()
            views = group.shapes.views_of_full(gathered)
            for index in held:
                group.params[index].grad = views[index]

    def take_written(self) -> None:
        """Takes what autograd has written, once backward has passed the unit. Of parameters that this backward did not
        reach, that is what was accumulated under no_sync."""
        self.writes = False
        for index in self.trained:
            param = self.group.params[index]
            if index not in self.taken:
                gradient, param.grad = param.grad, None
                self.take(index, gradient)

    def keep_unreduced(self) -> None:
        """Leaves what autograd has written in `param.grad`. The parameters are resharded."""
        self._left, self.writes = True, False
        for index in self.trained:
            param = self.group.params[index]
            if self.group.full.dtype == self.group.shard.dtype:
                self.set_aside.pop(index, None)  # it was gathered
            if param.grad is not None:
                self.left_full.add(index)
                if index in self.set_aside:  # zeros are no sign that the user has cleared it
                    self._written[index] = writes_so_far([param.grad]) if param.grad.any() else -1
            elif index in self.set_aside:  # this backward has no gradient of it
                self._set(index, self.set_aside.pop(index))

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

    def add_unused(self, used: Mapping[int, bool]) -> None:
        """Adds what only other ranks have used. A gradient of which this rank owns nothing is an empty tensor, so that
        no rank alone finds None where there is a gradient."""
        super().add_unused(used)
        self.took = False
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

    def interrupt(self) -> None:
        """Drops what a backward that has failed has written, where it was to reduce it; the parameters are still full.
        Under no_sync that counts, as with DistributedDataParallel: see `keep_unreduced`."""
        if self.writes and self._reduces:
            self.writes = False
            for index in self.trained:
                self.params[index].grad = None

    def restore(self) -> None:
        """Puts these gradients back into `param.grad`. Unreduced gradients remain."""
        if self.took:
            self.took, self.lost = False, True
            # Of zeros: without any gradient nobody could tell whether the user has cleared them.
            self._set(index := self.trained[0], torch.zeros_like(self.group.shard_views[index]))
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

    reshard_after_forward: whether they are resharded between forward and backward.
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
        reshard_after_forward: bool,
    ) -> None:
        self.name, self._module, self.groups = name, ref(module), groups
        self.params = {param for group in groups for param in group.params}
        self.precision, self.reshard_after_forward = precision, reshard_after_forward
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
        """Collective. Has full parameters, in memory of their own, until `end_summon`. See ShardGroup.summon."""
        if self.groups:
            self.needed_by.add(Need.SUMMONED)
        for group in self.groups:
            group.summon(to, on_cpu=on_cpu)

    def end_summon(self, *, keep: bool) -> None:
        """Ends `summon`. keep: what was written into the full parameters is copied into the shards."""
        self.needed_by.discard(Need.SUMMONED)
        for group in self.groups:
            # If summoning has raised, the groups after that one are still sharded.
            if group.state is GroupState.SUMMONED:
                group.end_summon(keep=keep)

    def release(self, *needs: object) -> None:
        """Ends needs of it, and reshards it if nothing else needs the parameters."""
        self.needed_by.difference_update(needs)
        if not self.needed_by:
            self.reshard()

    # -------------------------------------------------------------------------------------------- backward

    def leave_backward(self) -> None:
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
                bucket.interrupt()
            self.leave_backward()
            for bucket in self.buckets:
                if bucket.writes:
                    bucket.keep_unreduced()
        aside = any(bucket.took or bucket.set_aside.keys() - bucket.left_full for bucket in self.buckets)
        if aside and not self.gathering:
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
        self.leave_backward()


class Index(dict[nn.Parameter, Place]):
    """Maps each parameter to its shard group and position. `units`: the `root` first; `groups`: those of all units.

    `empty`: of whose elements this rank has none. `running`: units whose forward is running, from the outside in, in
    the thread `thread`. `read_too`: the units whose parameters the forward of another one was seen to read.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units, self.root = units, units[0]
        self.running: list[Unit] = []
        self.thread = 0
        self.read_too: dict[Unit, list[Unit]] = {unit: [] for unit in units}
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


# ---------------------------------------------------------------------------------------------------- what is in flight
#
# How many units are in flight at once, and so how far ahead they are gathered. The root unit, which stays unsharded
# from forward to backward, does not count.
#
#     1   one at a time: nothing is gathered ahead, and gradients are reduced before the next unit is gathered
#     2   while a unit computes, the next unit's all-gather or the last unit's reduction is in flight: in backward the
#         reduction in the first half of a unit, and the all-gather in the second; where transfers overlap computing,
#         the next unit is gathered after the gradients of the current one are computed
#     3   both are: the next unit is gathered before the current one computes, in forward and in backward
#
# For a unit in flight a rank holds the full parameters (B bytes) and the full gradients (B), or, during their
# reduction, the gradients and the receive buffers (2 B): never more than 2 B. So besides shards a step takes at most 2
# B times the number. Where transfers overlap computing, the receive buffers take B / W (B if gradients are sent in 16
# bits; W ranks), and a step takes at most 4 B + B / W: parameters and gradients of the unit that computes, parameters
# of the next unit, gradients and receive buffers of the last.
#
# `Order` says which all-gathers run ahead; those of gradients are in model.py.


class Order:
    """Which unit follows which in forward, as units ran last, and which ones were gathered ahead by that. The root,
    which computes around all others, follows none.

    in_flight: how many units are in flight. overlaps: whether transfers overlap computing.
    `before`: by unit the one that ran before it. `first_in_backward`: the one that backward reaches first.
    """

    def __init__(self, index: Index, in_flight: int, *, overlaps: bool) -> None:
        self.in_flight = in_flight
        self._index, self._root = index, index.root
        self._ahead_in_forward = in_flight == 3 or (in_flight == 2 and overlaps)
        self._after: dict[Unit, Unit] = {}
        self.before: dict[Unit, Unit] = {}
        self.first_in_backward: Unit | None = None
        self._last_entered = self._root
        # Gathered ahead, and did not begin their forward yet.
        self.ahead: set[Unit] = set()

    def enter(self, unit: Unit) -> None:
        """A forward of the unit begins. Launches the all-gather of the one that followed last time."""
        # A unit that runs twice in a row would follow itself, and the unit after it would not be gathered ahead.
        if unit is not self._root and unit is not self._last_entered:
            self._after[self._last_entered], self.before[unit] = unit, self._last_entered
        self._last_entered = unit
        self.ahead.discard(unit)
        unit.needed_by.discard(Need.AHEAD)
        # Only within a forward of the whole model, at whose end it is resharded if it did not run. After another method
        # it would stay, and a later forward would not read what was written into its shards meanwhile.
        whole = self._root in self._index.running and self._root.entry_module is None
        following = self._after.get(unit)
        if whole and following is not None and self._ahead_in_forward:
            following.unshard(ahead=True)
            following.needed_by.add(Need.AHEAD)
            self.ahead.add(following)

    def leave_root(self) -> None:
        """The forward of the model ends: backward begins with the unit that ran last."""
        self.first_in_backward = None if self._last_entered is self._root else self._last_entered
        while self.ahead:
            self.ahead.pop().release(Need.AHEAD)  # it did not run this time

    def launch_before(self, unit: Unit) -> None:
        """Launches the all-gather of the unit that backward is expected to reach after this one, unless it is in
        backward."""
        following = self.first_in_backward if unit is self._root else self.before.get(unit)
        if following is not None and following.calls and Need.BACKWARD not in following.needed_by:
            following.unshard(for_backward=True, ahead=True)
            following.needed_by.add(Need.AHEAD)

    def forget(self) -> None:
        """An error has ended the forward."""
        self.ahead.clear()


# ----------------------------------------------------------------------------------------- edges of a unit in the graph
#
# Hooks on the inputs, outputs and parameters of a unit, which notice where backward enters the unit, is half through
# it, and leaves it.


def watch_inputs(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], on_exit: Callable[[Tensor], None]) -> bool:
    """Calls `on_exit` when backward reaches the gradient of an input that is no leaf. Returns whether there is one."""
    given = (tensor for value in (*args, *kwargs.values()) for tensor in tensors_in(value))
    # Leaves accumulate gradients as soon as these are computed. Of the other nodes that are ready, autograd runs the
    # one created last: it comes to an input when it has run every node of the unit.
    inner = dict.fromkeys(tensor for tensor in given if tensor.grad_fn is not None)
    unit.inputs.update(_nodes((tensor, base_of(tensor)) for tensor in inner))
    # Inputs stay as they are. With views of them autograd would sum gradients in another order than without FSDP, and a
    # module that compares the identity of its inputs (nn.MultiheadAttention) would compute something else.
    for tensor in inner:
        tensor.register_hook(on_exit)
    return bool(inner)


def watch_outputs(
    units: Sequence[Unit], output: Any, on_entry: Callable[[Edges, Any], None] | None
) -> tuple[Any, bool]:
    """Returns the output, with copies of what lies in the memory of the units, which is freed after forward. Calls
    `on_entry`, unless None, when backward enters through it; also returns whether it can.

    units: the one whose forward ends, and those that were unsharded with it. `on_entry` gets where backward goes on
    from there, which the node itself keeps: with the node it would keep the graph for good.
    Raises RuntimeError for such memory in an attribute of an object, which is not replaced.
    """
    full = [group.full for unit in units for group in unit.groups if group.frees]
    if any(_in_memory_of(full, one) for one in tensors_in(output)):
        output = map_tensors(lambda one: one.clone() if _in_memory_of(full, one) else one, output)
        if any(_in_memory_of(full, one) for one in tensors_in(output)):
            raise RuntimeError(
                f"an output of {units[0].title} has an attribute that is a parameter, or lies in the memory of one, "
                "which FSDP releases when the forward ends. Put a copy there: param.clone()."
            )
    found = [(tensor, base_of(tensor)) for tensor in tensors_in(output)]
    if on_entry is None:
        return output, False
    # An input that is returned as it is: backward comes to its node when it has left the unit.
    nodes = {*_nodes(found)} - units[0].inputs
    # Hooks on a tensor are also called if only its own gradient is asked for, as the next unit may do with its input.
    for node in nodes:
        node.register_prehook(partial(on_entry, node.next_functions))
    return output, bool(nodes)


def watch_inside(output: Any, on_entry: Callable[[Edges, Any], None]) -> None:
    """Calls `on_entry`, as `watch_outputs`, when backward enters through an output of a module inside a unit."""
    # A loss may use such outputs: stored hidden states, or features that hooks collect.
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(partial(on_entry, tensor.grad_fn.next_functions))


def watch_param(param: nn.Parameter, method: Callable[[Any, Unit], None], of: object, unit: Unit) -> RemovableHandle:
    """Calls method(of, unit) before the gradient of a parameter is accumulated, also of one that is frozen now, for
    which torch refuses a hook. The hook keeps neither: units keep their parameters, and these their hooks."""
    trained, of_owner, of_unit = param.requires_grad, ref(of), ref(unit)

    def call(_: Any) -> None:
        owner, reached = of_owner(), of_unit()
        if owner is not None and reached is not None:
            method(owner, reached)

    handle: RemovableHandle = param.requires_grad_(True).register_hook(call)
    param.requires_grad_(trained)
    return handle


def half_way(unit: Unit) -> nn.Parameter | None:
    """The parameter with whose gradient half of the elements of a unit's gradients have come, if they come in the
    reverse of the parameters' order. None if nothing of the unit is trained now."""
    places = [pair for group in unit.groups for pair in zip(group.params, group.layout.numels, strict=True)]
    trained = [(param, size) for param, size in places[::-1] if param.requires_grad]
    so_far = accumulate(size for _, size in trained)
    half = sum(size for _, size in trained) / 2
    return next((param for (param, _), size in zip(trained, so_far, strict=True) if size >= half), None)


def _nodes(tensors: Iterable[tuple[Tensor, Tensor | None]]) -> list[Node]:
    """Returns the nodes of tensors and of their bases, through which backward goes if a view is written into."""
    return [each.grad_fn for pair in tensors for each in pair if each is not None and each.grad_fn is not None]


def _in_memory_of(full: Sequence[Tensor], tensor: Tensor) -> bool:
    return any(shares_memory(one, tensor) for one in full)


class Kept:
    """The attributes and buffers of a unit's modules, in which a forward may have put memory of the unit's parameters.
    That is freed afterwards, and torch would read at address 0: views, unlike what `.detach()` returns, cannot tell.

    inside: modules of units inside this one.
    """

    def __init__(self, unit: Unit, inside: Collection[nn.Module]) -> None:
        self._groups, self._title = unit.groups, unit.title
        # The modules, which a unit does not keep, nor their dictionaries, in which there are hooks that keep this. With
        # each how many attributes it has, which of them are not those of every module, and their values, if none of
        # them can change or be a tensor: while they are the same objects nothing was kept.
        self._held: list[Any] = [[ref(module), 0, (), ()] for module in unit.module.modules() if module not in inside]

    def refuse(self) -> None:
        """Raises RuntimeError if such memory was kept."""
        full = [group.full for group in self._groups if group.frees]
        for entry in self._held if full else ():
            module = entry[0]()
            if module is None:
                continue
            attributes, buffers = vars(module), buffers_of(module)
            if not buffers and len(attributes) == entry[1]:
                if entry[3] and all(map(is_, map(attributes.get, entry[2]), entry[3])):
                    continue
            elif len(attributes) != entry[1]:
                entry[1:] = len(attributes), tuple(name for name in attributes if name not in _OF_EVERY_MODULE), ()
            found = [(name, attributes.get(name)) for name in entry[2]]
            entry[3] = tuple(value for _, value in found)
            for name, value in (*found, *buffers.items()):
                if type(value) in _NO_TENSORS:
                    continue
                if not (isinstance(value, tuple) and _NO_TENSORS.issuperset(map(type, value))):
                    entry[3] = ()
                among: Any = value.values() if isinstance(value, dict) else value
                for one in among if isinstance(among, Collection) and not isinstance(among, Tensor) else (value,):
                    told = not isinstance(one, Tensor) or isinstance(one, (nn.Parameter, Lent))  # by themselves
                    if not told and _in_memory_of(full, one):
                        if one is value:
                            setattr(module, name, one.clone())  # for whoever reads it after this error
                        raise RuntimeError(
                            f"{self._title} keeps its parameters' memory as `{name}` of a {type(module).__name__}, and "
                            "FSDP releases that when the forward ends. Keep a copy: param.detach().clone(), or "
                            "param.clone() for what a loss reads."
                        )


_OF_EVERY_MODULE = {*vars(nn.Module())}
_NO_TENSORS = frozenset({bool, int, float, str, type(None)})


def recorded_as_shard(group: ShardGroup) -> str | None:
    """Returns the name of a parameter that a graph has recorded while it was a shard, whose gradients that graph would
    refuse, if there is one. The parameters are full."""
    if torch.is_inference_mode_enabled():  # no graph is recorded
        return None
    trained = [(param, name) for param, name in zip(group.params, group.names, strict=True) if param.requires_grad]
    leaves = ((get_gradient_edge(param).node, param, name) for param, name in trained)
    return next((name for leaf, param, name in leaves if shape_expected_by(leaf) != param.shape), None)
