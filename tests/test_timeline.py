"""What the computing of a settled step waits for, on a simulated GPU: a product takes a second, a transfer 1.5.

A forward of a block is two products, its backward four, so that any one transfer can hide behind a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD

import zero
from simulated.world import Simulated, simulated

WIDTH, BLOCKS, RANK, WORLD = 16, 4, 1, 4


class Block(nn.Module):
    """size: of its parameters. times: how often they are computed with."""

    def __init__(self, size: int = 1, times: int = 1) -> None:
        super().__init__()
        self.times = times
        self.up, self.down = nn.Linear(WIDTH, 2 * size * WIDTH), nn.Linear(2 * size * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.down(torch.relu(self.up(x)))
        return x


class WithRoot(nn.Sequential):
    """The root unit has parameters, too, with which as much is computed before the first block as in one."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(BLOCKS)))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.first(x))
        for block in [*self][:BLOCKS]:
            x = block(x)
        return self.last(x)


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def seconds(operator: Any, args: Sequence[Any]) -> float:
    return float(operator.name().startswith(("aten::addmm", "aten::mm")))


def transfer(nbytes: int) -> float:
    return 1.5 if nbytes > 64 else 0.0


def stalls_of_a_step(there: Simulated, model: nn.Module, optimizer: Any) -> list[str]:
    """In the last of three."""
    for _ in range(3):
        there.device.stalls.clear()
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    return [stall.what.split()[0] for stall in there.device.stalls]


def stage_3(net: nn.Module, **options: Any) -> list[str]:
    with simulated(compute=seconds, transfer=transfer) as there:
        groups: Any = there.comm(RANK, WORLD)
        if options.get("sharding_strategy") == "HYBRID_SHARD":
            groups = (groups, there.comm(0, 2))
        model = zero.FSDP(net, process_group=groups, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
        return stalls_of_a_step(there, model, SGD(model.parameters(), 1e-3, foreach=True))


def stage_2() -> list[str]:
    with simulated(compute=seconds, transfer=transfer) as there:
        net = blocks()
        optimizer = zero.OSS(net.parameters(), SGD, there.comm(RANK, WORLD), lr=1e-3, foreach=True)
        model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=sum(p.numel() for p in net[0].parameters()))
        return stalls_of_a_step(there, model, optimizer)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": zero.MixedPrecision(torch.bfloat16)}], ids=str)
def test_only_the_first_gather_and_the_last_reduction_are_waited_for_at_stage_3(options):
    assert stage_3(blocks(), **options) == ["gather", "reduce"]


def test_so_they_are_where_the_root_has_parameters():
    assert stage_3(WithRoot()) == ["gather", "reduce"]


def test_kept_parameters_are_waited_for_once():
    assert stage_3(blocks(), reshard_after_forward=False) == ["gather", "reduce"]


@pytest.mark.parametrize("seconds_a_byte", [1 / 16384, 1 / 2048, 1 / 512])
def test_kept_parameters_expose_no_more_than_resharding(seconds_a_byte):
    """In mixed precision, with fast links and with such that take longer than the computing."""

    def exposed(**options: Any) -> float:
        half = zero.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
        with simulated(compute=seconds, transfer=lambda nbytes: nbytes * seconds_a_byte) as there:
            comm = there.comm(RANK, WORLD)
            policy = ModuleWrapPolicy({Block})
            model = zero.FSDP(WithRoot(), process_group=comm, auto_wrap_policy=policy, mixed_precision=half, **options)
            stalls_of_a_step(there, model, SGD(model.parameters(), 1e-3, foreach=True))
            return sum(stall.seconds for stall in there.device.stalls)

    assert 0 < exposed(reshard_after_forward=False) <= exposed()


def test_gathers_do_not_wait_for_computing_where_no_memory_is_freed_for_them():
    """The last takes longer than the block before it, but not than all that is computed before."""
    uneven = nn.Sequential(Block(times=5), Block(), Block(), Block(size=4))
    with mock.patch.dict(globals(), transfer=lambda nbytes: nbytes / 4096):
        assert stage_3(uneven, reshard_after_forward=False).count("gather") == 1


def test_without_prefetch_every_transfer_is_waited_for():
    assert stage_3(blocks(), prefetch=zero.MEMORY_FIRST).count("gather") == 2 * BLOCKS


def test_averages_over_replicas_hide_too():
    assert stage_3(blocks(), sharding_strategy="HYBRID_SHARD") == ["gather", "all-reduce"]


def test_the_last_reduction_and_the_gathers_of_the_optimizer_are_waited_for_at_stage_2():
    assert stage_2() == ["reduce", *["gather"] * BLOCKS]
