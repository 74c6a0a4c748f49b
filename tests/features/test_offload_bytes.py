"""Bytes between device and CPU in a settled step with CPUOffload, counted on the simulated GPU: those that the table in
docs/memory.md has for this rank's shards, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import zero
from simulated.memory import AN_OPERATOR, FROM_CPU, NUMBERS, TO_CPU
from simulated.scenarios import HALF, RANK, WORLD, sgd, step
from simulated.world import Simulated, simulated

WIDTH = 16
NUMEL = WIDTH * WIDTH
"""Of each of the four parameters. Nothing is padded: a quarter of it ends where a shard may end."""


class Block(nn.Linear):
    """A unit at stage 3."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)


class Net(nn.Module):
    """Three blocks, and a parameter of the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x.repeat(1, 2)))


def crossed(there: Simulated, model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes of one step after three."""
    for _ in range(3):
        step(model, optimizer)
    there.memory.crossed.clear()
    step(model, optimizer)
    return dict(there.memory.crossed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_go_to_the_cpu_and_stepped_shards_come_back_in_the_dtype_of_the_parameters(stage, dtype):
    """Gradients leave in float32 also where the parameters have 16 bits."""
    with simulated() as there:
        module = Net().to(dtype)
        optimizer = zero.OSS(module.parameters(), sgd, there.comm(RANK, WORLD), offload=zero.CPUOffload())
        model = zero.ShardedDDP(module, optimizer) if stage == 2 else module
        found, buckets = crossed(there, model, optimizer), len(optimizer.shard_groups)
    owned = 4 * NUMEL // WORLD
    assert found == {TO_CPU: 4 * owned, FROM_CPU: dtype.itemsize * owned, NUMBERS: buckets}


@pytest.mark.parametrize(
    ("options", "gathered"),
    [
        ({}, 2 * 2 + 2),  # the block that ran last, and the root unit, stay unsharded for backward
        ({"mixed_precision": HALF}, 2 * 2 + 2),
        ({"reshard_after_forward": False}, 4),
    ],
    ids=["float32", "16 bits", "kept"],
)
def test_at_stage_3_shards_go_to_the_device_for_forward_and_for_backward(options, gathered):
    """In float32 also where the device computes in 16 bits. gathered: units, some of them twice."""
    with simulated() as there:
        policy = ModuleWrapPolicy({Block})
        comm, offload = there.comm(RANK, WORLD), zero.CPUOffload()
        model = zero.FSDP(Net(), process_group=comm, auto_wrap_policy=policy, offload=offload, **options)
        found = crossed(there, model, sgd(model.parameters()))
    assert found == {TO_CPU: 4 * 4 * NUMEL // WORLD, FROM_CPU: 4 * gathered * NUMEL // WORLD}


def test_an_operator_on_both_is_noticed():
    """On a GPU it would raise, or copy: what is compared after a step, as weights that were loaded."""
    with simulated() as there:
        module = Net()
        optimizer = zero.OSS(module.parameters(), sgd, there.comm(RANK, WORLD), offload=zero.CPUOffload())
        step(module, optimizer)
        there.memory.crossed.clear()
        for param in module.parameters():
            param.data.mul_(0.9)
        step(module, optimizer)
        assert there.memory.crossed[AN_OPERATOR]
