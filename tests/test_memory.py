"""What each stage holds in memory, at rest and at the peak of a step, against the formulas of the ZeRO paper.

Tensors are accounted exactly: after every operator all storages that are alive are added up, whoever made them. P is
the bytes of the parameters, W the number of ranks, B the bytes of the largest bucket or unit. With float32 and Adam,
parameters and gradients take P each and the optimizer's state 2 P (section 5 of Rajbhandari et al., 2020).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

import matrix
import ranks
import zero
from models import FeedForward, unit_bytes
from transports import TRANSPORTS, calling

WIDTH, INNER, BLOCKS = 256, 768, 8  # 1.5 MiB a block; 12 MiB in all


def model() -> nn.Module:
    return nn.Sequential(*(FeedForward(WIDTH, INNER) for _ in range(BLOCKS)))


def batch() -> Tensor:
    return torch.randn(2, WIDTH)


def accounting() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "accounting.py"
    spec = importlib.util.spec_from_file_location("accounting", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def largest_group(optimizer: zero.OSS) -> int:
    """Bytes: the size of a transfer."""
    return max(group.full.nbytes for group in optimizer.shards.shard_groups)


def at_stage(stage: str) -> tuple[nn.Module, Any, int]:
    """Model, optimizer and B."""
    policy = ModuleWrapPolicy({FeedForward})
    if stage in ("0", "1"):
        inner = model()
        optimizer: Any = Adam(inner.parameters()) if stage == "0" else zero.OSS(inner.parameters(), Adam)
        wrapped: Any = DistributedDataParallel(inner, gradient_as_bucket_view=True)
        return wrapped, optimizer, 0 if stage == "0" else largest_group(optimizer)
    if stage == "2":
        wrapped, optimizer = zero.setup(model(), Adam, stage=2)
        return wrapped, optimizer, largest_group(optimizer)
    wrapped = zero.FSDP(model(), auto_wrap_policy=policy)
    return wrapped, Adam(wrapped.parameters()), unit_bytes(wrapped)


@dataclass(frozen=True)
class Held:
    """Bytes on one rank: at rest, between backward and step, and at the peak of a step."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    largest: int  # B


def hold(rank: int, world: int, stage: str) -> Held:
    account = accounting()
    with account.CpuMemory() as memory:
        wrapped, optimizer, largest = at_stage(stage)
        for _ in range(2):  # until DistributedDataParallel has its final buckets and the optimizer its state
            wrapped(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks = []
        for _ in range(2):  # the least counts: now and then a thread of Gloo drops its buffer a moment late
            memory.reset_peak()
            wrapped(batch()).square().mean().backward()
            resident = account.measure_resident(wrapped, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(memory.peak())
        return Held(resident.parameters, resident.gradients, resident.optimizer, min(peaks), largest)


@cache
def held(stage: str, world: int, transport: str) -> list[Held]:
    return ranks.run(calling, world, args=(transport, hold, stage))


def hold_alone(rank: int, world: int) -> tuple[int, int]:
    """Bytes of the parameters, and of what one process holds between forward and backward besides them."""
    with accounting().CpuMemory() as memory:
        alone = model()
        loss = alone(batch()).square().mean()
        parameters = sum(param.nbytes for param in alone.parameters())
        activations = memory.live() - parameters
        loss.backward()
    return parameters, activations


@cache
def sizes() -> tuple[int, int]:
    return ranks.run(hold_alone, bare=True)[0]


AT_REST = {  # parameters, gradients, optimizer, as functions of W
    "0": lambda world: (1, 1, 2),
    "1": lambda world: (1, 1, 2 / world),
    "2": lambda world: (1, 1 / world, 2 / world),
    "3": lambda world: (1 / world, 1 / world, 2 / world),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", AT_REST)
def test_at_rest_a_stage_holds_what_it_says(stage, transport):
    world = 4
    size, _ = sizes()
    expected = [share * size for share in AT_REST[stage](world)]
    for here in held(stage, world, transport):
        assert [here.parameters, here.gradients, here.optimizer] == pytest.approx(expected, rel=0.01)


PEAKS = {  # in bytes of the parameters, and how many times B more
    "1": lambda world: (2 + 2 / world, 1),
    "2": lambda world: (1 + 3 / world, 2),
    "3": lambda world: (4 / world, 4),
}


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 4] if matrix.WHOLE else [4])
@pytest.mark.parametrize("stage", PEAKS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_peak_of_a_step_is_within_the_formula(stage, world, transport):
    size, activations = sizes()
    assert activations < size / 100
    share, buffers = PEAKS[stage](world)
    for here in held(stage, world, transport):
        assert size / 12 < here.largest < size / 6
        formula = share * size + buffers * here.largest + activations
        assert formula / 2 <= here.peak <= formula, f"{here.peak / size:.3f} P where {formula / size:.3f} P are allowed"


def test_the_accounting_sees_what_ddp_holds():
    size, _ = sizes()
    for here in held("0", 2, TRANSPORTS[0]):
        assert 4 * size <= here.peak < 4.3 * size
