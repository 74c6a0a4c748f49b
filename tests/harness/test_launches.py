"""What one settled step launches, counted on the fake process group, which stands for a backend such as NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
import zero
from zoo import CONTEXT, GPT, VOCABULARY

pytestmark = pytest.mark.slow

BLOCKS, WORLD = 6, 64


class Launched(NamedTuple):
    kernels: int
    collectives: int
    of_each: Counter[str]  # kernels, by operator


class Count(TorchDispatchMode):
    """Operators that compute or copy, and collectives. Those that only make views or allocate are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.of_each: Counter[str] = Counter()
        self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            self.collectives += name not in ("c10d::wait_tensor", "c10d::monitored_barrier_")
        elif not (
            func.is_view or any(shard in name for shard in ("empty", "view", "detach", "set_", "resize_", "alias"))
        ):
            self.of_each[name] += 1
        return func(*args, **(kwargs or {}))


def stage_2(model: nn.Module) -> tuple[nn.Module, Any]:
    optimizer = zero.OSS(model.parameters(), torch.optim.SGD, lr=0.1, foreach=True)
    return zero.ShardedDDP(model, optimizer), optimizer


def stage_3(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    wrapped = zero.FSDP(model, **options)
    return wrapped, torch.optim.SGD(wrapped.parameters(), 0.1, foreach=True)


def stage_3_bf16(model: nn.Module) -> tuple[nn.Module, Any]:
    return stage_3(model, mixed_precision=zero.MixedPrecision(param_dtype=torch.bfloat16))


def fsdp2(model: Any) -> tuple[nn.Module, Any]:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), 0.1, foreach=True)


def launched(_: int, __: int, build: Callable[[nn.Module], tuple[nn.Module, Any]], world: int) -> Launched:
    """In the step of the fewest kernels once two are done.

    Autograd copies a gradient to which anybody in the process has a reference, be it for a moment only.
    """
    dist.init_process_group("fake", rank=3, world_size=world, store=FakeStore())
    torch.manual_seed(0)
    model, optimizer = build(GPT(64, BLOCKS))
    tokens = torch.randint(VOCABULARY, (2, CONTEXT))
    counts = []
    for _ in range(6):
        optimizer.zero_grad()
        with Count() as count:
            model(tokens).square().mean().backward()
            optimizer.step()
        counts.append(count)
    count = min(counts[2:], key=lambda count: count.of_each.total())
    return Launched(count.of_each.total(), count.collectives, count.of_each)


@cache
def of(build: Callable[[nn.Module], tuple[nn.Module, Any]], world: int = WORLD) -> Launched:
    return ranks.run(launched, args=(build, world), bare=True, fresh=True)[0]


@pytest.mark.parametrize("build", [stage_2, stage_3, stage_3_bf16])
def test_kernels_do_not_grow_with_the_ranks(build):
    few, many = of(build, 8), of(build)
    assert many.kernels <= 1.1 * few.kernels, many.of_each - few.of_each
    assert many.collectives == few.collectives


def test_stage_3_launches_about_what_fsdp2_does():
    ours, theirs = of(stage_3), of(fsdp2)
    assert ours.kernels <= 1.3 * theirs.kernels, ours.of_each - theirs.of_each


def test_stage_3_takes_three_collectives_a_unit():
    units = BLOCKS + 1
    assert of(stage_3).collectives <= 3 * units + 6


def test_stage_2_takes_two_collectives_a_bucket():
    assert of(stage_2).collectives <= 2 * 1 + 4  # the model fills one
