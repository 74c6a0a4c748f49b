"""One model at stage 3: its units, where its parameters lie, who reads them, and its forwards and backwards.

forward of a unit     unshard, compute, reshard; the root, and units that backward reaches first or that
                      reshard_after_forward=False keeps, stay unsharded for backward
backward of a unit    unshard, compute, reshard, wait for the gradients of the unit before, launch its own reduction
end of backward       complete the remaining units, wait for all reductions, compare the logs of the ranks

`Order` (unit.py) says how far all-gathers run ahead. Each rank prefetches in the order in which its units ran last.
Ranks whose orders differ raise when an all-gather arrives.

A unit that backward reaches again, through another forward's graph, waits for its reduction, and reduces once more.

Autograd adds up what all uses of a parameter give before it writes `param.grad`, once a backward. So the calls of a
unit that one forward has made, which its graph knows, are waited for. A gradient that comes later, through the graph of
another forward or the forward of another unit, enters the unit again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NoReturn
from weakref import ReferenceType, WeakKeyDictionary, WeakMethod, WeakSet, proxy, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero._torch.autograd import at_end_of_backward, in_a_backward, saves_copies, transformed, writes_into
from zero._torch.modules import parameters_of, params_of
from zero._torch.tensors import as_plain_tensors
from zero.comm import Comm, fail_together
from zero.comm.streams import streams_in
from zero.comm.together import Together
from zero.fsdp.options import Options, in_flight
from zero.fsdp.unit import (
    Call,
    Index,
    Kept,
    Need,
    Order,
    Unit,
    half_way,
    recorded_as_shard,
    watch_inputs,
    watch_inside,
    watch_outputs,
    watch_param,
)
from zero.shards.cut import Group, claim, release, take_over
from zero.shards.placement import Placement
from zero.shards.shard_group import GroupState, ShardGroup, refuse_moved
from zero.shards.sharded_parameter import NO_COPIES, NOT_EXPORTED, Sharded
from zero.tensor_parallel.parts import others_of
from zero.tensor_parallel.shown import Shown, Slot, slots_of
from zero.wrap.bucket import EndOfBackward
from zero.wrap.dtensor_checks import watch_steps
from zero.wrap.tensors import Edges, nearest_leaf

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

    def __init__(self, model: Model, scaled: Sequence[Comm]) -> None:
        self._model: Model = proxy(model)  # which has this
        self._index = model.index
        self.loading = self.naming = False
        self._first_read = Together(model.comms, "the first reading of parameters of another unit")
        self._overflow = [(comm, comm.channel("the search for gradients that are not finite")) for comm in scaled]

    @property
    def _are_full(self) -> bool:
        """Whether parameters are full for who reads them now: within forward and backward."""
        return (bool(self._index.running) and self._index.thread == get_ident()) or in_a_backward()

    @property
    def beside(self) -> bool:
        runs = bool(self._index.running) or self._model.runs_backward
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

    def load(self, group: Group, index: int, shard: Tensor, value: Tensor) -> bool:
        """While full weights are loaded, writes this rank's elements of a full value, and returns True."""
        if not self.loading or isinstance(value, Sharded):  # of shards each rank copies its own
            return False
        assert isinstance(group, ShardGroup)
        param, full_shape = group.params[index], group.shapes.full[index]
        if value.shape != full_shape and value.numel() != 1:
            raise RuntimeError(f"{group.names[index]} has the shape {list(full_shape)}, not {list(value.shape)}")
        value = value.detach()  # on every rank, also if it owns nothing: it may be received here
        with as_plain_tensors():
            if index in group.shapes.spans:
                shard.copy_(group.own_slice(index, value.expand(full_shape)))
            else:
                increment_version(param)  # so that graphs that saved it are refused on every rank
        return True

    def unshard_for_reader(self, param: nn.Parameter) -> bool:
        """Collective within a forward or backward: a parameter of another unit is read, which is unsharded with the
        innermost running one from now on. Returns False outside."""
        unit = self._index.unit_of(param)
        if not self._are_full:
            return False
        if not self._index.running:
            self._model.unshard_to_read(unit)
            return True
        reader = self._index.running[-1]
        if not self._model.runs_backward:
            refuse_read(unit)
        self._model.unshard(unit)
        unit.needed_by.add(reader)
        if unit not in self._index.read_too[reader]:
            self._index.read_too[reader].append(unit)
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


# ---------------------------------------------------------------------------------------------------------------- model


# All models that exist, in the order of their construction, which is the same on all ranks.
_alive: list[ReferenceType[Model]] = []


_AVERAGES = (
    "of which FSDP keeps another shard on each rank. Remove DistributedDataParallel: FSDP averages gradients itself."
)


_SHARDED = (
    "is sharded by FSDP, which is stage 3, and by no other stage beside it. Build the plain optimizer of the "
    "parameters: torch.optim.Adam(model.parameters()); in a notebook whose cell runs again pass what "
    "zero.unwrap(model) returns."
)


class Graph(list[tuple[Unit, Call]]):
    """The calls of one forward of the model, which a backward through its graph passes. Hooks on the graph keep it.

    reduces: whether gradients were to be reduced then, or accumulated under no_sync."""

    def __init__(self, *, reduces: bool = True) -> None:
        super().__init__()
        self.reduces = reduces

    # As objects: two graphs may have equal calls.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class Model:
    """What an FSDP runs, as long as the sharded module exists or until `end`. Hooks on modules keep it alive, and
    it keeps no module.

    module: the user's. units: the root first. ignored: modules that are not sharded.

    A unit is unsharded while its module runs, or a module inside it that holds parameters of the unit. So methods of
    the model other than forward find parameters unsharded, too, if they call modules. A parameter of another unit that
    is read meanwhile asks for that unit (sharded_parameter.py): it is unsharded, and from then on whenever its reader
    is.

    `partition`: the user's. `index`: where the parameters lie. `together`: around what ranks do together with it.
    `modes`: in which (`module.training`) the model has run forward. `reduces`: whether gradients are reduced; False
    under no_sync. `runs_backward`: whether a backward is running.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        placement: Placement,
        options: Options,
        ignored: Sequence[nn.Module] = (),
    ) -> None:
        self._module, self.units, self.placement, self.ignored = ref(module), units, placement, WeakSet(ignored)
        self.partition = options.partition
        self.index = Index(units)
        self.comm, self.comms = placement.comm, placement.all_groups()
        self.together = Together(self.comms, "a call of FSDP, such as forward, backward or state_dict")
        # Where modules hold sharded parameters.
        self._holders = [
            (params_of(holder), name, param)
            for holder in module.modules()
            # A module may hold one parameter by two names, and either may be replaced.
            for name, param in holder.named_parameters(recurse=False, remove_duplicate=False)
            if param in self.index
        ]
        self._shown = ShownUnits(self.index)
        self._streams = streams_in(group.streams for group in self.index.groups)
        overlaps = any(unit.overlaps for unit in units)
        self._order = Order(self.index, in_flight(options.prefetch, overlaps=overlaps), overlaps=overlaps)
        self._end = EndOfBackward(self.comms, "the end of a backward of FSDP")
        name = "a comparison of which parameters are trained, as that has changed there"
        remedy = "Freeze and unfreeze parameters on every rank."
        self._trained = [(comm, comm.channel(name, remedy)) for comm in self.comms]
        others = others_of(self.index)
        if others:
            fail_together([*self.comms, *others], self.index.groups[0].full.device)
        self.reads = Reads(self, [self.comm, *others])
        for group in self.index.groups:
            group.reads = ref(self.reads)  # units keep their groups, and hooks on modules keep units and this
        # How to restore what steps have hidden, which are running or have raised.
        self.unfinished_steps: list[tuple[Callable[[Optimizer], None], ReferenceType[Optimizer]]] = []
        self._hooks: MutableMapping[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
        self._on_params: list[RemovableHandle] = []
        self._kept: dict[Unit, Kept] = {}

        self.modes: set[bool] = set()
        # The calls of the last forward of the model, or of units by themselves.
        self._graph = Graph()
        # How many forwards of units have begun.
        self._forwards_begun = 0

        self.reduces = True
        self.runs_backward = False
        # Whether the running backward writes into parameters' gradients, and not only asks for those of inputs.
        self._writes = True
        # The graphs that the running backward has come to.
        self._graphs: set[Graph] = set()
        # Whether backward has left gradients of a unit unreduced since the last one that reduced.
        self._left_unreduced = False
        # Whether autograd computes in the thread that calls it. On a GPU it does in one of its own, which may end only
        # after that thread has cleared gradients.
        self._in_callers_thread = all(group.full.device.type == "cpu" for group in self.index.groups)
        # The callback that autograd holds until the end of this backward.
        self._end_callback: weakref.ref[Any] | None = None
        # Units in backward, in the order in which backward reached them.
        self._in_backward: list[Unit] = []
        # Units whose gradients are being reduced: the last one's are on the wire, which is waited for before the next
        # unit's are sent; those of one before it are being summed, or averaged over replicas.
        self._reducing: list[Unit] = []

        take_over(self.index)
        claim(self.index, self, _AVERAGES, sharded=_SHARDED)
        _alive[:] = [model for model in _alive if model() is not None]
        _alive.append(ref(self))

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the sharded module does not exist any more"
        return module

    def units_of(self, module: nn.Module, *, recurse: bool = True) -> list[Unit]:
        """Returns the units that hold parameters of the module; without `recurse` only the module's own unit."""
        if not recurse:
            return [unit for unit in self.units if unit.exists and unit.module is module]
        params = {*parameters_of(module)}
        return [unit for unit in self.units if not params.isdisjoint(unit.params)]

    def refuse_replaced(self) -> None:
        """Raises RuntimeError if a module holds another sharded parameter than when it was wrapped."""
        for held, name, param in self._holders:
            now = held.get(name)
            if now is None or now is param:
                continue
            other = next((model.index[now] for model in models() if now in model.index), None)
            if other is not None:
                raise RuntimeError(
                    f"{self.index[param].name!r} was replaced by the sharded {other.name!r} since the model was "
                    "wrapped, but units gather what they were built with. Tie parameters first, then wrap the model."
                )

    def finish_steps(self) -> None:
        """Restores what steps have hidden that have raised."""
        for restore, optimizer in reversed([*self.unfinished_steps]):
            if (stepped := optimizer()) is not None:
                restore(stepped)

    def refuse_moved(self) -> None:
        """Collective where it raises: RuntimeError if parameters were moved, cast or given other data. Before, restores
        what steps have hidden that have raised: the caller binds parameters anew, or gathers what they wrote."""
        self.finish_steps()
        try:
            refuse_moved(group for group in self.index.groups if group.state is not GroupState.SUMMONED)
        except RuntimeError as error:  # not a section, which costs two calls in each forward
            self.together.tell(error)
            raise

    def refuse_unreduced(self) -> None:
        """Collective where it raises: RuntimeError if no_sync has left full gradients, of which no rank has the
        average."""
        names = (bucket.name_of_unreduced(self.index) for unit in self.units for bucket in unit.buckets)
        for name in filter(None, names):
            with self.together:
                raise RuntimeError(
                    f"{name} has a gradient that was not averaged: the last backward ran under no_sync(). Run the "
                    "last backward of a step outside it."
                )

    def end(self) -> None:
        """Ends the model: its modules are called as if they were not sharded."""
        _alive[:] = [model for model in _alive if model() is not self]
        self.remove_hooks()
        release(self.index, self)
        self._shown.remove()

    # ------------------------------------------------------------------------------------------------ a forward

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
        self._on_params = self._watch_params()
        inside: set[nn.Module] = set()
        for unit in reversed(self.index.units):  # so that a unit around another is entered first
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
        root = self.index.root
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
            self.together.tell(error)
            raise

    def remove_hooks(self, modules: Iterable[nn.Module] | None = None) -> None:
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
        if self.index.running and not self.runs_backward:
            self.index.running.clear()
            self._order.forget()
            for unit in self.index.units:
                unit.forget_forward()
                unit.release()

    def _pre_forward(
        self, unit: Unit, own: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Begins a forward of the unit: expects a backward, and registers hooks on inputs for the end of that backward.
        Returns the inputs in the dtype of computing. own: whether this is the unit's own module, not one inside it."""
        if self.runs_backward and not in_a_backward():  # an exception has ended it
            self.index.running.clear()
            self._order.forget()
            self.abandon()
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
            self._enter_forward(unit, training=module.training)
        if not again:
            self._forwards_begun += 1
            unit.running.append(Call(self._forwards_begun))
        if unit.precision.param_dtype is not None:
            args, kwargs = unit.precision.cast_inputs(module, (args, kwargs), root=unit is self.index.root)
        if not again and unit is not self.index.root and torch.is_grad_enabled():
            call = unit.running[-1]
            if not self.runs_backward:
                self._graph.append((unit, call))
            elif not unit.calls:  # else a checkpoint computes an expected call again
                unit.calls.add(call)
            call.has_exit_hook = watch_inputs(unit, args, kwargs, partial(self.post_backward, unit, call))
        return args, kwargs

    def _before_encoder(self, module: nn.TransformerEncoder, _: Any) -> None:
        """Collective. Before it calls its first layer, torch's encoder looks at that one's parameters: whether it skips
        padding depends on their class."""
        first = module.layers[0]
        if not first.training:  # else it never does
            for unit in self.index.units_of(param for param in parameters_of(first) if param in self.index):
                if not unit.readable:
                    self.unshard(unit)
                    unit.needed_by.add(Need.AHEAD)
                    self._order.ahead.add(unit)

    def _enter_forward(self, unit: Unit, *, training: bool) -> None:
        """Collective. Unshards the unit, and what must be with it. training: whether its module is in training."""
        in_backward = self.runs_backward
        if not self.index.running:  # the forward of the model begins, or that of one unit by itself
            if torch.compiler.is_exporting():
                raise RuntimeError(NOT_EXPORTED)
            if saves_copies():
                raise RuntimeError(
                    "a forward of FSDP runs within torch.autograd.graph.allow_mutation_on_saved_tensors(), which "
                    "copies what a graph has saved when it is written, as FSDP writes parameters. Leave it out, or "
                    "take stage 2."
                )
            self.index.thread = get_ident()
            if not in_backward:
                self._graph = Graph(reduces=self.reduces)
                for streams in self._streams:
                    streams.begin()
                for comm in self.comms:
                    comm.log.begin_schedule(together=comm is self.comms[0])  # among the first all forwards gather
        for streams in self._streams:
            streams.expect_computing("{} of FSDP runs", unit.title)
        # A forward of the model begins, not another method or one within a backward.
        begins = unit is self.index.root and unit.entry_module is None and not in_backward
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
        for each in (unit, *self.index.read_too[unit]):
            if each is not unit and not in_backward:
                refuse_read(each)
            self.unshard(each)
            each.needed_by.add(unit)
        self.index.running.append(unit)
        if not in_backward:
            self._order.enter(unit)

    def _post_forward(self, unit: Unit, own: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if Need.BACKWARD in unit.needed_by or not unit.running:
            return None
        trains = torch.is_grad_enabled()
        if not own and module is not unit.entry_module:
            if trains:
                reached = partial(self.reached, unit, unit.running[-1], self._graph, inside=True)
                watch_inside(output, reached)
            return None
        unit.entry_module = None if module is unit.entry_module else unit.entry_module
        call = unit.running.pop()
        call.ended = self._forwards_begun
        on_entry = partial(self.reached, unit, call, self._graph) if trains else None
        output, needs_backward = watch_outputs((unit, *self.index.read_too[unit]), output, on_entry)
        if not unit.running:
            self._kept[unit].refuse()
            # Backward will reach this unit first, as it did last time, and would gather it ahead.
            first_in_backward = self._order.in_flight == 3 and unit is self._order.first_in_backward
            stays = needs_backward and (unit is self.index.root or not unit.reshard_after_forward or first_in_backward)
            unit.inputs.clear()
            if unit in self.index.running:
                self.index.running.remove(unit)
            if unit is self.index.root:
                self._order.leave_root()
            for each in (unit, *self.index.read_too[unit]):
                if stays:  # before `release`, which reshards what nobody needs
                    each.needed_by.add(Need.KEPT)
                else:
                    each.needed_by.discard(Need.KEPT)
                each.release(unit)
            if not self.index.running:
                for streams in self._streams:
                    streams.synchronize()  # the user may write into shards from here on
        return output

    # ------------------------------------------------------------------------------ hooks of a backward

    def reached(self, unit: Unit, call: Call, graph: Graph, edges: Edges, _: Any, *, inside: bool = False) -> None:
        """The hook on the unit's outputs: unshards it before backward computes gradients of a call. edges: see
        `watch_outputs`. inside: on outputs of modules inside the unit's.

        Raises RuntimeError for create_graph=True.
        """
        if (Need.BACKWARD in unit.needed_by and call in unit.calls) or (inside and unit.running):
            return  # in its forward a gradient is taken, such as forces from an energy, and it is unsharded
        try:  # not a context, which costs two calls in each hook
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"a gradient was asked for with create_graph=True through {unit.title} of FSDP, whose "
                    "parameters are released by then. Take such gradients at stage 2 (ShardedDDP) or below."
                )
            self._begin_backward(edges)
            expected = [(unit, call)]  # once more if a backward within the forward has passed it
            if graph not in self._graphs:
                self._graphs.add(graph)
                self._end.forwards.append(graph.reduces)
                expected += graph
            for caller, of_graph in expected:
                for each in (caller, *self.index.read_too[caller]):  # none is left until backward has passed the call
                    each.calls.add(of_graph)
            # Backward has passed units that began to compute after this call had ended.
            for each in self._in_backward[::-1]:
                if each is not self.index.root and each.calls and all(one.begun > call.ended for one in each.calls):
                    self._reduce_unit(each)
            entered = [each for each in (unit, *self.index.read_too[unit]) if Need.BACKWARD not in each.needed_by]
            for each in entered:
                self._enter_backward(each)
            if not call.has_exit_hook:  # a re-entrant checkpoint runs a backward of its own, with an end of its own
                at_end_of_backward(partial(self.post_backward, unit, call))
            if entered and self._order.in_flight == 3:
                self._order.launch_before(unit)
        except Exception as error:
            self.together.tell(error)
            raise

    def _watch_params(self) -> list[RemovableHandle]:
        """Registers hooks on parameters, whose gradients may come before backward reaches an output of the unit, or
        after it has passed the unit. Others tell when backward is half through a unit."""
        handles = [
            watch_param(param, Model.param_reached, self, unit)
            for unit in self.index.units
            for param in unit.params
            # `watch_param` has each require a gradient for a moment, which torch refuses for integers.
            if param.is_floating_point() or param.is_complex()
        ]
        for unit in self.index.units[1:] if self._order.in_flight == 2 else ():
            param = half_way(unit)
            # By threads, those of Gloo, while the host computes.
            travels = not unit.overlaps and not any(group.comm.reads_memory(group.full.device) for group in unit.groups)
            if travels and param is not None and param.is_floating_point():
                handles.append(watch_param(param, Model.half_way, self, unit))
        return handles

    def half_way(self, unit: Unit) -> None:
        """Collective. Has the all-gather of the next unit travel while the second half of this one is computed."""
        if unit in self._in_backward and not torch.is_grad_enabled():
            with self.together:
                # The reduction of the last unit, which the first half has covered: both together take more memory.
                self._free_wire()
                self._order.launch_before(unit)

    def param_reached(self, unit: Unit) -> None:
        """A gradient of the unit is about to be written: enters its backward, unless that is running, until the end.

        Raises RuntimeError where only some gradients are written, which nobody would average."""
        if self.runs_backward and not self._writes and not torch.is_grad_enabled():
            leaves = (get_gradient_edge(param).node for param in unit.params if param.requires_grad)
            with self.together:
                if any(map(writes_into, leaves)):
                    raise RuntimeError(
                        f"backward(inputs=...) asks for gradients of some parameters of {unit.title} of FSDP alone, "
                        "which would not be averaged over the ranks. Leave `inputs` out, and drop the others "
                        "(param.grad = None), or take stage 2."
                    )
        if Need.BACKWARD not in unit.needed_by and not torch.is_grad_enabled():
            with self.together:
                self._begin_backward()
                self._enter_backward(unit)

    def post_backward(self, unit: Unit, call: Call, *_: Any) -> None:
        """The hook on the unit's inputs: backward has passed the call. Completes units of which it was the last."""
        for each in (unit, *self.index.read_too[unit]):
            if Need.BACKWARD in each.needed_by and call in each.calls:
                each.calls.discard(call)
                if not each.calls:
                    try:
                        self._reduce_unit(each)
                    except Exception as error:
                        self.together.tell(error)
                        raise

    # ---------------------------------------------------------------------------------------------- a backward

    def _begin_backward(self, edges: Edges = ()) -> None:
        """Collective where parameters were frozen or unfrozen since the last backward. Raises RuntimeError on every
        rank unless all ranks train the same. edges: into the graph; torch.autograd.grad writes into no leaf of it."""
        # An error has ended the last one, if autograd has dropped its callback without calling it.
        if self.runs_backward and self._end_callback is not None and self._end_callback() is None:
            self.abandon()
        if self.runs_backward:
            return
        leaf = nearest_leaf(edges)
        self.runs_backward, self._writes = True, leaf is None or writes_into(leaf)
        self._end.forwards.clear()
        for streams in self._streams:
            streams.begin()
        buckets = [bucket for unit in self.index.units for bucket in unit.buckets]
        # A list: `any` of a generator would stop at the first change, and the other buckets would not notice theirs.
        changed = [bucket.notice_trained() for bucket in buckets]
        if any(changed):
            trained = [bucket.group.names[index] for bucket in buckets for index in bucket.trained]
            try:
                for comm, channel in self._trained:
                    comm.compare("the parameters that are trained", trained, channel=channel)
            except (RuntimeError, ValueError) as error:
                raise RuntimeError(
                    "which parameters require gradients has changed on this rank, but not on all alike; trained are "
                    f"now {', '.join(trained)}. Freeze and unfreeze parameters on every rank. {error}"
                ) from error
        for bucket in buckets:
            bucket.refuse_lost()
        # In a variable: each `self._finish` is a new object, and the reference to it would be dead at once.
        finish = self._finish
        self._end_callback = weakref.ref(finish, self._callback_dropped)
        at_end_of_backward(finish)

    def unshard(self, unit: Unit) -> None:
        """Collective. Unshards a unit that is needed now."""
        if unit in self._reducing:  # a backward has passed it; its gradients come while it is sharded
            self._finish_reductions()
        unit.unshard(for_backward=self.runs_backward)

    def unshard_to_read(self, unit: Unit) -> None:
        """Collective within a backward. Unshards a unit whose parameters are read while a checkpoint computes a forward
        again, or by a hook, until the backward ends."""
        self._begin_backward()
        self.unshard(unit)
        unit.needed_by.add(Need.KEPT)

    def _enter_backward(self, unit: Unit) -> None:
        for streams in self._streams:
            streams.expect_computing("{} of FSDP runs", unit.title)
        if unit.summoned:
            raise RuntimeError(
                f"a backward reaches {unit.title} of FSDP within summon_full_params(), where what its forward has "
                "saved is freed. Call backward() outside of it."
            )
        self.unshard(unit)
        unit.needed_by.add(Need.BACKWARD)
        for bucket in unit.buckets if self._writes else ():
            bucket.enter_backward(reduces=self.reduces)
        self._in_backward.append(unit)

    @property
    def _sends(self) -> bool:
        """Whether the running backward reduces gradients."""
        return self.reduces and self._writes

    def _reduce_unit(self, unit: Unit, *, at_end: bool = False) -> None:
        """Collective. Reshards the unit, launches the next all-gather, which is needed first, and then the reduction;
        under no_sync leaves the gradients where they are."""
        self._in_backward.remove(unit)
        for bucket in unit.buckets if self._sends else ():
            bucket.take_written()
        # Before waiting: an all-gather into its memory need not wait for the reduction.
        unit.leave_backward()
        if self._sends:
            self._free_wire()
        elif self._writes:
            self._left_unreduced = True
            for bucket in unit.buckets:
                bucket.keep_unreduced()
        if self._order.in_flight == 2 and not at_end:
            self._order.launch_before(unit)
        if self._sends:
            self._launch_reduction(unit)

    def _free_wire(self) -> None:
        """Waits for the reduction in flight, not for sums and averages: a second message would be as large as a unit.
        What is sent next need not wait for these."""
        last = self._reducing[-1:]
        left = [bucket.wait_for_sent() for unit in last for bucket in unit.buckets]
        self._finish_reductions(but=last if any(left) else ())

    def _launch_reduction(self, unit: Unit) -> None:
        """Collective. Reduces the gradients that the unit's buckets have taken."""
        for bucket in unit.buckets:
            if bucket.trained:
                bucket.launch()
        self._reducing.append(unit)
        if self._order.in_flight == 1:
            self._finish_reductions()
        elif not self.placement.replicas is not None:  # averages over these go on beside the computing
            self._finish_reductions(but=[unit])

    def _finish_reductions(self, but: Sequence[Unit] = ()) -> None:
        """Waits until gradients are reduced, all but those of some units."""
        reduced, self._reducing = [unit for unit in self._reducing if unit not in but], [*but]
        if reduced:
            with as_plain_tensors():
                for unit in reduced:
                    for bucket in unit.buckets:
                        bucket.finish()

    def _finish(self) -> None:
        """The end of the backward. Reduces what is left, waits for it, shows gradients once all ranks are known to have
        done the same, and gives a forward around this backward its units back."""
        with self._end.together:
            within = bool(self.index.running)  # a forward, such as for forces from an energy
            for unit in reversed(self.index.units):
                # Backward did not reach it here, but may have on other ranks, which reduce it.
                missed = unit.calls and not within and (unit.unsharded or unit.gathering)
                if missed and Need.BACKWARD not in unit.needed_by:
                    self._enter_backward(unit)
                if Need.BACKWARD in unit.needed_by:
                    self._reduce_unit(unit, at_end=True)
                elif (
                    not within
                    and self._sends
                    and self._left_unreduced
                    and any(bucket.left_unreduced for bucket in unit.buckets)
                ):
                    for bucket in unit.buckets:
                        bucket.enter_backward(reduces=True)
                        bucket.take_written()
                    self._free_wire()
                    self._launch_reduction(unit)
            self._finish_reductions()
            if not within:
                for unit in self.index.units:
                    unit.leave_backward()  # before gradients of what this rank has not used, which are the shards'
            with as_plain_tensors():
                buckets = [bucket for unit in self.index.units for bucket in unit.buckets]
                self._end.synchronize(buckets, reduces=self.reduces)
                # The user reads gradients once backward() has returned; copies to the CPU may still be on their way.
                for group in self.index.groups:
                    group.synchronize()
                self.runs_backward = False
                self._graphs.clear()
                torch.clear_autocast_cache()  # of parameters that a step changes next, and of a graph that was freed
                self._left_unreduced = self._left_unreduced and (within or not self._sends)
            if within:  # that forward reads units that were resharded with their gradients
                for unit in self.index.units:
                    if unit not in self._order.ahead:  # gathered for this backward, which did not come to it
                        unit.release(Need.AHEAD)
                    if unit.needed_by:
                        unit.unshard()

    def _callback_dropped(self, _: Any) -> None:
        """Autograd has dropped its callback, which it does after an exception, without calling it. Later `abandon` does
        everything that waits for other ranks."""
        if self.runs_backward and self._in_callers_thread:
            # Gradients from before are there again at once, so that zero_grad clears them.
            self._in_backward.clear()
            for unit in self.index.units:
                unit.interrupt()

    def abandon(self) -> None:
        """Forgets a backward that an exception has ended, so that the model can be used again."""
        # On a GPU gradients from before are restored here, unless all were cleared meanwhile.
        if self.runs_backward and not self._in_callers_thread and all(param.grad is None for param in self.index):
            for unit in self.index.units:
                for bucket in unit.buckets:
                    bucket.set_aside.clear()  # the user has cleared what there was
                    bucket.took = False
        self._reducing.clear()
        self.runs_backward = False
        self._graphs.clear()
        self._in_backward.clear()
        for unit in self.index.units:
            unit.abandon()


def models() -> list[Model]:
    """Returns all models that exist, in the same order on every rank."""
    return [model for reference in _alive if (model := reference()) is not None]


def models_of(module: nn.Module) -> list[tuple[Model, list[Unit]]]:
    """Returns each model with its units that hold parameters of the module, if it has any."""
    pairs = [(model, model.units_of(module)) for model in models()]
    return [(model, units) for model, units in pairs if units]


def sharded_params() -> set[nn.Parameter]:
    """Returns the parameters of all models that exist."""
    return {param for model in models() for param in model.index}
