"""What the optimizers are that step an FSDP's parameters: looked at when an instance steps them for the first time."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from zero.measure.built import around, finding_of_built
from zero.measure.kinds import Finding, known, title
from zero.measure.numbers import NOTHING, Written


class Stepping:
    """Of the optimizers that stepped an FSDP's parameters so far."""

    def __init__(self) -> None:
        self._findings: WeakKeyDictionary[Optimizer, tuple[int, dict[str, Finding]]] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[Optimizer, Written] = WeakKeyDictionary()
        self._written: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()

    def found(self, optimizer: Optimizer) -> dict[str, Finding]:
        """By name: what the optimizer is, and others around it, that work on the parameters and step by it (SAM).

        Measured where it steps for the first time, or has more groups than then.
        """
        groups = len(optimizer.param_groups)
        if self._findings.get(optimizer, (0, None))[0] != groups:
            looked_at = {title(type(each)): finding_of_built(each) for each in (*around(optimizer), optimizer)}
            self._findings[optimizer] = groups, looked_at
        return self._findings[optimizer][1]

    def before_step(self, optimizer: Optimizer) -> None:
        if known(type(optimizer)) is None:
            self._before[optimizer] = Written(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        before = self._before.pop(optimizer, None)
        if before is not None:
            self._written[optimizer] = before.as_tensor(optimizer)

    def written(self, optimizer: Optimizer) -> Tensor | None:
        """What its last step wrote into its groups, for ranks to compare; None of torch's own, which write nothing."""
        return self._written.get(optimizer, NOTHING) if known(type(optimizer)) is None else None
