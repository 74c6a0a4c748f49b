"""What is planned with offload is what is: against steps on the simulated GPU, where every tensor is on the device or
in the CPU's memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam

import matrix
import zero
from placements import Block, Model
from simulated.world import simulated

BATCH = (torch.zeros(4, 32, dtype=torch.int64),)
POLICY = ModuleWrapPolicy({Block})
adam = partial(Adam, foreach=True)


def measured(stage: str, world: int, offload: Any, precision: zero.MixedPrecision) -> tuple[int, int]:
    """Bytes on the device at the peak of a settled step, and in the CPU's memory between its backward and its step."""
    with simulated() as there:
        how: dict[str, Any] = {"auto_wrap_policy": POLICY, "precision": precision, "offload": offload}
        model = zero.FSDP(Model(layers=2), there.comm(0, world), reshard_after_forward=stage == "3", **how)
        optimizer = adam(model.parameters())
        for _ in range(3):
            there.memory.reset_peaks()
            model(*BATCH).backward()
            held = there.memory.on_cpu()
            optimizer.step()
            optimizer.zero_grad()
        return there.memory.peaks()[0], held


ALL = [
    (stage, world, zero.CPUOffload(ratio=ratio), zero.MixedPrecision(param_dtype=dtype))
    for stage in ("3", "3 kept")
    for world in (1, 2)
    for ratio in (1.0, 0.5)
    for dtype in (None, torch.bfloat16)
]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "world", "offload", "precision"), ALL if matrix.WHOLE else [ALL[number] for number in (6, 9)], ids=str
)
def test_offload_at_stage_3_is_planned_within_one_percent(stage, world, offload, precision):
    how = {"optimizer": adam, "auto_wrap_policy": POLICY, "batch": BATCH, "offload": offload, "precision": precision}
    cost = zero.plan(Model(layers=2), world_size=world, stages=[stage], **how).cost(stage)
    peak, held = measured(stage, world, offload, precision)
    assert cost.peak == pytest.approx(peak, rel=0.01)
    assert cost.host == pytest.approx(held, rel=0.01)
