"""Parameter groups: their parameters and options."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.modules import parameters_of

SHARD_MARK = "zero_shard"
"""Key that marks one rank's shard, in a state_dict or its groups."""


class Grouped(Protocol):
    """An optimizer, or what stands for one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


def params_of(optimizer: Grouped) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def numbers_of(optimizer: Grouped) -> dict[Any, int]:
    """By parameter its number, counted through all groups."""
    return {param: number for number, param in enumerate(params_of(optimizer))}


def like(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any = None) -> Optimizer:
    """An optimizer with the attributes of this one but for its groups and, if one is given, its state."""
    # Not copy.copy: torch's optimizers then lose all attributes that a subclass has added.
    alike: Optimizer = object.__new__(type(optimizer))
    vars(alike).update(vars(optimizer))
    alike.param_groups = groups
    if state is not None:
        alike.state = state
    return alike


def steps(optimizer: Grouped, module: nn.Module) -> bool:
    """Whether the optimizer holds any of the module's parameters."""
    return not {*params_of(optimizer)}.isdisjoint(parameters_of(module))


_OF_SCHEDULERS = ("step", "_opt_called")
"""What schedulers put into an optimizer: a function that counts its steps, and whether it was called."""


class Alike:
    """Makes optimizers like one that was built, of other groups and without state, in the place of its class.

    func: that class. attributes: what each gets a copy of beside groups, state and hooks: what the constructor, steps
        so far, or the user have made of it. shares: what cannot be copied, such as a lock, all have; otherwise that
        raises what copying does.
    """

    def __init__(self, optimizer: Optimizer, *, shares: bool = False) -> None:
        self.func, self._optimizer, self._shares = type(optimizer), optimizer, shares
        self.attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in ("param_groups", "state", *_OF_SCHEDULERS) and not name.startswith("_optimizer_")
        }

    @property
    def has_tensors(self) -> str | None:
        """An attribute that has tensors of more than a number, or an optimizer or a module, which has some: these are
        of this one's parameters."""
        for name, value in self.attributes.items():
            for one in within(value):
                if isinstance(one, (Optimizer, nn.Module)) or (isinstance(one, Tensor) and one.dim() > 0):
                    return name
        return None

    def __call__(self, groups: list[dict[str, Any]]) -> Optimizer:
        optimizer = self._optimizer
        made = like(optimizer, [{**optimizer.defaults, **group} for group in groups], defaultdict(dict))
        for name in _OF_SCHEDULERS:
            vars(made).pop(name, None)
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_"):
                vars(made)[name] = type(value)()
        copies: dict[int, Any] = {id(optimizer): made}  # a method of its own is one of the other
        for name, value in self.attributes.items():
            try:
                vars(made)[name] = deepcopy(value, copies)
            except Exception:
                if not self._shares:
                    raise
        return made


def within(value: Any) -> Iterator[Any]:
    """Yields what is in nested containers, keys too, or the value itself."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set)):
        for one in value:
            yield from within(one)
    else:
        yield value


def opaque(value: Any) -> list[Any]:
    """What is in a value of which a text does not say all."""
    data = type(None), int, float, complex, str, torch.dtype, torch.device, Tensor
    return [one for one in within(value) if not isinstance(one, data)]


NO_OPTIONS = ("params", "param_names", SHARD_MARK)
"""The keys of a group that are none of its options."""


def options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NO_OPTIONS}


def described_options(given: dict[str, Any]) -> str:
    """Options as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.tolist()
        if type(value) in (list, tuple):
            return type(value)(map(plain, value))
        return called(value) if callable(value) else value

    return ", ".join(f"{key}={plain(given[key])}" for key in sorted(given)) or "no options of its own"


def alike_options(given: dict[str, Any]) -> str:
    """Options as text that is the same in every process, without addresses."""
    return re.sub(r" at 0x\w+", "", described_options(given))


def called(optim: object) -> str:
    """A name for errors that is the same in every process, as repr() is not."""
    optim = getattr(optim, "func", optim)
    return getattr(optim, "__name__", type(optim).__name__)


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that asks for the known option most like a misspelt one, after a space; empty if none is."""
    near = get_close_matches(name, [*known], n=1, cutoff=0.7)
    return f" Did you mean {near[0]}=?" if near else ""
