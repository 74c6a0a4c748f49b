"""Hooks on the inputs and outputs of a unit's forward, which notice where backward enters and leaves the unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from zero._torch import base_of
from zero.fsdp.unit import Unit
from zero.sdp.tensors import map_tensors, tensors_in


def watch_inputs(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], on_exit: Callable[[Tensor], None]) -> bool:
    """Calls `on_exit` when backward reaches the gradient of an input that is no leaf. Returns whether there is one.

    Of the nodes that are ready, autograd runs the one created last, so by then it has run every node of the unit.
    Leaves do not show this: they accumulate gradients as soon as these are computed.

    Inputs are passed as they are, not as views. With a view, autograd would sum the gradients in another order than
    without FSDP, and a module that compares the identity of its inputs (nn.MultiheadAttention) would compute something
    else.
    """
    inner = [tensor for tensor in dict.fromkeys(tensors_in((args, kwargs))) if tensor.grad_fn is not None]
    for tensor in inner:
        unit.inputs.update(_nodes(tensor))
        tensor.register_hook(on_exit)
    return bool(inner)


def watch_outputs(unit: Unit, output: Any, on_entry: Callable[[Any], None]) -> bool:
    """Calls `on_entry` when backward enters the unit through an output. Returns whether it can.

    The hooks are on nodes: hooks on a tensor are also called if only its own gradient is asked for, which the next
    unit may do with its input.
    """
    nodes = {node for tensor in tensors_in(output) for node in _nodes(tensor)} - unit.inputs
    for node in nodes:
        node.register_prehook(on_entry)
    return bool(nodes)


def watch_inside(output: Any, on_entry: Callable[[Any], None]) -> None:
    """Calls `on_entry` when backward enters through an output of a module inside a unit.

    A loss may use such outputs: stored hidden states, or features that hooks collect.
    """
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(on_entry)


def _nodes(tensor: Tensor) -> Iterator[Node]:
    """Yields the nodes of the tensor and of its base, through which backward goes if the view is written into."""
    for each in (tensor, base_of(tensor)):
        if each is not None and each.grad_fn is not None:
            yield each.grad_fn


def apart_from_parameters(units: Sequence[Unit], output: Any) -> Any:
    """Returns the output with copies of parameters of the units and of views of them, which are freed after forward."""

    def shares_memory(tensor: Tensor) -> bool:
        base = base_of(tensor)
        if base is None and tensor.grad_fn is not None:
            return False
        base = tensor if base is None else base
        return any(base in unit.params for unit in units)

    if any(shares_memory(tensor) for tensor in tensors_in(output)):
        return map_tensors(lambda tensor: tensor.clone() if shares_memory(tensor) else tensor, output)
    return output
