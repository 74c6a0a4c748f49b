"""The numbers in an optimizer's param_groups, and whether those that its steps write there agree between ranks.

An optimizer that estimates one number over all the parameters that it has (a step size, a norm) writes it there as a
rule. On a rank it has parts: where ranks then have different numbers, they would train something of their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.measure.param_groups import options

Numbers = dict[str, float]

SLOTS = 8
"""Groups that are compared, from the first on."""


def numbers(group: Mapping[str, Any]) -> Numbers:
    """By option. Without those on an accelerator, which would have to be waited for."""
    found: Numbers = {}
    for key, value in options(dict(group)).items():
        if isinstance(value, Tensor):
            if value.device.type == "cpu" and value.numel() == 1 and not value.is_complex():
                found[key] = float(value.item())
        elif isinstance(value, (bool, int, float, np.number)):
            found[key] = float(value)
    return found


class Written:
    """What one optimizer writes into its groups in a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        """To be made before the step."""
        self._before = [numbers(group) for group in optimizer.param_groups[:SLOTS]]

    def anything(self, optimizer: Optimizer) -> bool:
        """After the step: whether it has written any number."""
        return self._before != [numbers(group) for group in optimizer.param_groups[:SLOTS]]

    def as_tensor(self, optimizer: Optimizer) -> Tensor:
        """After the step: what ranks are to compare by `differs`, as the maximum over them; [2 x SLOTS], float64."""
        told = torch.full((2, SLOTS), -math.inf, dtype=torch.float64)
        for slot, (old, group) in enumerate(zip(self._before, optimizer.param_groups, strict=False)):
            if any(param.grad is not None and param.numel() for param in group["params"]):  # else it need not know
                changed = sorted((key, value) for key, value in numbers(group).items() if old.get(key) != value)
                digest = hashlib.sha256(repr(changed).encode()).digest()
                told[0, slot] = int.from_bytes(digest[:6], "little")
                told[1, slot] = -told[0, slot]
        return told.flatten()


NOTHING = torch.full((2 * SLOTS,), -math.inf, dtype=torch.float64)
"""Told where no step was taken yet."""


def differs(told: Tensor, optimizer: Optimizer) -> str | None:
    """Of the maximum over the ranks of what they told: what is wrong, in words for the user; None if nothing."""
    most, least = told.view(2, SLOTS)[0], -told.view(2, SLOTS)[1]
    for slot in range(SLOTS):
        if math.isfinite(most[slot]) and most[slot] != least[slot]:
            return (
                f"{type(optimizer).__name__} wrote other numbers into param_groups[{slot}] on another rank; here are "
                f"{numbers(optimizer.param_groups[slot])}. It computes them from all the parameters that it has, and "
                "each rank has others of them: it cannot be sharded. Use it without zero (stage 0), from weights of "
                "before this step."
            )
    return None
