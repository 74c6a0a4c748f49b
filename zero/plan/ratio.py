"""The share of a model that has to be offloaded, so that a stage fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import zero
from zero.plan.planner import plan
from zero.plan.result import Plan
from zero.plan.sizes import Options


def smallest_ratio(
    model: Any,
    *,
    world_size: int,
    memory: int,
    host_memory: int | None = None,
    stage: int | str = 2,
    options: Options | None = None,
    **more: Any,
) -> tuple[float, Plan]:
    """Returns the smallest `ratio` of zero.CPUOffload, in hundredths, with which a stage fits, and its plan.

    stage: 1, 2, 3 or "3 kept". memory, host_memory: bytes that a rank has on its device, and on the host. more: as of
        zero.plan.

    Raises ValueError if it does not fit with all offloaded, or if the host has no room for what does not fit.
    """
    options = options or Options(precision=more.pop("precision", None) or zero.MixedPrecision())

    def planned(hundredths: int) -> Plan:
        offload = replace(options, offload=zero.CPUOffload(ratio=hundredths / 100))
        return plan(model, world_size=world_size, memory=memory, stages=[stage], options=offload, **more)

    low, high, found = 0, 100, planned(100)
    peak = found.cost(stage).peak
    if peak > memory:
        raise ValueError(
            f"at stage {stage} a rank of {world_size} needs {peak:,} bytes on the device with all offloaded, and has "
            f"{memory:,}. Take more ranks, {'' if stage in (3, '3') else 'stage 3, '}or a smaller batch."
        )
    while high - low > 1:
        middle = (low + high) // 2
        tried = planned(middle)
        if tried.cost(stage).peak <= memory:
            high, found = middle, tried
        else:
            low = middle
    host = found.cost(stage).host
    if host_memory is not None and host > host_memory:
        raise ValueError(
            f"with {high}% of stage {stage} offloaded, the least with which it fits on the device, a rank needs "
            f"{host:,} bytes of the host's memory, and has {host_memory:,}. Take more ranks, or zero.DiskOffload."
        )
    return high / 100, found
