"""Gradients that ranks scaled by different numbers between backward and step.

torch.nn.utils.clip_grad_norm_ does so with sharded gradients: it computes the norm of this rank's shards only. A few
elements of the gradients are copied after backward. If all of a rank's were multiplied by one number since, that number
must be the same on every rank where that is so. So must be the number by which one parameter was multiplied that is cut
between ranks: a few of these are chosen alike on all ranks. torch counts writes into a tensor, except through `.data`;
only after a write are elements compared, for which the host waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero._torch import writes_so_far
from zero.comm import Comm
from zero.shards.shard_group import ShardGroup

# Gradients that are sampled, and elements of each.
_GRADIENTS, _ELEMENTS = 12, 64


@dataclass(eq=False)
class _Sample:
    """The first elements of one gradient after backward, and torch's count of writes into it."""

    param: nn.Parameter
    address: int
    version: int
    values: Tensor

    @property
    def current(self) -> Tensor | None:
        """The gradient, if it is still the same tensor."""
        now = self.param.grad
        return None if now is None or now.data_ptr() != self.address else now

    @property
    def touched(self) -> bool:
        """Whether the gradient was written into since backward."""
        now = self.current
        return now is not None and writes_so_far([now]) != self.version


class Scaling:
    """Compares the scaling of gradients between ranks. what: in which operation. remedy: the call that replaces
    clip_grad_norm_. groups: those of which parameters that are cut between ranks are compared one by one."""

    def __init__(self, comm: Comm, what: str, remedy: str, groups: Iterable[ShardGroup] = ()) -> None:
        self._comm, self._remedy, self._channel = comm, remedy, comm.channel(what)
        self._samples: list[_Sample] = []
        cut = [param for group in groups for param in group.cut_params()]
        self._cut = cut[:: max(len(cut) // _GRADIENTS, 1)][:_GRADIENTS]
        self._of_cut: list[_Sample | None] = []

    def remember(self, params: Iterable[nn.Parameter]) -> None:
        """Samples the gradients of parameters, or of shards, as they are now."""
        have = [(param, param.grad) for param in params if param.grad is not None and param.numel()]
        some = have[:: max(len(have) // _GRADIENTS, 1)]
        of_cut = [(param, grad) for param in self._cut if (grad := param.grad) is not None and grad.numel()]
        versions = [writes_so_far([gradient]) for _, gradient in (*some, *of_cut)]
        samples = [
            _Sample(param, gradient.data_ptr(), version, _first(gradient).clone())
            for (param, gradient), version in zip((*some, *of_cut), versions, strict=True)
        ]
        self._samples, taken = samples[: len(some)], {sample.param: sample for sample in samples[len(some) :]}
        self._of_cut = [taken.get(param) for param in self._cut]

    @contextmanager
    def alike(self) -> Iterator[None]:
        """A context in which writes scale all gradients by one number that is the same on every rank."""
        untouched = [sample for sample in (*self._samples, *self._of_cut) if sample is not None and not sample.touched]
        yield
        for sample in untouched:
            if (now := sample.current) is not None:
                sample.version = writes_so_far([now])

    def compare(self, problem: str | None) -> None:
        """Collective. Raises RuntimeError on every rank if ranks scaled their gradients differently, or if any rank has
        a `problem`: an error message that prevents its step."""
        factors = [self._factor(), *map(_factor_of, self._of_cut)]
        largest = [-math.inf if factor is None else factor for factor in factors]
        smallest = [-math.inf if factor is None else -factor for factor in factors]
        given = [float(problem is not None), *largest, *smallest]
        compared = torch.tensor(given, dtype=torch.float64, device="cpu")
        self._comm.all_reduce(compared, maximum=True, channel=self._channel)
        any_problem, *extremes = compared.tolist()
        if any_problem:
            problems = [text for text in self._comm.all_gather_text(problem or "") if text]
            raise RuntimeError(problem or f"another rank cannot take this step: {problems[0]}")
        for most, negated in zip(extremes[: len(factors)], extremes[len(factors) :], strict=True):
            self._refuse_different(most, -negated)

    def _refuse_different(self, most: float, least: float) -> None:
        """Raises RuntimeError if the largest and the smallest factor of all ranks differ."""
        if math.isfinite(most) and most - least > 1e-4 * max(abs(most), abs(least)):
            raise RuntimeError(
                f"gradients were scaled differently on different ranks since backward, by {least:.6g} to {most:.6g}. "
                "torch.nn.utils.clip_grad_norm_ does so, because it sees only this rank's shard of the gradients. Call "
                f"{self._remedy} instead."
            )

    def _factor(self) -> float | None:
        """The number that all samples were multiplied by; None if they were not, or if it cannot be known."""
        here = [(sample, now) for sample in self._samples if (now := sample.current) is not None]
        if self._comm.world == 1 or not here or not all(sample.touched for sample, _ in here):
            return None  # torch's clip_grad_norm_ writes into all; one layer may be scaled by hand
        factors = [_first(now).double() / sample.values.double() for sample, now in here]  # not finite if not known
        of_each = torch.cat(factors).cpu().split([len(sample.values) for sample, _ in here])
        known = [finite for factors in of_each if len(finite := factors[factors.isfinite()])]
        return _one_number(torch.cat(known)) if known else None


def _factor_of(sample: _Sample | None) -> float | None:
    """The number that one gradient was multiplied by, or replaced by a multiple; None if that cannot be known."""
    now = None if sample is None else sample.param.grad
    if sample is None or now is None or now.shape != sample.param.shape:
        return None
    if sample.current is not None and not sample.touched:
        return 1.0
    factors = (_first(now).double() / sample.values.double()).cpu()
    return _one_number(factors[factors.isfinite()])


def _one_number(factors: Tensor) -> float | None:
    """The number that all of these are, within rounding, if there is one."""
    if not len(factors):
        return None
    mean = factors.mean().item()
    return mean if (factors - mean).abs().max().item() <= 1e-2 * abs(mean) else None


def _first(gradient: Tensor) -> Tensor:
    return gradient.detach().reshape(-1)[:_ELEMENTS]
