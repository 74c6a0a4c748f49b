"""Where a backward comes to a unit, and where it has left it: the tensors that go into forward and that come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from zero._torch import base_of
from zero.fsdp.unit import Unit
from zero.sdp.tensors import map_tensors, tensors_in


def watch_inputs(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[Tensor], None]) -> bool:
    """Has `left` called when a backward comes to what made one of the inputs. Returns whether there is any such input.

    Autograd runs what can run latest created first, so by then everything in the unit has been run. Leaves
    do not show that: they take their gradient as soon as it is there.

    Inputs go in as they are. Of a view made for the unit autograd would sum the gradients apart, in another order than
    without FSDP, and a module that asks whether two of its inputs are one tensor (nn.MultiheadAttention) would compute
    something else.
    """
    made = [tensor for tensor in dict.fromkeys(tensors_in((args, kwargs))) if tensor.grad_fn is not None]
    for tensor in made:
        unit.inputs.update(_nodes(tensor))
        tensor.register_hook(left)
    return bool(made)


def watch_outputs(unit: Unit, output: Any, come: Callable[[Any], None]) -> bool:
    """Has `come` called when a backward goes into the unit by one of the outputs. Returns whether any can have one.

    By nodes: hooks of a tensor are also called where a gradient is asked for it alone, as the next unit may do whose
    input it is.
    """
    nodes = {node for tensor in tensors_in(output) for node in _nodes(tensor)} - unit.inputs
    for node in nodes:
        node.register_prehook(come)
    return bool(nodes)


def watch_inside(output: Any, come: Callable[[Any], None]) -> None:
    """Has `come` called when a backward goes into what a module inside of a unit returned.

    Losses may be taken of it: hidden states that were put by, features that hooks collect.
    """
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(come)


def _nodes(tensor: Tensor) -> Iterator[Node]:
    """What made the tensor, and what it is a view of: if the view is written into, backward comes by that instead."""
    for one in (tensor, base_of(tensor)):
        if one is not None and one.grad_fn is not None:
            yield one.grad_fn


def apart_from_parameters(unit: Unit, output: Any) -> Any:
    """The output, with copies of what is a parameter of the unit or a view of one, which is freed when forward ends."""

    def lent(tensor: Tensor) -> bool:
        base = base_of(tensor)
        if base is None and tensor.grad_fn is not None:
            return False
        base = tensor if base is None else base
        return any(base in one.params for one in (unit, *unit.reads))

    if any(lent(tensor) for tensor in tensors_in(output)):
        return map_tensors(lambda tensor: tensor.clone() if lent(tensor) else tensor, output)
    return output
