"""Orders the unsharding of units and the reduction of their gradients in a backward.

backward of a unit    unshard, compute, reshard, wait for the gradients of the unit before, launch its own reduction
end of backward       complete the remaining units, wait for all reductions, compare the logs of the ranks

A unit that backward reaches again, through another forward's graph, waits for its reduction, and reduces once more.

Autograd adds up what all uses of a parameter give before it writes `param.grad`, once a backward. So the calls of a
unit that one forward has made, which its graph knows, are waited for. A gradient that comes later, through the graph of
another forward or the forward of another unit, enters the unit again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zero._torch.autograd import at_end_of_backward, base_of, shape_expected_by
from zero._torch.modules import buffers_of
from zero._torch.tensors import as_plain_tensors, shares_memory
from zero.comm import Comm
from zero.comm.streams import HostStreams
from zero.comm.together import Together
from zero.fsdp.unit import Call, Index, Need, Unit
from zero.shards.shard_group import ShardGroup
from zero.shards.sharded_parameter import Lent
from zero.wrap.bucket import EndOfBackward
from zero.wrap.tensors import map_tensors, tensors_in

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


def watch_outputs(units: Sequence[Unit], output: Any, on_entry: Callable[[Any], None] | None) -> tuple[Any, bool]:
    """Returns the output, with copies of what lies in the memory of the units, which is freed after forward. Calls
    `on_entry`, unless None, when backward enters through it; also returns whether it can.

    units: the one whose forward ends, and those that were unsharded with it.
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
        node.register_prehook(on_entry)
    return output, bool(nodes)


def watch_inside(output: Any, on_entry: Callable[[Any], None]) -> None:
    """Calls `on_entry` when backward enters through an output of a module inside a unit."""
    # A loss may use such outputs: stored hidden states, or features that hooks collect.
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(on_entry)


def watch_param(param: nn.Parameter, method: Callable[[Any, Unit], None], of: object, unit: Unit) -> RemovableHandle:
    """Calls method(of, unit) before the gradient of a parameter is accumulated, also of one that is frozen now, for
    which torch refuses a hook. The hook keeps neither: units keep their parameters, and these their hooks."""
    trained = param.requires_grad
    handle: RemovableHandle = param.requires_grad_(True).register_hook(partial(_call, method, ref(of), ref(unit)))
    param.requires_grad_(trained)
    return handle


def _call(method: Callable[[Any, Unit], None], of: ref[Any], unit: ref[Unit], _: Any) -> None:
    owner, reached = of(), unit()
    if owner is not None and reached is not None:
        method(owner, reached)


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


# ---------------------------------------------------------------------------------------------------- what is in flight
#
# How many units are in flight at once, and so how far ahead they are gathered. The root unit, which stays unsharded
# from forward to backward, does not count.
#
#     1   one at a time: nothing is gathered ahead, and gradients are reduced before the next unit is gathered
#     2   while a unit computes, the next unit's all-gather or the last unit's reduction is in flight: in backward the
#         reduction in the first half of a unit, and the all-gather in the second; where transfers overlap computing,
# the
#         next unit is gathered after the gradients of the current one are computed
#     3   both are: the next unit is gathered before the current one computes, in forward and in backward
#
# For a unit in flight a rank holds the full parameters (B bytes) and the full gradients (B), or, during their
# reduction, the gradients and the receive buffers (2 B): never more than 2 B. So besides shards a step takes at most 2
# B times the number. Where transfers overlap computing, the receive buffers take B / W (B if gradients are sent in 16
# bits; W ranks), and a step takes at most 4 B + B / W: parameters and gradients of the unit that computes, parameters
# of the next unit, gradients and receive buffers of the last.
#
# `Order` says which all-gathers run ahead, `Reductions` has those of gradients that are still running.


class Order:
    """Which unit follows which in forward, as units ran last, and which ones were gathered ahead by that. The root,
    which computes around all others, follows none.

    in_flight: how many units are in flight. overlaps: whether transfers overlap computing.
    `before`: by unit the one that ran before it; by the root the one that backward reaches first.
    """

    def __init__(self, index: Index, in_flight: int, *, overlaps: bool) -> None:
        self.in_flight = in_flight
        self._index, self._root = index, index.root
        self._ahead_in_forward = in_flight == 3 or (in_flight == 2 and overlaps)
        self._after: dict[Unit, Unit] = {}
        self.before: dict[Unit, Unit] = {}
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

    def gather(self, unit: Unit, *, for_backward: bool) -> None:
        """Collective. Gathers a unit that is about to begin its forward, and whose parameters are looked at before."""
        unit.unshard(for_backward=for_backward)
        unit.needed_by.add(Need.AHEAD)
        self.ahead.add(unit)

    def leave_root(self) -> None:
        """The forward of the model ends: backward begins with the unit that ran last."""
        # If no other unit has run, backward has no first unit; the one of the forward before must not stay.
        self.before.pop(self._root, None)
        if self._last_entered is not self._root:
            self.before[self._root] = self._last_entered
        while self.ahead:
            self.ahead.pop().release(Need.AHEAD)  # it did not run this time

    def launch_before(self, unit: Unit) -> None:
        """Launches the all-gather of the unit that backward is expected to reach after this one, unless it is in
        backward."""
        following = self.before.get(unit)
        if following is not None and following.calls and Need.BACKWARD not in following.needed_by:
            following.unshard(for_backward=True, ahead=True)
            following.needed_by.add(Need.AHEAD)

    def forget(self) -> None:
        """An error has ended the forward."""
        self.ahead.clear()


class Reductions:
    """Units whose gradients are being reduced: the last one's are on the wire, which is waited for before the next
    unit's are sent; those of one before it are being summed, or averaged over replicas.

    to_replicas: whether gradients are averaged over replicas after they are reduced.
    """

    def __init__(self, in_flight: int, *, to_replicas: bool) -> None:
        self._in_flight, self._to_replicas = in_flight, to_replicas
        self._units: list[Unit] = []

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._units

    def free_wire(self) -> None:
        """Waits for the reduction in flight, not for sums and averages: a second message would be as large as a unit.
        What is sent next need not wait for these."""
        last = self._units[-1:]
        left = [bucket.wait_for_sent() for unit in last for bucket in unit.buckets]
        self.finish(but=last if any(left) else ())

    def launch(self, unit: Unit) -> None:
        """Collective. Reduces the gradients that the unit's buckets have taken."""
        for bucket in unit.buckets:
            if bucket.trained:
                bucket.launch()
        self._units.append(unit)
        if self._in_flight == 1:
            self.finish()
        elif not self._to_replicas:  # averages over replicas go on beside the computing
            self.finish(but=[unit])

    def finish(self, but: Sequence[Unit] = ()) -> None:
        """Waits until gradients are reduced, all but those of some units."""
        reduced, self._units = [unit for unit in self._units if unit not in but], [*but]
        if reduced:
            with as_plain_tensors():
                for unit in reduced:
                    for bucket in unit.buckets:
                        bucket.finish()

    def clear(self) -> None:
        """An error has ended the backward."""
        self._units.clear()


# --------------------------------------------------------------------------------------------------------- the backward


class Graph(list[tuple[Unit, Call]]):
    """The calls of one forward of the model, which a backward through its graph passes. Hooks on the graph keep it.

    reduces: whether gradients were to be reduced then, or accumulated under no_sync."""

    def __init__(self, *, reduces: bool = True) -> None:
        super().__init__()
        self.reduces = reduces

    # As objects: two graphs may have equal calls.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class Backward:
    """The backward of one model.

    `reduces`: whether gradients are reduced; False under no_sync.
    `active`: whether a backward is running.
    """

    def __init__(
        self,
        index: Index,
        comms: Sequence[Comm],
        streams: Sequence[HostStreams],
        together: Together,
        order: Order,
    ) -> None:
        self.reduces = True
        self.active = False
        # The graphs that the running backward has come to.
        self._graphs: set[Graph] = set()
        # Whether backward has left gradients of a unit unreduced since the last one that reduced.
        self._left_unreduced = False
        self._index, self._streams, self._together, self._order = index, streams, together, order
        self._end = EndOfBackward(comms, "the end of a backward of FSDP")
        name = "a comparison of which parameters are trained, as that has changed there"
        remedy = "Freeze and unfreeze parameters on every rank."
        self._trained = [(comm, comm.channel(name, remedy)) for comm in comms]
        # Whether autograd computes in the thread that calls it. On a GPU it does in one of its own, which may end only
        # after that thread has cleared gradients.
        self._in_callers_thread = all(group.full.device.type == "cpu" for group in index.groups)
        # The callback that autograd holds until the end of this backward.
        self._end_callback: weakref.ref[Any] | None = None
        # Units in backward, in the order in which backward reached them.
        self._in_backward: list[Unit] = []
        self._reductions = Reductions(order.in_flight, to_replicas=len(comms) > 1)

    def reached_inside(self, unit: Unit, call: Call, graph: Graph, _: Any) -> None:
        """The hook on outputs of modules inside the unit's."""
        if not unit.running:  # else its forward takes a gradient, such as forces from an energy, and it is unsharded
            self.reached(unit, call, graph, _)

    def reached(self, unit: Unit, call: Call, graph: Graph, _: Any) -> None:
        """The hook on the unit's outputs: unshards it before backward computes gradients of a call.

        Raises RuntimeError for create_graph=True.
        """
        if Need.BACKWARD in unit.needed_by and call in unit.calls:
            return
        try:  # not a context, which costs two calls in each hook
            self._reached(unit, call, graph)
        except Exception as error:
            self._together.tell(error)
            raise

    def _reached(self, unit: Unit, call: Call, graph: Graph) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a gradient was asked for with create_graph=True through {unit.title} of FSDP, whose "
                "parameters are released by then. Take such gradients at stage 2 (ShardedDDP) or below."
            )
        self._begin()
        if graph not in self._graphs:
            self._graphs.add(graph)
            self._end.forwards.append(graph.reduces)
            for caller, of_graph in graph:
                self._expect(caller, of_graph)
        self._expect(unit, call)  # once more if a backward within the forward has passed it
        # Backward has passed units that began to compute after this call had ended.
        for each in self._in_backward[::-1]:
            if each is not self._index.root and each.calls and all(other.begun > call.ended for other in each.calls):
                self._reduce_unit(each)
        entered = [each for each in (unit, *self._index.reads[unit]) if Need.BACKWARD not in each.needed_by]
        for each in entered:
            self._enter(each)
        if not call.has_exit_hook:  # a re-entrant checkpoint runs a backward of its own, with an end of its own
            at_end_of_backward(partial(self.post_backward, unit, call))
        if entered and self._order.in_flight == 3:
            self._order.launch_before(unit)

    def _expect(self, unit: Unit, call: Call) -> None:
        """Until backward has passed the call, the unit is not left, nor are those whose parameters it reads."""
        for each in (unit, *self._index.reads[unit]):
            each.calls.add(call)

    def watch_params(self) -> list[RemovableHandle]:
        """Registers hooks on parameters, whose gradients may come before backward reaches an output of the unit, or
        after it has passed the unit. Others tell when backward is half through a unit."""
        handles = [
            watch_param(param, Backward.param_reached, self, unit)
            for unit in self._index.units
            for param in unit.params
            # `watch_param` has each require a gradient for a moment, which torch refuses for integers.
            if param.is_floating_point() or param.is_complex()
        ]
        for unit in self._index.units[1:] if self._order.in_flight == 2 else ():
            param = half_way(unit)
            # By threads, those of Gloo, while the host computes.
            travels = not unit.overlaps and not any(group.comm.reads(group.full.device) for group in unit.groups)
            if travels and param is not None and param.is_floating_point():
                handles.append(watch_param(param, Backward.half_way, self, unit))
        return handles

    def half_way(self, unit: Unit) -> None:
        """Collective. Has the all-gather of the next unit travel while the second half of this one is computed."""
        if unit in self._in_backward and not torch.is_grad_enabled():
            with self._together:
                # The reduction of the last unit, which the first half has covered: both together take more memory.
                self._reductions.free_wire()
                self._order.launch_before(unit)

    def param_reached(self, unit: Unit) -> None:
        """A gradient of the unit is about to be written: enters its backward, unless that is running, until the end."""
        if Need.BACKWARD not in unit.needed_by and not torch.is_grad_enabled():
            with self._together:
                self._begin()
                self._enter(unit)

    def post_backward(self, unit: Unit, call: Call, *_: Any) -> None:
        """The hook on the unit's inputs: backward has passed the call. Completes units of which it was the last."""
        for each in (unit, *self._index.reads[unit]):
            if Need.BACKWARD in each.needed_by and call in each.calls:
                each.calls.discard(call)
                if not each.calls:
                    try:
                        self._reduce_unit(each)
                    except Exception as error:
                        self._together.tell(error)
                        raise

    def _begin(self) -> None:
        # An error has ended the last one, if autograd has dropped its callback without calling it.
        if self.active and self._end_callback is not None and self._end_callback() is None:
            self.abandon()
        if not self.active:
            self.active = True
            self._end.forwards.clear()
            for streams in self._streams:
                streams.begin()
            self._compare_trained()
            # In a variable: each `self._finish` is a new object, and the reference to it would be dead at once.
            finish = self._finish
            self._end_callback = weakref.ref(finish, self._callback_dropped)
            at_end_of_backward(finish)

    def _compare_trained(self) -> None:
        """Collective where parameters were frozen or unfrozen since the last backward. Raises RuntimeError on every
        rank unless all ranks train the same."""
        buckets = [bucket for unit in self._index.units for bucket in unit.buckets]
        # A list: `any` of a generator would stop at the first change, and the other buckets would not notice theirs.
        changed = [bucket.notice_trained() for bucket in buckets]
        if not any(changed):
            return
        trained = [bucket.group.names[index] for bucket in buckets for index in bucket.trained]
        try:
            for comm, channel in self._trained:
                comm.compare("the parameters that are trained", trained, channel=channel)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                "which parameters require gradients has changed on this rank, but not on all alike; trained are now "
                f"{', '.join(trained)}. Freeze and unfreeze parameters on every rank. {error}"
            ) from error

    def unshard_to_read(self, unit: Unit) -> None:
        """Collective within a backward. Unshards a unit whose parameters are read while a checkpoint computes a forward
        again, or by a hook, until the backward ends."""
        self._begin()
        if unit in self._reductions:  # its gradients come while it is sharded
            self._reductions.finish()
        unit.unshard(for_backward=True)
        unit.needed_by.add(Need.KEPT)

    def _enter(self, unit: Unit) -> None:
        for streams in self._streams:
            streams.expect_computing("{} of FSDP runs", unit.title)
        if unit in self._reductions:  # backward has reached it again; its gradients come while it is sharded
            self._reductions.finish()
        unit.unshard(for_backward=True)
        unit.pre_backward()
        self._in_backward.append(unit)

    def _reduce_unit(self, unit: Unit, *, at_end: bool = False) -> None:
        """Collective. Reshards the unit, launches the next all-gather, which is needed first, and then the reduction;
        under no_sync leaves the gradients where they are."""
        self._in_backward.remove(unit)
        for bucket in unit.buckets if self.reduces else ():
            bucket.take_written()
        # Before waiting: an all-gather into its memory need not wait for the reduction.
        unit.post_backward()
        if self.reduces:
            self._reductions.free_wire()
        else:
            self._left_unreduced = True
            for bucket in unit.buckets:
                bucket.keep_unreduced()
        if self._order.in_flight == 2 and not at_end:
            self._order.launch_before(unit)
        if self.reduces:
            self._reductions.launch(unit)

    def _finish(self) -> None:
        with self._together:
            self._finish_together()

    def _finish_together(self) -> None:
        within = bool(self._index.running)  # a forward, such as for forces from an energy
        for unit in reversed(self._index.units):
            if unit.calls and Need.BACKWARD not in unit.needed_by and not within and (unit.unsharded or unit.gathering):
                self._enter(unit)  # backward did not reach it here, but may have on other ranks, which reduce it
            if Need.BACKWARD in unit.needed_by:
                self._reduce_unit(unit, at_end=True)
            elif self.reduces and self._left_unreduced and any(bucket.left_unreduced for bucket in unit.buckets):
                for bucket in unit.buckets:
                    bucket.pre_backward()
                    bucket.take_written()
                self._reductions.free_wire()
                self._reductions.launch(unit)
        self._reductions.finish()
        for unit in self._index.units if not within else ():
            unit.post_backward()  # before gradients of what this rank has not used, which are the shards'
        with as_plain_tensors():
            buckets = [bucket for unit in self._index.units for bucket in unit.buckets]
            self._end.reach(buckets, reduces=self.reduces)
            # The user reads gradients once backward() has returned; copies to the CPU may still be on their way.
            for group in self._index.groups:
                group.synchronize()
            self.active = False
            self._graphs.clear()
            torch.clear_autocast_cache()  # of parameters that a step changes next, and of a graph that was freed
            if self.reduces:
                self._left_unreduced = False
        # The forward around this backward goes on, and reads units that were resharded with their gradients.
        for unit in self._index.units if within else ():
            if unit not in self._order.ahead:  # gathered for this backward, which did not come to it
                unit.release(Need.AHEAD)
            if unit.needed_by:
                unit.unshard()

    def _callback_dropped(self, _: Any) -> None:
        """Autograd has dropped its callback, which it does after an exception, without calling it. Later `abandon` does
        everything that waits for other ranks."""
        if self.active and self._in_callers_thread:
            # Gradients from before are there again at once, so that zero_grad clears them.
            self._in_backward.clear()
            for unit in self._index.units:
                unit.interrupt()

    def abandon(self) -> None:
        """Forgets a backward that an exception has ended, so that the model can be used again."""
        # On a GPU gradients from before are restored here, unless all were cleared meanwhile.
        if self.active and not self._in_callers_thread and all(param.grad is None for param in self._index):
            for unit in self._index.units:
                for bucket in unit.buckets:
                    bucket.set_aside.clear()  # the user has cleared what there was
        self._reductions.clear()
        self.active = False
        self._graphs.clear()
        self._in_backward.clear()
        for unit in self._index.units:
            unit.abandon()
