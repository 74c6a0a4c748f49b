"""Functions that ranks call by name: importing what they need takes seconds, which pytest's own process need not."""

from __future__ import annotations

import importlib
from typing import Any

import ranks


def call(rank: int, world: int, module: str, name: str, args: tuple[Any, ...]) -> Any:
    return getattr(importlib.import_module(module), name)(rank, world, *args)


def on_ranks(module: str, name: str, *args: Any) -> list[Any]:
    """What `name(rank, world, *args)` of a module beside this one returns, by rank."""
    return ranks.run(call, args=(module, name, args), timeout=110)
