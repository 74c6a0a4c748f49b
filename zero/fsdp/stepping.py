"""What the optimizers are that step an FSDP's parameters: looked at when an instance steps them for the first time."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.oss.groups import options, told_options
from zero.oss.kinds import Finding, known, measured, title
from zero.oss.numbers import NOTHING, Written


class Stepping:
    """Of the optimizers that stepped an FSDP's parameters so far."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Optimizer, tuple[int, dict[str, Finding]]] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[Optimizer, Written] = WeakKeyDictionary()
        self._written: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()

    def found(self, optimizer: Optimizer) -> dict[str, Finding]:
        """By name: what the optimizer is, and others around it, that work on the parameters and step by it (SAM).

        Measured where it steps for the first time, or has more groups than then.
        """
        groups = len(optimizer.param_groups)
        if self._found.get(optimizer, (0, None))[0] != groups:
            looked_at = {title(type(each)): finding_of(each) for each in (*_around(optimizer), optimizer)}
            self._found[optimizer] = groups, looked_at
        return self._found[optimizer][1]

    def before_step(self, optimizer: Optimizer) -> None:
        if known(type(optimizer)) is None:
            self._before[optimizer] = Written(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        before = self._before.pop(optimizer, None)
        if before is not None:
            self._written[optimizer] = before.told(optimizer)

    def told(self, optimizer: Optimizer) -> Tensor | None:
        """What its last step wrote into its groups, for ranks to compare; None of torch's own, which write nothing."""
        return self._written.get(optimizer, NOTHING) if known(type(optimizer)) is None else None


def finding_of(optimizer: Optimizer) -> Finding:
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
    return "; ".join([told_options({k: v for k, v in held.items() if not isinstance(v, Optimizer)}), *inner])


def _around(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Other optimizers with this one's groups. What they do beside its step, no hook of torch's tells.

    Costs 70 ms where 300,000 objects live.
    """
    for each in gc.get_objects():
        if issubclass(type(each), Optimizer) and each is not optimizer:
            groups = vars(each).get("param_groups", ())
            if any(one is other for one in groups for other in optimizer.param_groups):
                yield each
