"""Long shards are stepped slice by slice, so that what an optimizer works with stays in the processor's cache.

On the CPU torch's optimizers take one operation after another over a full parameter, and hold results of its size in
between. Those that treat each element by itself compute the same of slices: Adam in three quarters of the CPU time (13M
elements in 33 ms instead of 43), and what it holds in between is of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch import has_values
from zero.measure.kinds import ELEMENTWISE

SLICE = 1 << 18
"""Elements. With half as many Adam took about as long (32 ms), with a quarter longer (38): then the calls cost more."""

_IN_THEIR_OWN_WAY = ("foreach", "fused", "capturable", "differentiable")
"""Options with which torch's optimizers do not take one parameter and operation after another."""


@contextmanager
def only(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[None]:
    """In here the optimizer has these parameters and no others."""
    given, chosen = [group["params"] for group in optimizer.param_groups], {*params}
    try:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param in chosen]
        yield
    finally:
        for group, everything in zip(optimizer.param_groups, given, strict=True):
            group["params"] = everything


def unhooked(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's step without the hooks on it, and without what schedulers note of it."""
    step: Callable[..., Any] = vars(type(optimizer).step)["__wrapped__"]
    return partial(step, optimizer)


def step_alone(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Steps these parameters and no others, past the hooks on the step, which are to see one step of all."""
    with only(optimizer, params):
        step_in_slices(optimizer, unhooked(optimizer))


def step_in_slices(optimizer: Optimizer, step: Callable[..., Any] | None = None, **options: Any) -> None:
    """Calls the optimizer's step with the options. Its groups and its state are of its own parameters afterwards.

    step: another than its own.
    """
    given = [group["params"] for group in optimizer.param_groups]
    cut: dict[Tensor, dict[str, Tensor]] = {}
    try:
        if type(optimizer) in ELEMENTWISE:
            for group, params in zip(optimizer.param_groups, given, strict=True):
                if not any(group.get(option) for option in _IN_THEIR_OWN_WAY):
                    group["params"] = []
                    for param in params:
                        slices = dict(_slices(param, optimizer.state.get(param)))
                        group["params"] += slices or [param]
                        cut.update(slices)
        optimizer.state.update(cut)
        (step or optimizer.step)(**options)
    finally:
        for group, params in zip(optimizer.param_groups, given, strict=True):
            group["params"] = params
        for one in cut:
            optimizer.state.pop(one, None)


def _slices(param: nn.Parameter, state: dict[str, Any] | None) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Slices of a parameter and its gradient, and the state of each; none of a parameter that is stepped as it is.

    State that is not there yet the optimizer has to make, for the full parameter. A single value, such as Adam's
    count of steps, is the first slice's; the others have copies.
    """
    gradient = param.grad
    if gradient is None or not state or param.numel() <= SLICE or param.device.type != "cpu":
        return
    if not all(isinstance(value, Tensor) and value.shape in (param.shape, ()) for value in state.values()):
        return
    single = {key: value for key, value in state.items() if value.dim() == 0}
    long = {key: value for key, value in state.items() if value.dim()}
    full = [param.detach(), gradient, *long.values()]
    if not all(tensor.is_contiguous() for tensor in full):
        return
    if not has_values(param):  # a rehearsal's (zero.plan): any slice takes as much memory as the others
        full = [tensor.view(-1)[:SLICE] for tensor in full]
    for own, own_gradient, *own_state in zip(*(tensor.view(-1).split(SLICE) for tensor in full), strict=True):
        one = nn.Parameter(own)
        one.grad = own_gradient
        yield one, single | dict(zip(long, own_state, strict=True))
        single = {key: value.clone() for key, value in single.items()}
