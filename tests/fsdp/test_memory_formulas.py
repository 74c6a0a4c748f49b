"""Peaks of a step, and of building from the meta device, by formula, for what tests/test_memory.py does not have.

As there: every storage that is alive counts, P is the bytes of the parameters in float32, S the ranks that they are cut
over, B the bytes of the largest unit as it is gathered. Adam: its state is 2 P, gradients are P.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam

import ranks
import zero
from models import FeedForward, unit_bytes
from sidebyside import on_mesh
from transports import READS, overlapping
from zero.plan.meter import Meter

WIDTH, INNER, BLOCKS = 192, 512, 8  # 0.75 MiB a block; 6 MiB in all


def build() -> nn.Module:
    return nn.Sequential(*(FeedForward(WIDTH, INNER) for _ in range(BLOCKS)))


def size() -> int:
    with torch.device("meta"):
        return sum(param.nbytes for param in build().parameters())


def wrap(model: nn.Module, world: int, options: dict[str, Any]) -> zero.FSDP:
    return zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({FeedForward}), **on_mesh(world, options))


def peak_of_a_step(rank: int, world: int, options: dict[str, Any], held_back: int) -> tuple[int, int]:
    """held_back: backwards under no_sync before the one that is sent. The peak, and B."""
    x = torch.randn(2, WIDTH)
    with Meter() as memory:
        model = wrap(build(), world, options)
        optimizer = Adam(model.parameters())
        peaks = []
        for step in range(3):
            memory.reset_peak()
            for number in range(held_back + 1):
                with model.no_sync() if number < held_back else nullcontext():
                    model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step:  # the optimizer has its state by then
                peaks.append(memory.peak())
        return min(peaks), unit_bytes(model)  # now and then a thread of Gloo drops its buffer a moment late


@cache
def peaks(kind: str, world: int) -> list[tuple[int, int]]:
    options, held_back, _ = KINDS[kind]
    return ranks.run(peak_of_a_step, world, args=(options, held_back))


BF16 = zero.MixedPrecision(param_dtype=torch.bfloat16)
BF16_SENT_WIDE = zero.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

KINDS: dict[str, tuple[dict[str, Any], int, Callable[[int], tuple[float, float]]]] = {
    # options, backwards held back, and for W ranks: how many P, and how many B
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, 0, lambda world: (4, 2)),
    "SHARD_GRAD_OP": ({"sharding_strategy": "SHARD_GRAD_OP"}, 0, lambda world: (1 + 3 / world, 2)),
    "HYBRID_SHARD": ({"sharding_strategy": "HYBRID_SHARD", "replicas": 2}, 0, lambda world: (4 / (world / 2), 4)),
    "HYBRID_SHARD_ZERO2": (
        {"sharding_strategy": "HYBRID_SHARD_ZERO2", "replicas": 2},
        0,
        lambda world: (1 + 3 / (world / 2), 2),
    ),
    "whole parameters": ({"partition": "whole"}, 0, lambda world: (4 / world, 5)),
    "bf16": ({"mixed_precision": BF16}, 0, lambda world: (4 / world, 5)),
    "bf16, float32 sent": ({"mixed_precision": BF16_SENT_WIDE}, 0, lambda world: (4 / world, 6)),
    "bf16 kept": ({"mixed_precision": BF16, "reshard_after_forward": False}, 0, lambda world: (0.5 + 4 / world, 2)),
    "memory first": ({"prefetch": zero.MEMORY_FIRST}, 0, lambda world: (4 / world, 2)),
    "speed first": ({"prefetch": zero.SPEED_FIRST}, 0, lambda world: (4 / world, 4 if READS else 5)),
    "no_sync": ({}, 2, lambda world: (1 + 3 / world, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_of_a_step_is_within_the_formula(kind):
    world = 4
    share, buffers = KINDS[kind][2](world)
    for peak, largest in peaks(kind, world):
        assert size() / 20 < largest < size() / 6
        formula = share * size() + buffers * largest + 0.03 * size()  # activations
        in_b = (peak - share * size()) / largest
        assert peak <= formula, f"{share:.2f} P + {in_b:.2f} B where {buffers} B are allowed"
        assert peak >= 0.75 * formula, f"{share:.2f} P + {in_b:.2f} B: the formula says more than it needs to"


@pytest.mark.parametrize(
    ("options", "buffers"),
    [({}, 4.25), ({"mixed_precision": BF16}, 5.5), ({"prefetch": zero.MEMORY_FIRST}, 2.25)],
    ids=str,
)
@ranks.on(4)
def test_where_transfers_overlap_computing_all_that_does_is_within_the_formula(rank, world, options, buffers):
    """Parameters and gradients of the unit that computes, parameters of the next, gradients of the last and what comes
    of them: 4 B + B / S. Where 16 bits travel, what comes is B, and its sums in float32 2 B / S."""
    with overlapping():
        peak, largest = peak_of_a_step(rank, world, options, 0)
    formula = 4 / world * size() + buffers * largest + 0.03 * size()
    in_b = (peak - 4 / world * size()) / largest
    assert 0.75 * formula <= peak <= formula, f"{in_b:.2f} B where {buffers} B are allowed"


def live_later(memory: Meter) -> int:
    gc.collect()
    time.sleep(0.01)
    return memory.live()


@pytest.mark.parametrize(
    "options", [{}, {"partition": "whole"}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"mixed_precision": BF16}], ids=str
)
@pytest.mark.parametrize("real_on_rank_0", [False, True], ids=["meta everywhere", "rank 0 real"])
@ranks.on(4)
def test_a_model_from_the_meta_device_is_never_whole(rank, world, real_on_rank_0, options):
    """Tensors on the meta device take nothing."""
    with nullcontext() if real_on_rank_0 and rank == 0 else torch.device("meta"):
        model = build()
    with Meter(param for param in model.parameters() if param.is_meta) as memory:
        wrapped = wrap(model, world, options)
        peak = memory.peak()
    left = min(live_later(memory) for _ in range(10))  # now and then a thread of Gloo drops its buffer late
    assert not any(param.is_meta for param in wrapped.parameters())
    unit = unit_bytes(wrapped) * 2 if "mixed_precision" in options else unit_bytes(wrapped)  # values are float32
    assert left <= 1.1 * size() / world
    if rank or not real_on_rank_0:
        assert peak <= 1.1 * size() / world + 3 * unit, f"{(peak - size() / world) / unit:.2f} units"
