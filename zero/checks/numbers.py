"""Compares between ranks the numbers that optimizer steps write into param_groups."""

from __future__ import annotations

from torch.optim import Optimizer

from zero.comm import Comm
from zero.measure.numbers import Written, differs


class Agreed:
    """Checks after each step that all ranks that stepped parameters of a group wrote the same numbers into it.

    expected: whether steps write numbers. Otherwise nothing is sent until a step does; that must be on all ranks.
    """

    def __init__(self, comm: Comm, *, expected: bool) -> None:
        self._comm, self._expected = comm, expected
        self._channel = comm.channel("the numbers that the optimizer of OSS wrote into its param_groups")
        self._written: Written | None = None

    def before_step(self, optimizer: Optimizer) -> None:
        self._written = Written(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Collective. Raises RuntimeError on every rank where the numbers differ."""
        assert self._written is not None
        self._expected = self._expected or self._written.anything(optimizer)
        if not self._expected:
            return
        written = self._written.as_tensor(optimizer)
        self._comm.all_reduce(written, maximum=True, channel=self._channel)
        problem = differs(written, optimizer)
        if problem is not None:
            raise RuntimeError(problem)
