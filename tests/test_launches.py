"""What one settled step launches, counted on the fake process group, which stands for a backend such as NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
import zero
from zero.fsdp.fsdp import running_model

BLOCKS, WIDTH, WORDS = 6, 64, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


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


def launched(_: int, __: int, build: Callable[[nn.Module], tuple[nn.Module, Any]], world: int) -> tuple[Launched, int]:
    """In the step of the fewest kernels once two are done, and the number of shard groups.

    Autograd copies a gradient to which anybody in the process has a reference, be it for a moment only.
    """
    dist.init_process_group("fake", rank=3, world_size=world, store=FakeStore())
    torch.manual_seed(0)
    model, optimizer = build(GPT())
    tokens = torch.randint(WORDS, (2, 16))
    counts = []
    for _ in range(6):
        optimizer.zero_grad()
        with Count() as count:
            model(tokens).backward()
            optimizer.step()
        counts.append(count)
    count = min(counts[2:], key=lambda count: count.of_each.total())
    of_optimizer = optimizer.shards.shard_groups if isinstance(optimizer, zero.OSS) else ()
    groups = running_model(model).index.groups if isinstance(model, zero.FSDP) else of_optimizer
    return Launched(count.of_each.total(), count.collectives, count.of_each), len(groups)


def of(build: Callable[[nn.Module], tuple[nn.Module, Any]], world: int) -> tuple[Launched, int]:
    return ranks.run(launched, args=(build, world), bare=True, fresh=True)[0]


@pytest.mark.parametrize("build", [stage_2, stage_3, stage_3_bf16])
def test_kernels_do_not_grow_with_the_ranks(build):
    few, many = of(build, 8)[0], of(build, 64)[0]
    assert many.kernels <= 1.1 * few.kernels, many.of_each - few.of_each
    assert many.collectives == few.collectives


def test_stage_3_launches_about_what_fsdp2_does():
    ours, theirs = of(stage_3, 64)[0], of(fsdp2, 64)[0]
    assert ours.kernels <= 1.3 * theirs.kernels, ours.of_each - theirs.of_each


def test_stage_3_takes_three_collectives_a_unit():
    found, groups = of(stage_3, 64)
    assert groups == BLOCKS + 1
    assert found.collectives <= 3 * groups + 6, found


def test_stage_2_takes_two_collectives_a_bucket():
    found, groups = of(stage_2, 64)
    assert found.collectives <= 2 * groups + 4, found
