"""What is asked before a model is wrapped, at stages 2 and 3, while nothing is changed yet."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Wrapping:
    """What is to be wrapped.

    ignored: parameters that are left out. units: the modules of units below the root. freed: the devices of full
    parameters that are freed at rest. Stage 2 has neither units nor freed parameters.
    """

    module: nn.Module
    ignored: Collection[nn.Parameter] = ()
    units: Collection[nn.Module] = ()
    freed: Collection[torch.device] = ()


refusals: list[Callable[[Wrapping], str | None]] = []
"""Each returns an error message if the model cannot be wrapped, else None."""


def refusal(wrapping: Wrapping) -> str | None:
    """Returns the first error message, if there is one."""
    problems = (refuse(wrapping) for refuse in refusals)
    return next((problem for problem in problems if problem is not None), None)


NO_JOIN = (
    "{} cannot be used with torch's Join, by which ranks whose data has ended wait for the others. Write "
    "`with zero.join(model, optimizer):`, or give all ranks equally many batches (DistributedSampler does, "
    "drop_last=True drops the rest)."
)
"""Formatted with the name of the class that cannot be used so."""
