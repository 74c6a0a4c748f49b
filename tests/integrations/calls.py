"""Functions that ranks call by name: importing what they need takes seconds, which pytest's own process need not."""

import importlib
import os
from typing import Any
from unittest import mock

import ranks


def call(rank: int, world: int, module: str, name: str, args: tuple[Any, ...]) -> Any:
    started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in started.items()}, TORCHELASTIC_RUN_ID="0"):
        return getattr(importlib.import_module(module), name)(rank, world, *args)


def on_ranks(module: str, name: str, *args: Any) -> list[Any]:
    """What `name(rank, world, *args)` of a module beside this one returns, by rank, as torchrun would start them."""
    return ranks.run(call, args=(module, name, args), timeout=110)
