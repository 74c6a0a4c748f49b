"""What is checked around the steps of OSS. Stage 3 has its own in zero/fsdp/step.py."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from zero._torch.telling import warn_user
from zero.comm import Comm
from zero.measure.kinds import Finding
from zero.shards.owned_shards import OwnedShards
from zero.wrap import ddp
from zero.wrap.dtensor_checks import DTensorCheck


class StepChecks:
    """Checks the steps of one OSS. What is wrong raises RuntimeError, on every rank as it is called in `Together`.

    inner: the optimizer of the shards. finding: what that was measured to need; None for torch's own.
    """

    def __init__(self, comm: Comm, inner: Optimizer, shards: OwnedShards, finding: Finding | None) -> None:
        self._comm, self._inner, self._shards, self._finding = comm, inner, shards, finding
        self._steps_without = 0
        self._dtensors = DTensorCheck()

    def refuse_changes(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Raises if optimizer, groups or parameters were changed so that it cannot step. param_groups: of the OSS."""
        _refuse_moved(self._shards)
        _refuse_edited(param_groups, self._shards)
        self._dtensors.refuse(self._shards.places, self._inner, self._finding)
        ddp.refuse_joined(self._shards)

    def refuse_gradients(self, *, found: bool, are_sharded: bool) -> None:
        """Raises if the gradients cannot be stepped.

        found: whether there are any. are_sharded: whether ShardedDDP brings them."""
        self._steps_without = 0 if found else self._steps_without + 1
        if self._steps_without == 2:  # one is normal: a first step for a scheduler, a skipped batch
            warn_user(f"In two steps one after another {ddp.NO_GRADIENT}")
        if not found:
            ddp.refuse_replaced(self._shards)
        elif not are_sharded and self._comm.world > 1:
            ddp.refuse_unfrozen(self._shards)


def _refuse_moved(shards: OwnedShards) -> None:
    """Raises if parameters no longer lie in their shard groups."""
    for group in shards.shard_groups:
        name = group.bound.moved()
        if name is None:
            continue
        taken = shards.taken_by_another()
        if taken is not None:
            raise RuntimeError(
                f"{taken} was given to another OSS since, which shards and steps it now. Give each parameter to "
                "one OSS, drop the one that you do not step, and wrap again what zero.unwrap(model) returns."
            )
        raise RuntimeError(
            f"{name} was moved, cast or given other data after OSS was built, and would no longer be trained. "
            "Move and cast the model first, then build OSS; load weights with load_state_dict (assign=False); write "
            "others in place, `p.data.copy_(...)`."
        )


def _refuse_edited(param_groups: Sequence[dict[str, Any]], shards: OwnedShards) -> None:
    """Raises if the groups no longer hold the parameters that were laid out."""
    found, given = [group["params"] for group in param_groups], shards.given
    expected, counts = [len(params) for params in given], [len(params) for params in found]
    if counts == expected and all(
        # Not `params == own`, which compares the elements of tensors that are not the same object.
        all(map(operator.is_, params, own))
        for params, own in zip(found, given, strict=True)
    ):
        return
    kept = {param for params in found for param in params}
    named = (pair for flat in shards.shard_groups for pair in zip(flat.params, flat.bound.names, strict=True))
    gone = next((name for param, name in named if param not in kept), None)
    raise RuntimeError(
        f"param_groups were edited: OSS was given groups of {expected} parameters, and finds groups of {counts}, "
        f"{f'without {gone}' if gone else 'not the same ones in the same order'}. Add a group by add_param_group; "
        "to step fewer parameters, freeze them by requires_grad_(False), or build OSS again."
    )
