"""What an optimizer is that the user has built, and what others do around it."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zero.measure.kinds import Finding, known, measured
from zero.measure.param_groups import described_options, options


def finding_of_built(optimizer: Optimizer) -> Finding:
    """What an optimizer is that was built already: another is built alike, as far as its attributes tell."""
    found = known(type(optimizer))
    if found is not None:
        return found
    groups = [options(group) for group in optimizer.param_groups]
    return measured(type(optimizer), _told(optimizer), partial(_built_alike, optimizer), groups)


def _built_alike(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    first = next(iter(inspect.signature(type(optimizer)).parameters))
    inner = _held(optimizer).get(first)
    given = _built_alike(inner, groups) if isinstance(inner, Optimizer) else groups
    alike: Callable[..., Optimizer] = type(optimizer)
    return alike(given, **_arguments(optimizer))


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Those of its constructor after the first, as far as they are known. Of an optimizer inside, what builds it."""
    held = _held(optimizer)
    given: dict[str, Any] = {}
    for name in [*inspect.signature(type(optimizer)).parameters][1:]:
        value = held.get(name)
        if isinstance(value, Optimizer):
            kind: Callable[..., Optimizer] = type(value)
            given[name] = partial(kind, **_arguments(value))
        elif name in held:
            given[name] = deepcopy(held[name])
    return given


def _held(optimizer: Optimizer) -> dict[str, Any]:
    """Its defaults, and what it keeps in attributes of plain values, or of an optimizer."""
    attributes = {
        name.lstrip("_"): value
        for name, value in vars(optimizer).items()
        if isinstance(value, (bool, int, float, str, torch.dtype, Optimizer)) or value is None
    }
    return {**attributes, **optimizer.defaults}


def _told(optimizer: Optimizer) -> str:
    held = _held(optimizer)
    inner = [f"{name} {type(one).__name__} {_told(one)}" for name, one in held.items() if isinstance(one, Optimizer)]
    return "; ".join([described_options({k: v for k, v in held.items() if not isinstance(v, Optimizer)}), *inner])


def around(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Other optimizers with this one's groups. What they do beside its step, no hook of torch's tells.

    Costs 70 ms where 300,000 objects live.
    """
    for each in gc.get_objects():
        if issubclass(type(each), Optimizer) and each is not optimizer:
            groups = vars(each).get("param_groups", ())
            if any(one is other for one in groups for other in optimizer.param_groups):
                yield each


def working_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Others that hold this one, and state of its parameters besides: they do more than to pass its step on.

    Costs as much as `around`.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for each in gc.get_objects():
        if issubclass(type(each), Optimizer) and any(one is optimizer for one in vars(each).values()):
            own = vars(each).get("state", {})
            if any(param in own for param in params):
                yield each
