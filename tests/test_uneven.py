"""Data that ends earlier on some ranks than on others: zero.join at every stage, beside one process that adds up the
gradients of those ranks that have data."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import ranks
import zero
from reference import MOMENTUM

WIDTH = 6
STAGES = [0, 1, 2, 3]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.dropout(self.norm(self.linear(x))))


class Net(nn.Module):
    """odd: a parameter is used by batches with a positive sum only, and one output by no loss."""

    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        self.odd = odd
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        if odd:
            self.second, self.sometimes = nn.Linear(WIDTH, 2), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.odd and x.sum() > 0:
            x = x * self.sometimes
        for block in self.blocks:
            x = block(x)
        return {"out": self.head(x)} | ({"second": self.second(x)} if self.odd else {})


def built(*, odd: bool = False) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net(odd=odd)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * rank + number))


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    loss: Tensor = model(batch(rank, number))["out"].square().mean()
    return loss


@dataclass(frozen=True)
class Loop:
    """counts: batches of each rank. micro: batches a step. bad: the batch of rank 1 whose loss is infinite, where
    losses are scaled. options: of FSDP."""

    counts: tuple[int, ...] = (3, 5)
    optim: Any = SGD
    divide: bool = True
    micro: int = 1
    clip: float | None = None
    gamma: float = 1.0
    bad: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def net(self, stage: int) -> Net:
        return built(odd=stage > 1 and "auto_wrap_policy" not in self.options)

    def optimizer(self, params: Any) -> Optimizer:
        return self.optim(params, **(MOMENTUM if self.optim is SGD else {"lr": 0.01}))


@dataclass(frozen=True)
class Trained:
    """On one rank: its losses, what the model came to, and the state of the random number generator."""

    losses: list[float]
    weights: dict[str, Tensor]
    random: Tensor


def reference(loop: Loop, net: nn.Module) -> list[Trained]:
    """In one process, with buffers, random numbers and gradients of each rank apart."""
    world = len(loop.counts)
    optimizer = loop.optimizer(net.parameters())
    scheduler = ExponentialLR(optimizer, loop.gamma)
    params = [*net.parameters()]
    buffers = [[buffer.clone() for buffer in net.buffers()] for _ in range(world)]
    random = [torch.Generator().manual_seed(rank).get_state() for rank in range(world)]
    losses: list[list[float]] = [[] for _ in range(world)]
    sums: list[dict[nn.Parameter, Tensor]] = [{} for _ in range(world)]
    synchronised = True
    for number in range(max(loop.counts)):
        active = [rank for rank in range(world) if number < loop.counts[rank]]
        if synchronised:
            buffers = [[buffer.clone() for buffer in buffers[active[0]]] for _ in range(world)]
        synchronised = (number + 1) % loop.micro == 0
        for rank in active:
            torch.set_rng_state(random[rank])
            for buffer, own in zip(net.buffers(), buffers[rank], strict=True):
                buffer.copy_(own)
            net.zero_grad()
            loss = loss_of(net, rank, number)
            loss.backward()
            losses[rank].append(loss.item())
            random[rank], buffers[rank] = torch.get_rng_state(), [buffer.clone() for buffer in net.buffers()]
            for param in params:
                if param.grad is not None:
                    gradient = param.grad if loop.divide else param.grad * (world / len(active))
                    sums[rank][param] = sums[rank][param] + gradient if param in sums[rank] else gradient.clone()
        if synchronised:
            for param in params:
                given = [own[param] for own in sums if param in own]
                param.grad = sum(given[1:], given[0]) / world if given else None
            sums = [{} for _ in range(world)]
            if loop.clip is not None:
                torch.nn.utils.clip_grad_norm_(params, loop.clip)
            if number != loop.bad:
                optimizer.step()
            scheduler.step()
    for buffer, own in zip(net.buffers(), buffers[active[0]], strict=True):
        buffer.copy_(own)
    return [Trained(losses[rank], net.state_dict(), random[rank]) for rank in range(world)]


def wrapped(stage: int, loop: Loop, net: nn.Module) -> tuple[Any, Optimizer]:
    if stage == 3:
        model = zero.FSDP(net, **loop.options)
        return model, loop.optimizer(model.parameters())
    if stage == 0:
        return DistributedDataParallel(net), loop.optimizer(net.parameters())
    optimizer = zero.OSS(net.parameters(), loop.optim, **(MOMENTUM if loop.optim is SGD else {"lr": 0.01}))
    return (DistributedDataParallel(net) if stage == 1 else zero.ShardedDDP(net, optimizer)), optimizer


def clipped(model: Any, optimizer: Optimizer, max_norm: float) -> None:
    if isinstance(model, zero.FSDP):
        model.clip_grad_norm_(max_norm)
    elif isinstance(model, zero.ShardedDDP):
        optimizer.clip_grad_norm(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def trained(rank: int, loop: Loop, stage: int) -> Trained:
    torch.manual_seed(rank)
    model, optimizer = wrapped(stage, loop, loop.net(stage))
    scheduler = ExponentialLR(optimizer, loop.gamma)
    scaler = zero.GradScaler("cpu", init_scale=1024.0, enabled=loop.bad is not None)
    losses = []
    with zero.join(model, optimizer, scheduler, scaler, divide_by_initial_world_size=loop.divide):
        for number in range(loop.counts[rank]):
            reduced = (number + 1) % loop.micro == 0
            if number % loop.micro == 0:
                optimizer.zero_grad()
            with nullcontext() if reduced else model.no_sync():
                loss = loss_of(model, rank, number)
                losses.append(loss.item())
                scaler.scale(loss * torch.inf if rank and number == loop.bad else loss).backward()
            if reduced:
                if loop.clip is not None:
                    clipped(model, optimizer, loop.clip)
                if number % 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
    assert scheduler.last_epoch == max(loop.counts) // loop.micro
    assert scaler.get_scale() == (1.0 if loop.bad is None else 512.0)
    random = torch.get_rng_state()
    return Trained(losses, zero.full_state_dict(model), random)


def _beside_the_reference(rank: int, world: int, stage: int, loops: list[Loop], close: float) -> None:
    for loop in loops:
        got, expected = trained(rank, loop, stage), reference(loop, loop.net(stage))[rank]
        assert torch.equal(got.random, expected.random), f"{loop}: random numbers"
        assert got.losses == pytest.approx(expected.losses, rel=close, abs=close), loop
        for name, value in expected.weights.items():
            said = f"{loop}: {name} "
            torch.testing.assert_close(got.weights[name], value, rtol=close, atol=close, msg=lambda m, s=said: s + m)


EXACT = [
    Loop((3, 5), SGD),
    Loop((3, 5), Adam, divide=False),
    Loop((5, 3), SGD, divide=False, gamma=0.8),
    Loop((5, 3), Adam, gamma=0.8),
    Loop((5, 8), SGD, micro=2),
    Loop((5, 8), SGD, divide=False, micro=2, gamma=0.8),
    Loop((3, 6), SGD, bad=4),
    Loop((3, 6), Adam, bad=5, gamma=0.8),
]
"""Two ranks, of which the sums are the same in whatever order."""
CLOSE = [Loop((5, 3), Adam, clip=0.05, gamma=0.5)]
THREE = [Loop((3, 5, 4), SGD), Loop((3, 5, 4), Adam, divide=False)]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_to_the_bits_of_one_process(stage):
    ranks.run(_beside_the_reference, 2, args=(stage, EXACT, 0.0), timeout=30)
    ranks.run(_beside_the_reference, 2, args=(stage, CLOSE, 1e-6), timeout=30)


@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks_train_to_the_numbers_of_one_process(stage):
    ranks.run(_beside_the_reference, 3, args=(stage, THREE, 1e-6), timeout=30)


PREFETCH = [zero.MEMORY_FIRST, zero.SPEED_FIRST, zero.BackwardPrefetch.BACKWARD_POST]


@pytest.mark.parametrize("options", [{"prefetch": one} for one in PREFETCH] + [{"sharding_strategy": "SHARD_GRAD_OP"}])
def test_units_are_gathered_in_the_same_order_however_far_ahead(options):
    policy = ModuleWrapPolicy({Block, nn.Linear})
    loops = [Loop((5, 3), micro=micro, options=options | {"auto_wrap_policy": policy}) for micro in (1, 2)]
    ranks.run(_beside_the_reference, 2, args=(3, loops, 0.0), timeout=30)


def _replicated(rank, world):
    within, across = [dist.new_subgroups_by_enumeration(groups)[0] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    options = {"sharding_strategy": "HYBRID_SHARD", "process_group": (within, across)}
    _beside_the_reference(rank, world, 3, [Loop((2, 3, 5, 4), divide=False, options=options)], 1e-6)


def test_shards_may_be_replicated():
    ranks.run(_replicated, 4, timeout=30)
