"""The default device is not the model's, and lets no value survive: what `zero` makes by itself follows the model. Or
shards lie in files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Adam

import gpus
import zero
from axes import Axis, Wrap, happens

if TYPE_CHECKING:
    from rows import Loop


@happens("device: meta by default")
class Meta(Axis):
    def running(self, rank: int, stage: int) -> AbstractContextManager[object]:
        return torch.device("meta") if stage else nullcontext()

    def made(self, make: Callable[[], Any]) -> Any:
        with torch.device(gpus.DEVICE):
            return make()

    def wrapped(self, t: Loop, wrap: Wrap, optim: Callable[..., Any]) -> tuple[nn.Module, Any]:
        """torch's Adam counts its steps on the default device unless it is fused."""
        return wrap(partial(optim, fused=True) if getattr(optim, "func", None) is Adam else optim)


@happens("device: shards in files")
class Files(Axis):
    tolerance = gpus.ROUNDING  # the CPU steps

    def options(self, stage: int) -> dict[str, Any]:
        return {"offload": zero.DiskOffload(tempfile.gettempdir())}
