"""What one step of a tensor of the user's own dtype shows, where `probe` steps float32: optimizers may round 16-bit
parameters at random, and keep their state in a dtype of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zero.measure.probe import Build, made
from zero.measure.undisturbed import draws, seed, undisturbed


def single_step(build: Build, options: Mapping[str, Any], dtype: torch.dtype) -> tuple[bool, dict[str, Any]]:
    """Whether the step drew random numbers, and the state that it made, of a matrix of this dtype and an optimizer that
    `build` makes of a group with these options.

    No and none if that is not possible: the optimizer is foreign code, and may raise anything.
    """
    with undisturbed():
        param = nn.Parameter(torch.ones(12, 16, dtype=dtype, device="cpu"))
        param.grad = torch.ones_like(param)
        try:
            optimizer = made(build, options, [param])
            seed(0)
            drew = draws(optimizer.step)
            return drew, dict(optimizer.state.get(param, {}))
        except Exception:
            return False, {}
