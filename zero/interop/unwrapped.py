"""Errors of wrappers and optimizers that are used after zero.unwrap()."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from torch.optim import Optimizer

UNWRAPPED = (
    "this {} was unwrapped by zero.unwrap() and cannot train any more. Use the module that zero.unwrap() returned, or "
    "wrap that module again."
)


def refuse_steps(optimizers: Iterable[Optimizer]) -> None:
    """Makes later steps of the optimizers raise RuntimeError: they hold shards of parameters that are full again."""
    for optimizer in optimizers:
        Optimizer.register_step_pre_hook(optimizer, partial(_refuse_step, type(optimizer).__name__))


def _refuse_step(name: str, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"the model of this {name} was unwrapped by zero.unwrap(): the optimizer holds the state of shards, but the "
        "parameters are full again. Build a new optimizer. It can load full state that was saved before zero.unwrap()."
    )
