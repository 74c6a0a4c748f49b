"""What a resumed run needs besides its model and optimizer: the argument `resume`, and the random generators.

The states are entries of `extra`: one that is the same on all ranks is stored once, otherwise once a rank.

    resume/0/StepLR    of an object, by its position and class
    resume/random      Python's generator; the others are resume/numpy, resume/torch, and by the device's name
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

PREFIX = "resume/"

# How to get a state, and how to set it.
_Functions = tuple[Callable[[], Any], Callable[[Any], object]]


def label(name: str) -> str:
    """What an entry of `extra` is called in messages."""
    return name if name.startswith(PREFIX) else f"extra[{name!r}]"


class Resumed:
    """The objects and generators whose states are saved and loaded; nothing if `resume` is None. names: of the entries
    of `extra`. Raises ValueError for an object that has no state to save."""

    def __init__(self, resume: Any) -> None:
        objects = [] if resume is None else resume if isinstance(resume, list | tuple) else [resume]
        self._states = {
            f"{PREFIX}{number}/{type(one).__name__}": _functions(one, number) for number, one in enumerate(objects)
        }
        if resume is not None:  # the generators last, because setting others may draw
            self._states |= {f"{PREFIX}{name}": both for name, both in _generators().items()}
        self.names = [*self._states]

    def states(self) -> dict[str, Any]:
        return {name: get() for name, (get, _) in self._states.items()}

    def take(self, states: Mapping[str, Any]) -> None:
        """Sets what there is a state of."""
        for name, (_, set_state) in self._states.items():
            if name in states:
                set_state(states[name])

    def refuse_others(self, stored: Collection[str]) -> None:
        """Raises ValueError where other objects were saved. stored: the names of all entries."""
        saved = {name for name in stored if name.startswith(PREFIX)}
        if not self.names:
            return
        if not saved:
            raise ValueError(
                "it was saved without resume=. Load it without, and take from its extra what you put there"
            )
        before, here = ([name for name in sorted(names) if name.count("/") == 2] for names in (saved, self.names))
        if before != here:
            given = [", ".join(name.rpartition("/")[2] for name in names) for names in (before, here)]
            raise ValueError(f"it was saved with resume=[{given[0]}], but load was given [{given[1]}]")


def _functions(one: Any, number: int) -> _Functions:
    if isinstance(one, torch.Generator):
        return one.get_state, one.set_state
    has_state = callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))
    if isinstance(one, nn.Module | Optimizer) or not has_state:
        raise ValueError(
            f"resume[{number}] is a {type(one).__name__}. Pass objects with state_dict() and load_state_dict(), as "
            "schedulers and GradScalers have, and torch.Generators; model and optimizer have arguments of their own, "
            "and anything else belongs into extra"
        )
    return one.state_dict, one.load_state_dict


def _generators() -> dict[str, _Functions]:
    """Of this process: those that random, numpy and torch draw from by default, on the CPU and the current device."""
    found: dict[str, _Functions] = {
        "random": (random.getstate, random.setstate),
        "numpy": (np.random.get_state, np.random.set_state),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        module = torch.get_device_module(device)
        found[device.type] = (module.get_rng_state, module.set_rng_state)
    return found
