"""What is planned with offload is what is: against steps on the simulated GPU, where every tensor is on the device or
in the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam, Optimizer

import matrix
import zero
from counted import Block, Model
from simulated.memory import Memory
from simulated.world import Simulated, simulated
from zero.plan import Options

BATCH = (torch.zeros(4, 32, dtype=torch.int64),)
POLICY = ModuleWrapPolicy({Block})
adam = partial(Adam, foreach=True)


class Peak:
    """The most bytes on the device at any access of its memory."""

    def __init__(self) -> None:
        self.nbytes = 0

    def note(self, memory: Memory) -> None:
        blocks = {block for block in memory._blocks.values() if block.home is not None}
        self.nbytes = max(self.nbytes, sum(block.nbytes for block in blocks))


@contextmanager
def counting(there: Simulated) -> Iterator[Peak]:
    """Tensors of the CPU that are moved to the device by `to` are copied there first, and the optimizer steps those of
    each by themselves, as where these are two devices."""
    peak, access, to = Peak(), Memory.access, Tensor.to
    on_host = there.memory.is_in_host_memory

    def noted(memory: Memory, *args: Any) -> None:
        access(memory, *args)
        peak.note(memory)

    def moved(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if not isinstance(args[0], torch.device) or not on_host(tensor):
            return to(tensor, *args, **options)
        with there.memory.paused():
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
        return made.copy_(tensor, non_blocking=True)

    def grouped(lists: Sequence[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
        places: dict[Any, list[int]] = {}
        for place, tensor in enumerate(lists[0]):
            places.setdefault((on_host(tensor), tensor.dtype), []).append(place)
        return {key: ([[one[n] for n in own] if one else [] for one in lists], own) for key, own in places.items()}

    by_device = mock.patch.object(Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(grouped))
    with mock.patch.object(Memory, "access", noted), mock.patch.object(Tensor, "to", moved), by_device:
        yield peak


def measured(stage: str, world: int, offload: Any, precision: zero.MixedPrecision) -> tuple[int, int]:
    """Bytes on the device at the peak of a settled step, and in the CPU's memory between its backward and its step."""
    with simulated() as there, counting(there) as peak:
        kept = {"reshard_after_forward": stage == "3"}
        model: nn.Module = zero.FSDP(
            Model(),
            process_group=there.comm(0, world),
            auto_wrap_policy=POLICY,
            mixed_precision=precision,
            offload=offload,
            **kept,
        )
        optimizer = adam(model.parameters())
        for _ in range(3):
            peak.nbytes = 0
            model(*BATCH).backward()
            held = there.memory.on_cpu()
            optimizer.step()
            optimizer.zero_grad()
        return peak.nbytes, held


HALF = zero.MixedPrecision(param_dtype=torch.bfloat16)
ALL = [
    (stage, world, zero.CPUOffload(ratio=ratio), precision)
    for stage in ("3", "3 kept")
    for world in (1, 2)
    for ratio in (1.0, 0.5)
    for precision in (zero.MixedPrecision(), HALF)
]


CASES = ALL if matrix.WHOLE else [ALL[number] for number in (1, 6, 11, 12)]


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "world", "offload", "precision"), CASES, ids=str)
def test_offload_at_stage_3_is_planned_within_one_percent(stage, world, offload, precision):
    options = Options(offload=offload, backend="nccl", precision=precision)
    how = {"optimizer": adam, "auto_wrap_policy": POLICY, "batch": BATCH}
    cost = zero.plan(Model(), world_size=world, options=options, stages=[stage], **how).cost(stage)
    peak, held = measured(stage, world, offload, precision)
    assert cost.peak == pytest.approx(peak, rel=0.01)
    assert cost.host == pytest.approx(held, rel=0.01)
