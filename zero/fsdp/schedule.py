"""Orders the unsharding of units in a forward: unshard, compute, reshard. The root, and units that backward reaches
first or that reshard_after_forward=False keeps, stay unsharded for backward (backward.py).

`Order` (unit.py) says how far all-gathers run ahead. Each rank prefetches in the order in which its units ran last.
Ranks whose orders differ raise when an all-gather arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakMethod, proxy

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from zero._torch.autograd import in_a_backward, saves_copies, transformed
from zero._torch.modules import parameters_of
from zero._torch.tensors import as_plain_tensors
from zero.comm import Comm
from zero.comm.streams import HostStreams
from zero.comm.together import Together
from zero.fsdp.backward import Backward, Graph
from zero.fsdp.unit import (
    Call,
    Index,
    Kept,
    Need,
    Order,
    Unit,
    recorded_as_shard,
    watch_inputs,
    watch_inside,
    watch_outputs,
)
from zero.shards.cut import Owner
from zero.shards.shard_group import ShardGroup
from zero.shards.sharded_parameter import NO_COPIES, NOT_EXPORTED, AtRest
from zero.tensor_parallel.shown import Shown, Slot, slots_of
from zero.wrap.dtensor_checks import watch_steps

# ---------------------------------------------------------------------------------------------------------------- reads
#
# What those read who read parameters.
#
# Outside of their own unit's forward the forward of another unit, a hook in backward and a checkpoint that computes
# again read full parameters, and torch.amp.GradScaler reads all gradients: sharded parameters ask here. Within it
# modules of tensor parallelism read DTensors in place of the plain parameters.


_OUTSIDE = (
    "parameters of {} are read outside of its forward. They are DTensors, which the unit's modules see only while one "
    "of them runs. Put the module that reads them and the unit into one unit, by auto_wrap_policy or as_one_unit."
)


class Reads:
    """Reads of the parameters of one model, as sharded_parameter.py asks for them.

    scaled: the groups of ranks that have elements of the gradients.
    `loading`: whether full weights are loaded now. `naming`: whether names and shapes are read (full_weights.py).
    """

    def __init__(self, index: Index, comms: Sequence[Comm], backward: Backward, scaled: Sequence[Comm]) -> None:
        self._index, self._backward = index, backward
        self.loading = self.naming = False
        self._first_read = Together(comms, "the first reading of parameters of another unit")
        self._overflow = [(comm, comm.channel("the search for gradients that are not finite")) for comm in scaled]

    @property
    def _are_full(self) -> bool:
        """Whether parameters are full for who reads them now: within forward and backward."""
        return (bool(self._index.running) and self._index.thread == get_ident()) or in_a_backward()

    @property
    def beside(self) -> bool:
        runs = bool(self._index.running) or self._backward.active
        return runs and self._index.thread != get_ident() and not in_a_backward()

    @property
    def without_values(self) -> bool:
        return self.loading or self.naming

    def like(self, param: nn.Parameter) -> Tensor | None:
        """A tensor without memory like the full parameter, if that is read as full now or without values."""
        if not (self._are_full or self.without_values):
            return None
        group, index = self._index[param]
        shapes = group.shapes
        return torch.empty_strided(shapes.full[index], shapes.strides[index], dtype=group.full.dtype, device="meta")

    def load(self, owner: Owner, index: int, shard: Tensor, value: Tensor) -> bool:
        """While full weights are loaded, writes this rank's elements of a full value, and returns True."""
        if not self.loading or isinstance(value, AtRest):  # of shards each rank copies its own
            return False
        assert isinstance(owner, ShardGroup)
        param, full_shape = owner.params[index], owner.shapes.full[index]
        if value.shape != full_shape and value.numel() != 1:
            raise RuntimeError(f"{owner.names[index]} has the shape {list(full_shape)}, not {list(value.shape)}")
        value = value.detach()  # on every rank, also if it owns nothing: it may be received here
        with as_plain_tensors():
            if index in owner.shapes.spans:
                shard.copy_(owner.own_slice(index, value.expand(full_shape)))
            else:
                increment_version(param)  # so that graphs that saved it are refused on every rank
        return True

    def unshard(self, param: nn.Parameter) -> bool:
        """Collective within a forward or backward: a parameter of another unit is read, which is unsharded with the
        innermost running one from now on. Returns False outside."""
        unit = self._index.unit_of(param)
        if not self._are_full:
            return False
        if not self._index.running:
            self._backward.unshard_to_read(unit)
            return True
        reader = self._index.running[-1]
        if not self._backward.active:
            refuse_read(unit)
        unit.unshard(for_backward=self._backward.active)
        unit.needed_by.add(reader)
        if unit not in self._index.reads[reader]:
            self._index.reads[reader].append(unit)
            self._refuse_recorded(unit, reader)
        return unit.readable

    def _refuse_recorded(self, unit: Unit, reader: Unit) -> None:
        """Collective. Raises RuntimeError on every rank for a Function of the user's that has recorded a shard."""
        with self._first_read:
            for name in filter(None, map(recorded_as_shard, unit.groups)):
                raise RuntimeError(
                    f"a torch.autograd.Function in the forward of {reader.title} of FSDP was given {name} of "
                    f"{unit.title} while it was sharded, and would get its gradient in the shape of the shard. From "
                    "the next forward on it is unsharded before. To train from the first on make both one unit, "
                    "FSDP(as_one_unit=...), or read the parameter once before the Function: param.detach()."
                )
            self._first_read.agree()

    def spread_overflow(self, found: Tensor) -> None:
        """Collective. Makes it the largest of any rank: 1 where a gradient is not finite.

        Loss scaling skips a step whose gradients are not finite (P. Micikevicius et al., Mixed Precision Training,
        2018, section 3.2). Only the owner of the overflowed elements sees them, and all ranks skip the same steps.
        """
        for comm, channel in self._overflow:
            comm.all_reduce(found, maximum=True, channel=channel)


class ShownUnits:
    """Shows the parameters of each unit of an FSDP while the unit runs."""

    def __init__(self, index: Index) -> None:
        watch_steps()
        self._index: Index = proxy(index)  # which keeps the units, and these keep this
        # Units come from the outside in, so the innermost, which is the last, overwrites the others.
        innermost = {module: unit for unit in index.units for module in unit.module.modules()}
        slots: dict[Unit, list[Slot]] = {}
        holders: dict[Unit, set[nn.Module]] = {}
        for module, unit in innermost.items():
            if own := slots_of(module):
                slots.setdefault(unit, []).extend(own)
                holders.setdefault(unit, {unit.module}).add(module)
        self._hooks: list[RemovableHandle] = []
        for unit, own in slots.items():
            unit.shown = Shown(own, self._refuse_sharded)
            self._hooks += unit.shown.watch(holders[unit])

    def _refuse_sharded(self, params: Iterable[nn.Parameter]) -> None:
        """Raises RuntimeError for a tied parameter of a unit around this one that does not run."""
        for param in params:
            if param in self._index and not (unit := self._index.unit_of(param)).readable:
                raise RuntimeError(_OUTSIDE.format(unit.title))

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        for unit in self._index.units:
            if unit.shown is not None:
                unit.shown.hide()
                unit.shown = None


def refuse_read(unit: Unit) -> None:
    """Raises RuntimeError for a unit that another one reads, if its parameters are DTensors."""
    if unit.shown is not None:
        raise RuntimeError(_OUTSIDE.format(unit.title))


# --------------------------------------------------------------------------------------------------------- the schedule


class Schedule:
    """Unshards and reshards the units of one model in forward and backward, by hooks on their modules.

    A unit is unsharded while its module runs, or a module inside it that holds parameters of the unit. So methods of
    the model other than forward find parameters unsharded, too, if they call modules. A parameter of another unit that
    is read meanwhile asks for that unit (sharded_parameter.py): it is unsharded, and from then on whenever its reader
    is.

    `modes`: in which (`module.training`) the model has run forward.
    """

    def __init__(
        self,
        index: Index,
        comms: Sequence[Comm],
        streams: Sequence[HostStreams],
        together: Together,
        backward: Backward,
        order: Order,
    ) -> None:
        self._index, self._root, self._comms, self._streams = index, index.root, comms, streams
        self._backward, self._together, self._order = backward, together, order
        self.modes: set[bool] = set()
        # The calls of the last forward of the model, or of units by themselves.
        self._graph = Graph()
        # How many forwards of units have begun.
        self._forwards_begun = 0
        self._hooks: MutableMapping[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
        self._on_params: list[RemovableHandle] = []
        self._kept: dict[Unit, Kept] = {}

    def install(
        self,
        hidden: Callable[[Unit, nn.Module, Callable[..., Any]], Callable[..., Any]],
        begin_search: Callable[[], object],
    ) -> None:
        """Registers the hooks.

        hidden: returns what is registered in place of a hook on a module of a unit. begin_search: called before the
        first forward in each mode. Its owner is not kept alive.
        """
        self._begin_search = WeakMethod(begin_search)
        self._on_params = self._backward.watch_params()
        inside: set[nn.Module] = set()
        for unit in reversed(self._index.units):  # so that a unit around another is entered first
            self._kept[unit] = Kept(unit, inside)
            inside.update(unit.module.modules())
            for module in unit.module.modules():
                own = module is unit.module
                if not own and unit.params.isdisjoint(parameters_of(module, recurse=False)):
                    continue  # it holds no parameters of the unit
                before = hidden(unit, module, partial(self._together_with, self._pre_forward, unit, own))
                after = hidden(unit, module, partial(self._together_with, self._post_forward, unit, own))
                self._hooks.setdefault(module, []).extend(
                    [
                        # Before the user's own, such as weight_norm's, which read parameters.
                        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                        # Also after an exception: else a unit that is called by itself would stay unsharded, and
                        # count as running.
                        module.register_forward_hook(after, always_call=True),
                    ]
                )
        root = self._index.root
        for module in root.module.modules():
            if isinstance(module, nn.TransformerEncoder):
                before = hidden(root, module, partial(self._together_with, self._before_encoder))
                self._hooks.setdefault(module, []).append(module.register_forward_pre_hook(before))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NO_COPIES)  # hooks on modules refer to it

    def _together_with(self, hook: Callable[..., Any], *args: Any) -> Any:
        try:  # not a context, which costs two calls in each hook
            return hook(*args)
        except Exception as error:
            self._together.tell(error)
            raise

    def remove(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Removes the hooks from `modules`, or all."""
        for hook in self._on_params if modules is None else ():
            hook.remove()
        for module in [*self._hooks] if modules is None else modules:
            for hook in self._hooks.pop(module, []):
                hook.remove()

    @property
    def installed(self) -> bool:
        return bool(self._hooks)

    def interrupted(self) -> None:
        """Forgets a forward that an error has ended which calls no hooks of modules: KeyboardInterrupt, SystemExit."""
        if self._index.running and not self._backward.active:
            self._index.running.clear()
            self._order.forget()
            for unit in self._index.units:
                unit.forget_forward()
                unit.release()

    def _pre_forward(
        self, unit: Unit, own: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Begins a forward of the unit: expects a backward, and registers hooks on inputs for the end of that backward.
        Returns the inputs in the dtype of computing. own: whether this is the unit's own module, not one inside it."""
        if self._backward.active and not in_a_backward():  # an exception has ended it
            self._index.running.clear()
            self._order.forget()
            self._backward.abandon()
        # In its backward activation checkpointing computes the forward again, and backward has unsharded it.
        again = Need.BACKWARD in unit.needed_by
        if again or unit.running:
            if not own:
                return None
        elif Need.SUMMONED in unit.needed_by:
            if torch.is_grad_enabled() and any(param.requires_grad for param in unit.params):
                raise RuntimeError(
                    f"{unit.title} ran forward inside summon_full_params() with gradients, which FSDP would not "
                    "average. Train outside of it, or run this forward under torch.no_grad()."
                )
            return None
        else:
            unit.entry_module = None if own else module
            self._enter(unit, training=module.training)
        if not again:
            self._forwards_begun += 1
            unit.running.append(Call(self._forwards_begun))
        if unit.precision.param_dtype is not None:
            args, kwargs = unit.precision.cast_inputs(module, (args, kwargs), root=unit is self._root)
        if not again and unit is not self._root and torch.is_grad_enabled():
            call = unit.running[-1]
            if not self._backward.active:
                self._graph.append((unit, call))
            elif not unit.calls:  # else a checkpoint computes an expected call again
                unit.calls.add(call)
            call.has_exit_hook = watch_inputs(unit, args, kwargs, partial(self._backward.post_backward, unit, call))
        return args, kwargs

    def _before_encoder(self, module: nn.TransformerEncoder, _: Any) -> None:
        """Collective. Before it calls its first layer, torch's encoder looks at that one's parameters: whether it skips
        padding depends on their class."""
        first = module.layers[0]
        if not first.training:  # else it never does
            for unit in self._index.units_of(param for param in parameters_of(first) if param in self._index):
                if not unit.readable:
                    self._order.gather(unit, for_backward=self._backward.active)

    def _enter(self, unit: Unit, *, training: bool) -> None:
        """Collective. Unshards the unit, and what must be with it. training: whether its module is in training."""
        in_backward = self._backward.active
        if not self._index.running:  # the forward of the model begins, or that of one unit by itself
            if torch.compiler.is_exporting():
                raise RuntimeError(NOT_EXPORTED)
            if saves_copies():
                raise RuntimeError(
                    "a forward of FSDP runs within torch.autograd.graph.allow_mutation_on_saved_tensors(), which "
                    "copies what a graph has saved when it is written, as FSDP writes parameters. Leave it out, or "
                    "take stage 2."
                )
            self._index.thread = get_ident()
            if not in_backward:
                self._graph = Graph(reduces=self._backward.reduces)
                for streams in self._streams:
                    streams.begin()
                for comm in self._comms:
                    comm.log.begin_schedule(together=comm is self._comms[0])  # among the first all forwards gather
        for streams in self._streams:
            streams.expect_computing("{} of FSDP runs", unit.title)
        # A forward of the model begins, not another method or one within a backward.
        begins = unit is self._root and unit.entry_module is None and not in_backward
        if begins and training not in self.modes:
            self.modes.add(training)
            if (begin_search := self._begin_search()) is not None:
                begin_search()
        if transformed():
            raise RuntimeError(
                f"torch.func.grad, vjp, jvp or jacrev runs {unit.title} of FSDP, which gathers parameters into memory "
                "that the function captures. Differentiate by backward() or torch.autograd.grad, or at stage 2, with "
                "ShardedDDP."
            )
        for each in (unit, *self._index.reads[unit]):
            if each is not unit and not in_backward:
                refuse_read(each)
            each.unshard(for_backward=in_backward)
            each.needed_by.add(unit)
        self._index.running.append(unit)
        if not in_backward:
            self._order.enter(unit)

    def _post_forward(self, unit: Unit, own: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if Need.BACKWARD in unit.needed_by or not unit.running:
            return None
        trains = torch.is_grad_enabled()
        if not own and module is not unit.entry_module:
            if trains:
                reached = partial(self._backward.reached, unit, unit.running[-1], self._graph, inside=True)
                watch_inside(output, reached)
            return None
        unit.entry_module = None if module is unit.entry_module else unit.entry_module
        call = unit.running.pop()
        call.ended = self._forwards_begun
        on_entry = partial(self._backward.reached, unit, call, self._graph) if trains else None
        output, needs_backward = watch_outputs((unit, *self._index.reads[unit]), output, on_entry)
        if not unit.running:
            self._kept[unit].refuse()
            # Backward will reach this unit first, as it did last time, and would gather it ahead.
            first_in_backward = self._order.in_flight == 3 and unit is self._order.before.get(self._root)
            stays = needs_backward and (unit is self._root or unit.stays or first_in_backward)
            unit.inputs.clear()
            if unit in self._index.running:
                self._index.running.remove(unit)
            if unit is self._root:
                self._order.leave_root()
            for each in (unit, *self._index.reads[unit]):
                # Before `release`, which reshards what nobody needs.
                (each.needed_by.add if stays else each.needed_by.discard)(Need.KEPT)
                each.release(unit)
            if not self._index.running:
                for streams in self._streams:
                    streams.synchronize()  # the user may write into shards from here on
        return output
