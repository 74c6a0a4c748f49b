"""What is left of a wrapper and its optimizers once zero.unwrap() has given the module back: errors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from torch.optim import Optimizer

UNWRAPPED = (
    "this {} was unwrapped by zero.unwrap(), and would train nothing. Use the module that zero.unwrap() returned, or "
    "wrap that again."
)


def refuse_steps(optimizers: Iterable[Optimizer]) -> None:
    """Has every further step of these raise RuntimeError: they hold shards of parameters that are full again."""
    for optimizer in optimizers:
        Optimizer.register_step_pre_hook(optimizer, partial(_refuse_step, type(optimizer).__name__))


def _refuse_step(name: str, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"the model of this {name} was unwrapped by zero.unwrap(): it holds the state of shards, and the parameters "
        "are full again. Build another optimizer; full state saved before loads into it."
    )
