"""What one settled step launches, counted on the fake process group, which stands for a backend such as NCCL."""

from collections import Counter
from typing import Any

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

BLOCKS = 3


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


def stage_3(model: nn.Module) -> tuple[nn.Module, Any]:
    wrapped = zero.FSDP(model)
    return wrapped, torch.optim.SGD(wrapped.parameters(), 0.1, foreach=True)


def fsdp2(model: Any) -> tuple[nn.Module, Any]:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), 0.1, foreach=True)


@ranks.on(bare=True, fresh=True)
def test_a_step_launches_as_much_on_many_ranks_and_as_fsdp2_does(rank, world):
    """In the step of the fewest kernels once two are done.

    Autograd copies a gradient to which anybody in the process has a reference, be it for a moment only.
    """
    found = {}
    for build, world in ((stage_2, 8), (stage_2, 64), (stage_3, 8), (stage_3, 64), (fsdp2, 64)):
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        torch.manual_seed(0)
        model, optimizer = build(GPT(64, BLOCKS))
        tokens = torch.randint(VOCABULARY, (2, CONTEXT))
        counts = []
        for _ in range(5):
            optimizer.zero_grad()
            with Count() as count:
                model(tokens).square().mean().backward()
                optimizer.step()
            counts.append((count.of_each, count.collectives))
        found[build.__name__, world] = min(counts[2:], key=lambda count: count[0].total())
        dist.destroy_process_group()
    for stage in ("stage_2", "stage_3"):
        (few, collectives), (many, those_of_many) = found[stage, 8], found[stage, 64]
        assert many.total() <= 1.1 * few.total(), many - few
        assert those_of_many == collectives
    (ours, of_stage_3), (theirs, _) = found["stage_3", 64], found["fsdp2", 64]
    assert ours.total() <= 1.3 * theirs.total(), ours - theirs
    assert of_stage_3 <= 3 * (BLOCKS + 1) + 6, "three a unit"
    assert found["stage_2", 64][1] <= 2 * 1 + 4, "two a bucket, of which the model fills one"
