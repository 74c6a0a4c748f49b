"""Notices gradients that each rank scaled by a number of its own, between backward and step.

torch.nn.utils.clip_grad_norm_ does this to parts: it knows the norm of this rank's alone. A few elements of the
gradients are remembered after backward; where all of them were multiplied by one number since, that number must be the
same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero.fsdp.unit import Unit
from zero.oss.comm import Comm

_GRADIENTS, _ELEMENTS, _NEEDED = 12, 64, 2
"""Gradients looked at, elements of each, and the number of gradients below which nothing can be told."""


@dataclass(frozen=True)
class _Sample:
    """Elements of the gradient of one parameter as they were, and where."""

    param: nn.Parameter
    address: int
    at: Tensor
    values: Tensor

    def factors(self) -> Tensor | None:
        """What each element was multiplied by since; None where the gradient is another tensor now."""
        now = self.param.grad
        if now is None or now.data_ptr() != self.address:
            return None
        return now.detach().reshape(-1)[self.at].double() / self.values.double()


class Scaling:
    """Of the gradients of these units."""

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self._params, self._comm = [param for unit in units for group in unit.groups for param in group.params], comm
        self._samples: list[_Sample] = []

    def remember(self) -> None:
        """Looks at the gradients as backward left them."""
        have = [param for param in self._params if param.grad is not None and param.numel()]
        apart = have[:: max(len(have) // _GRADIENTS, 1)]
        self._samples = [sample for param in apart if (sample := _sample(param)) is not None]

    def compare(self, problem: str | None) -> None:
        """Collective. Raises RuntimeError, on every rank, where ranks scaled their gradients differently, or where any
        has a `problem` of its own that keeps it from a step."""
        factor = self._factor()
        told = torch.tensor([float(problem is not None), -math.inf, -math.inf], dtype=torch.float64)
        if factor is not None:
            told[1], told[2] = factor, -factor
        self._comm.all_reduce(told, maximum=True)
        if told[0]:
            problems = [text for text in self._comm.all_gather_text(problem or "") if text]
            raise RuntimeError(problem or f"another rank cannot take this step: {problems[0]}")
        most, least = told[1].item(), -told[2].item()
        if math.isfinite(most) and most - least > 1e-4 * max(abs(most), abs(least)):
            raise RuntimeError(
                f"gradients were scaled differently on different ranks since backward, by {least:.6g} to {most:.6g}. "
                "torch.nn.utils.clip_grad_norm_ does so, because it sees only this rank's part of the gradients. Call "
                "clip_grad_norm_(max_norm) of the FSDP model instead."
            )

    def _factor(self) -> float | None:
        """The one number that all samples were multiplied by, if it is one."""
        if self._comm.world == 1:
            return None
        factors = [factors for sample in self._samples if (factors := sample.factors()) is not None]
        if len(factors) < _NEEDED:
            return None
        together = torch.cat(factors).cpu()
        mean = together.mean().item()
        uniform = (together - mean).abs().max().item() <= 1e-2 * abs(mean)
        return mean if uniform else None


def _sample(param: nn.Parameter) -> _Sample | None:
    gradient = param.grad
    if gradient is None:
        return None
    values = gradient.detach().reshape(-1)[:_ELEMENTS]
    at = values.nonzero().view(-1)
    return _Sample(param, gradient.data_ptr(), at, values[at].clone()) if len(at) else None
