"""The numbers in an optimizer's param_groups, and whether the numbers that its steps write there agree between ranks.

An optimizer that estimates one number over all its parameters (a step size, a norm) usually writes it there. On a rank
it has only shards. If ranks then have different numbers, their steps are wrong.
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
"""The number of groups that are compared, from the first."""


def numbers(group: Mapping[str, Any]) -> Numbers:
    """The group's numbers by option, without those on an accelerator: reading them would wait for it."""
    found: Numbers = {}
    for key, value in options(dict(group)).items():
        if isinstance(value, Tensor):
            if value.device.type == "cpu" and value.numel() == 1 and not value.is_complex():
                found[key] = float(value.item())
        elif isinstance(value, (bool, int, float, np.number)):
            found[key] = float(value)
    return found


class Written:
    """The numbers that an optimizer writes into its groups in a step. Construct it before the step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._before = [numbers(group) for group in optimizer.param_groups[:SLOTS]]

    def anything(self, optimizer: Optimizer) -> bool:
        """Whether the step has written any number. Call it after the step."""
        return self._before != [numbers(group) for group in optimizer.param_groups[:SLOTS]]

    def as_tensor(self, optimizer: Optimizer) -> Tensor:
        """After the step: a signature, [2 x SLOTS], float64. Its maximum over the ranks is for `differs`."""
        signature = torch.full((2, SLOTS), -math.inf, dtype=torch.float64, device="cpu")
        for slot, (old, group) in enumerate(zip(self._before, optimizer.param_groups, strict=False)):
            if any(param.grad is not None and param.numel() for param in group["params"]):  # otherwise it may not know
                changed = sorted((key, value) for key, value in numbers(group).items() if old.get(key) != value)
                digest = hashlib.sha256(repr(changed).encode()).digest()
                signature[0, slot] = int.from_bytes(digest[:6], "little")
                signature[1, slot] = -signature[0, slot]
        return signature.flatten()


def differs(largest: Tensor, optimizer: Optimizer) -> str | None:
    """Whether ranks wrote different numbers, as an error message for the user; None if they did not.

    largest: the maximum over the ranks of their signatures.
    """
    most, least = largest.view(2, SLOTS)[0], -largest.view(2, SLOTS)[1]
    for slot in range(SLOTS):
        if math.isfinite(most[slot]) and most[slot] != least[slot]:
            return (
                f"{type(optimizer).__name__} wrote other numbers into param_groups[{slot}] on another rank; here are "
                f"{numbers(optimizer.param_groups[slot])}. It computes them from all its parameters, and each rank has "
                "only its shards: it cannot be sharded. Use it without zero (stage 0), from weights saved before this "
                "step."
            )
    return None
