"""Hooks on the inputs, outputs and parameters of a unit, which notice where backward enters the unit, is half through
it, and leaves it."""

from __future__ import annotations

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

from zero._torch.autograd import base_of, shape_expected_by
from zero._torch.modules import buffers_of
from zero._torch.tensors import shares_memory
from zero.fsdp.unit import Unit
from zero.shards.shard_group import ShardGroup
from zero.shards.sharded_parameter import Lent
from zero.wrap.tensors import map_tensors, tensors_in


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
