"""The largest model that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from zero.plan.planner import plan
from zero.plan.result import Plan
from zero.plan.sizes import Sizes

_CLOSE, _TRIES = 0.98, 12


def largest(
    model_of: Callable[[float], nn.Module | Sizes],
    *,
    world_size: int,
    memory: int,
    host_memory: int | None = None,
    stage: int | str = 3,
    **more: Any,
) -> Plan:
    """Returns the plan of the largest model with which a stage fits: it uses 98% of the memory that limits it, or more.

        zero.plan.largest(lambda numel: Sizes.of_count(numel, 32), world_size=8, memory=80 * 2**30).parameters

    model_of: called with numbers of parameters, returns a model of about so many. memory, host_memory: bytes that a
        rank has on its device, and on the host. more: as of zero.plan; `options` may have offload.

    Raises ValueError if no size that was tried fits, as where activations alone need more.
    """
    found: Plan | None = None
    numel, most = memory / 16, float("inf")
    for _ in range(_TRIES):
        planned = plan(model_of(numel), world_size=world_size, memory=memory, stages=[stage], **more)
        cost = planned.cost(stage)
        used = max(cost.peak / memory, cost.host / host_memory if host_memory else 0.0)
        if used > 1:
            most = min(most, numel)
        elif found is None or planned.parameters > found.parameters:
            found = planned
        if _CLOSE <= used <= 1:
            break
        numel *= (_CLOSE + 1) / 2 / used  # bytes are nearly proportional to parameters
        if found is not None and not found.parameters < numel < most:
            numel = (found.parameters + most) / 2
    if found is None:
        raise ValueError(
            f"at stage {stage} no model was found that fits a rank of {world_size} with {memory:,} bytes; one of "
            f"{planned.parameters:,} parameters needs {cost.peak:,}. Take more ranks, or a smaller batch."
        )
    return found
