"""Measures the optimizers that step an FSDP's parameters, when each instance steps them for the first time."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from zero.measure.built import around, finding_of_built
from zero.measure.kinds import Finding, known, title
from zero.measure.numbers import NOTHING, Written


class Measured:
    """Findings about the optimizers that have stepped an FSDP's parameters so far."""

    def __init__(self) -> None:
        self._findings: WeakKeyDictionary[Optimizer, tuple[int, dict[str, Finding]]] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[Optimizer, Written] = WeakKeyDictionary()
        self._written: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()

    def findings(self, optimizer: Optimizer) -> dict[str, Finding]:
        """Returns findings about the optimizer and about optimizers around it that step by it (SAM), by name.

        Measures them at the first step, and again if the number of parameter groups has changed.
        """
        groups = len(optimizer.param_groups)
        if self._findings.get(optimizer, (0, None))[0] != groups:
            measured = {title(type(each)): finding_of_built(each) for each in (*around(optimizer), optimizer)}
            self._findings[optimizer] = groups, measured
        return self._findings[optimizer][1]

    def before_step(self, optimizer: Optimizer) -> None:
        if known(type(optimizer)) is None:
            self._before[optimizer] = Written(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        before = self._before.pop(optimizer, None)
        if before is not None:
            self._written[optimizer] = before.as_tensor(optimizer)

    def written(self, optimizer: Optimizer) -> Tensor | None:
        """Returns what its last step wrote into its groups, for ranks to compare; None for torch's own optimizers."""
        return self._written.get(optimizer, NOTHING) if known(type(optimizer)) is None else None
