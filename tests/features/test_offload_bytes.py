"""Bytes between device and CPU in a settled step with CPUOffload, and bytes that the CPU then holds, counted on the
simulated GPU: those that the tables in docs/memory.md have for this rank's shards, and nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.optim.adam as adam
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam

import zero
from simulated.memory import AN_OPERATOR, FROM_CPU, NUMBERS, TO_CPU
from simulated.scenarios import HALF, RANK, WORLD, sgd, step
from simulated.world import Simulated, simulated
from zero.oss.optimizer import set_bucket_size

WIDTH = 64
NUMEL = WIDTH * WIDTH
"""Of each of the four parameters. Nothing is padded: a quarter of it ends where a shard may end."""
OWNED = 4 * NUMEL // WORLD


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
        return self.last(self.blocks(x.repeat(1, WIDTH // 8)))


def crossed(there: Simulated, model: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Bytes of one step after three. Nobody lists the parameters in between. dtype: of the inputs."""
    for number in range(4):
        if number == 3:
            there.memory.crossed.clear()
        optimizer.zero_grad()
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()
        optimizer.step()
    return dict(there.memory.crossed)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize(
    ("stage", "dtype", "world", "leaving"),
    [
        (1, torch.float32, WORLD, 4),
        (2, torch.float32, WORLD, 4),
        (1, torch.bfloat16, WORLD, 2),
        (2, torch.bfloat16, WORLD, 4),
        (2, torch.bfloat16, 1, 4),
    ],
)
def test_gradients_go_to_the_cpu_and_stepped_shards_come_back_in_the_dtype_of_the_parameters(
    stage, dtype, world, leaving, ratio
):
    """Each parameter has a bucket."""
    with simulated() as there:
        module = Net().to(dtype)
        comm = there.comm(min(RANK, world - 1), world)
        optimizer = zero.OSS(module.parameters(), sgd, comm, offload=zero.CPUOffload(ratio=ratio))
        set_bucket_size(optimizer, NUMEL)
        model = zero.ShardedDDP(module, optimizer) if stage == 2 else module
        found = crossed(there, model, optimizer, dtype)
    owned = ratio * 4 * NUMEL // world
    assert found == {TO_CPU: leaving * owned, FROM_CPU: dtype.itemsize * owned, NUMBERS: 4 * ratio}


@pytest.mark.parametrize(
    ("options", "offload", "gathered", "leaving", "world"),
    [
        ({}, {}, 2 * 2 + 2, 4, WORLD),  # the block that ran last, and the root unit, stay unsharded for backward
        ({"mixed_precision": HALF}, {}, 2 * 2 + 2, 4, WORLD),
        ({"mixed_precision": HALF}, {}, 2 * 3 + 1, 4, 1),  # the block that ran last does not
        ({"reshard_after_forward": False}, {}, 4, 4, WORLD),
        ({}, {"ratio": 0.5}, 2 + 1, 4, WORLD),  # of two units, of which one stays unsharded for backward
    ],
    ids=["float32", "16 bits", "one rank", "kept", "half"],
)
def test_at_stage_3_shards_go_to_the_device_for_forward_and_for_backward(options, offload, gathered, leaving, world):
    """In float32 also where the device computes in 16 bits.

    gathered: units, some of them twice, in multiples of float32's bytes.
    """
    home = zero.CPUOffload(**offload)
    with simulated() as there:
        policy = ModuleWrapPolicy({Block})
        comm = there.comm(min(RANK, world - 1), world)
        model = zero.FSDP(Net(), process_group=comm, auto_wrap_policy=policy, offload=home, **options)
        # One by one: torch steps at once what is on one device, and all tensors are on one here.
        found = crossed(there, model, sgd(model.parameters(), foreach=False))
    assert found == {TO_CPU: leaving * home.ratio * 4 * NUMEL // world, FROM_CPU: 4 * gathered * NUMEL // world}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_left_in_16_bits_train_to_the_same_bits(stage):
    """Of a rank by itself they are what they were. They add up over two backwards in float32, as on the device."""
    trained = []
    for offload in (None, zero.CPUOffload()):
        torch.manual_seed(0)
        module = Net()
        with simulated() as there:
            comm = there.comm(0, 1)
            if stage == 3:
                policy = ModuleWrapPolicy({Block})
                model = zero.FSDP(module, comm, auto_wrap_policy=policy, mixed_precision=HALF, offload=offload)
                optimizer: Any = sgd(model.parameters())
            else:
                params = module.to(torch.bfloat16).parameters()
                optimizer = zero.OSS(params, sgd, comm, master_dtype=torch.float32, offload=offload)
                model = zero.ShardedDDP(module, optimizer) if stage == 2 else module
            for number in range(6):
                optimizer.zero_grad()
                for backward in range(1 + number % 2):
                    model(torch.randn(2, 8, dtype=torch.bfloat16) + backward).square().sum().backward()
                optimizer.step()
            trained.append([param.detach().clone() for param in model.parameters()])
    for ours, plain in zip(*trained, strict=True):
        assert torch.equal(ours, plain)


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


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_with_adam_the_cpu_holds_16_bytes_of_an_element_that_a_rank_owns(stage, ratio):
    """4 of what is stepped, 8 of Adam's state, and 4 of the gradient: at stage 1 only during the step. Of what is not
    offloaded, the device holds shards at stage 3 and the state."""
    in_step: list[int] = []
    optim = partial(Adam, foreach=True)

    steps = adam.adam

    def noted(*args: Any, **options: Any) -> None:
        in_step.append(there.memory.on_cpu())
        steps(*args, **options)

    with simulated() as there, mock.patch.object(adam, "adam", noted):
        comm, offload = there.comm(RANK, WORLD), zero.CPUOffload(ratio=ratio)
        module: nn.Module = Net()
        if stage == 3:
            policy = ModuleWrapPolicy({Block})
            model: nn.Module = zero.FSDP(module, process_group=comm, auto_wrap_policy=policy, offload=offload)
            optimizer: Any = optim(model.parameters())
        else:
            optimizer = zero.OSS(module.parameters(), optim, comm, offload=offload)
            set_bucket_size(optimizer, NUMEL)
            model = zero.ShardedDDP(module, optimizer) if stage == 2 else module
        step(model, optimizer)
        optimizer.zero_grad()
        at_rest, on_device = there.memory.on_cpu(), there.memory.on_device()
        model(torch.ones(2, 8)).sum().backward()
        before_step = there.memory.on_cpu()
        in_step.clear()
        optimizer.step()
        after_step = there.memory.on_cpu()
    few = 4096  # counts of steps, and a sample of gradients
    offloaded, stays = ratio * OWNED, (1 - ratio) * OWNED
    assert 12 * offloaded <= at_rest < 12 * offloaded + few
    held = 12 * stays if stage == 3 else 16 * NUMEL + 8 * stays
    assert held <= on_device < held + few
    gradients = 0 if stage == 1 else 4 * offloaded
    for when in (before_step, after_step):
        assert gradients <= when - at_rest < gradients + few
    assert 16 * offloaded <= max(in_step) < 16 * offloaded + few
