"""The benchmarks measure what they say: bytes on the wires, of each stage and contestant; and what a step launches."""

import sys
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
import zero
from processes import ROOT
from zoo import CONTEXT, GPT, VOCABULARY

BENCHMARKS = str(ROOT / "benchmarks")
HOSTS, GPUS = 2, 4


def wires(rank: int, world: int) -> tuple[int, dict[str, float]]:
    """Parameters of a model, and ms that the wires of a rank of two hosts take in a step of each contestant."""
    sys.path.insert(0, BENCHMARKS)
    from contestants import How
    from fake import Wiring
    from launch import Rank
    from models import gpt
    from wires import measure

    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    task, how = gpt(1, 32, 512, tokens=128), How(dtype=torch.bfloat16)
    here, wiring = Rank(2, 4, torch.device("cpu")), Wiring(bandwidth=0.1, gpus_a_host=2, nics=1)
    found = {name: measure(name, task, how, wiring, 1, here)["wire ms"] for name in ("alone", *SENT)}
    return sum(param.numel() for param in task.build("meta").parameters()), found


SENT = {"zero1": 4 + 2 + 2, "zero2": 4 + 2, "zero3kept": 4 + 2, "fsdp2": 4 + 2 * 2}
"""Bytes an element that each link carries: gradients in float32, their averages at stage 1 and parameters in 16
bits, once, or before forward and backward."""


def test_wires_take_as_long_as_their_bytes_at_the_bandwidth():
    [(numel, took)] = ranks.run(wires, 1, bare=True, fresh=True)
    assert took.pop("alone") == 0
    bytes_an_element = {name: ms / 1000 * 0.1e9 / (numel * 3 / 4) for name, ms in took.items()}
    assert bytes_an_element == pytest.approx(SENT, rel=0.05)


def simulate(rank: int, world: int) -> tuple[int, dict[str, tuple[float, float, dict[str, int]]]]:
    """Elements of a model of one block; of each contestant the seconds of a step, with wires and without, and its bytes
    by kind."""
    sys.path.insert(0, BENCHMARKS)
    import simulate

    dist.init_process_group("fake", rank=1, world_size=HOSTS * GPUS, store=FakeStore())
    case = simulate.Case(
        simulate.Network(HOSTS, GPUS, 1, simulate.NIC, simulate.LINK), 2048, *simulate.SENT["bfloat16, float32"]
    )
    found = {}
    with mock.patch.object(simulate, "LAYERS", 1):
        for name in ("zero2", "zero3", "fsdp2"):
            step, alone = (simulate.step_of(name, case, wires=wires) for wires in (True, False))
            found[name] = step.seconds, alone.seconds, dict(step.sent)
    model = simulate.GPT(1, simulate.WIDTH // simulate.SCALE, simulate.WORDS // simulate.SCALE, tied=False)
    return sum(param.numel() for param in model.parameters()) * simulate.SCALE**2, found


def test_zero_and_fsdp2_send_gradients_by_the_ring_of_float32():
    [(numel, found)] = ranks.run(simulate, 1, bare=True, fresh=True)
    assert [*found] == ["zero2", "zero3", "fsdp2"]
    for seconds, alone, sent in found.values():
        assert {*sent} == {"gather", "reduce"} and 0 < alone < seconds
        assert sent["reduce"] == pytest.approx(4 * numel * 7 // 8, rel=0.01)


def weigh(rank: int, world: int) -> dict[str, tuple[int, int, int, int]]:
    """Of each stage what is resident, the peak, collectives, and bytes sent."""
    sys.path.insert(0, BENCHMARKS)
    import loop
    from contestants import How
    from launch import Rank
    from models import gpt

    found = {}
    for name in ("ddp", "zero1", "zero2", "zero3"):
        weight = loop.weigh(name, gpt(2, 64), How(), Rank(rank, world, torch.device("cpu")))
        resident = weight.parameters + weight.gradients + weight.optimizer
        found[name] = resident, weight.tensors, weight.calls, weight.sent
    return found


def test_each_stage_holds_less_and_its_bytes_are_counted():
    [found, _] = ranks.run(weigh, 2, fresh=True)
    resident, peaks, calls, sent = zip(*found.values(), strict=True)
    assert [*resident] == sorted(resident, reverse=True) and [*peaks] == sorted(peaks, reverse=True)
    assert min(calls) >= 1 and sent[0] == pytest.approx(resident[0] / 4, rel=0.01)
    assert sent[2] == pytest.approx(sent[0], rel=0.05) and sent[3] > sent[2]


# What one settled step launches, counted on the fake process group, which stands for a backend such as NCCL.


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


@pytest.mark.slow
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
