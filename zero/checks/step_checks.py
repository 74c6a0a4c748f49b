"""Checks before a step of OSS changes anything."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer

from zero.comm import Comm
from zero.interop.ddp import replaced
from zero.measure.built import working_by
from zero.shards.owned_shards import OwnedShards
from zero.shards.shard_group import ShardGroup


class StepChecks:
    """The checks of one OSS."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._edited = comm.channel("a step of OSS that it refuses, as its param_groups were edited")
        self._moved = comm.channel("a step of OSS that it refuses, as parameters were moved or given other data")
        self._steps_without_gradients = 0
        self._looked_around = False

    def refuse_moved(self, groups: Sequence[ShardGroup]) -> None:
        """Raises RuntimeError for parameters that no longer lie in these groups."""
        for group in groups:
            name = group.reclaim()
            if name is not None:
                raise RuntimeError(
                    f"{name} was moved, cast or given other data after OSS was built, and would no longer be trained. "
                    "Move and cast the model first, then build OSS; load weights with load_state_dict (assign=False)."
                )

    def refuse_moved_anywhere(self, groups: Sequence[ShardGroup]) -> None:
        """See refuse_moved; the other ranks raise, too, in the operation in which they wait for this one."""
        try:
            self.refuse_moved(groups)
        except RuntimeError:
            with suppress(RuntimeError):
                self._comm.agree(self._moved)
            raise

    def refuse_edits(self, shards: OwnedShards, param_groups: list[dict[str, Any]]) -> None:
        """Raises RuntimeError, on every rank, where the groups no longer hold the parameters that were laid out."""
        problem = shards.edited(param_groups)
        if problem is not None:
            with suppress(RuntimeError):
                self._comm.agree(self._edited)  # so that ranks without a problem raise, too
            raise RuntimeError(problem)

    def refuse_wrapped(self, outer: Optimizer, inner: Optimizer) -> None:
        """Raises RuntimeError for an optimizer around OSS that keeps state of parameters: these have no gradients.

        Looks in the first step only.
        """
        if self._looked_around:
            return
        self._looked_around = True
        for one in working_by(outer):
            name, kind = type(one).__name__, type(inner).__name__
            raise RuntimeError(
                f"{name} steps by OSS and keeps state of its own for the parameters. With ShardedDDP gradients are "
                f"with their owners only, so ranks would do different things. Put {name} inside: "
                f"OSS(params, lambda params, **options: {name}({kind}(params, **options)))."
            )

    def refuse_replaced(self, shards: OwnedShards, *, found_gradients: bool) -> None:
        """Raises RuntimeError if a module under DistributedDataParallel replaced the parameters; otherwise warns at the
        second step without gradients.

        One such step is normal: a first step for a scheduler, a skipped batch.
        """
        self._steps_without_gradients = 0 if found_gradients else self._steps_without_gradients + 1
        if found_gradients:
            return
        problem = (
            "OSS found no gradient. If backward was called, the model has other parameters than OSS: load weights with "
            "assign=False, and build OSS after replacing any."
        )
        if replaced(shards):
            raise RuntimeError(problem)
        if self._steps_without_gradients == 2:
            warnings.warn(f"In two steps one after another {problem}", stacklevel=5)
