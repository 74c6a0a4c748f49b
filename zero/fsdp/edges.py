"""Where a backward comes to a unit, and where it has left it: the tensors that go into forward and that come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from zero._torch import base_of
from zero.fsdp.unit import Unit
from zero.sdp.tensors import map_tensors, tensors_in


def watch_inputs(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], left: Callable[[Tensor], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Has `left` called when a gradient leaves through the first of the inputs. Returns what is to go in instead.

    That input is seen through a view, made before anything else in the unit. Autograd runs what can run latest created
    first, so when it comes to the view everything in the unit has been run. One view only: a tensor that several units
    read through views would have its gradient summed unit by unit, in another order than without.
    """
    viewed = False

    def watched(tensor: Tensor) -> Tensor:
        nonlocal viewed
        if not tensor.requires_grad:
            return tensor
        if not viewed:
            viewed = True
            tensor = tensor.view_as(tensor)
            tensor.register_hook(left)
        unit.inputs.append(tensor)
        return tensor

    return map_tensors(watched, args), map_tensors(watched, kwargs)


def watch_outputs(unit: Unit, output: Any, come: Callable[[Tensor], None]) -> bool:
    """Has `come` called when a gradient reaches one of the outputs. Returns whether any can have one."""
    found = False
    for tensor in tensors_in(output):
        if tensor.requires_grad and not any(tensor is one for one in unit.inputs):
            found = True
            for watched in _seen_by_autograd(unit, tensor):
                watched.register_hook(come)
    return found


def watch_inside(output: Any, come: Callable[[Tensor], None]) -> None:
    """Has `come` called when a gradient reaches what a module inside of a unit returned.

    Losses may be taken of it: hidden states that were put by, features that hooks collect.
    """
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(come)


def _seen_by_autograd(unit: Unit, tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and what it is a view of: if the view is written into, backward comes by that instead."""
    yield tensor
    base = base_of(tensor)
    if base is None or base.grad_fn is None:
        return
    if not any(base is one or base is base_of(one) for one in unit.inputs):
        yield base


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
