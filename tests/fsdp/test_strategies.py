"""Sharding strategies: each trains as torch alone does, and keeps what it says. What they send is in test_memory.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import gpus
import matrix
import ranks
import zero
from runs import case_loss, side_by_side
from zoo import CASES, GPT, OPTIMIZERS

ONE_GROUP = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
HYBRID = ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
TORCHS = torch.distributed.fsdp.ShardingStrategy


def mesh(replicas: int, shards: int) -> dict[str, Any]:
    return {"device_mesh": init_device_mesh(gpus.DEVICE, (replicas, shards))}


def pair(replicas: int, shards: int) -> dict[str, Any]:
    """The groups of the same mesh by hand. Every rank creates all of them, in the same order."""
    rows = [list(range(row * shards, (row + 1) * shards)) for row in range(replicas)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    within, _ = dist.new_subgroups_by_enumeration(rows)
    across, _ = dist.new_subgroups_by_enumeration(columns)
    return {"process_group": (within, across)}


GROUPS: dict[str, Callable[..., dict[str, Any]]] = {
    "mesh": mesh,
    "pair": pair,
    "one mesh": lambda *shape: {"device_mesh": init_device_mesh(gpus.DEVICE, shape)},
}

Placed = tuple[Any, str | None, tuple[int, ...]]
"""A strategy, how its groups are given, and their sizes: replicas and shards, or one group's."""


def options(placed: Placed) -> dict[str, Any]:
    strategy, groups, shape = placed
    return {"sharding_strategy": strategy, **(GROUPS[groups](*shape) if groups else {})}


def name_of(placed: Placed) -> str:
    strategy, groups, shape = placed
    return " ".join([strategy, *([groups, "x".join(map(str, shape))] if groups else [])])


TRAINED = [("gpt", "adamw", 1, 0), ("gpt", "sgd", 3, 0), ("mlp", "sgd", 3, 2)]
"""Case, optimizer, backwards in a step, and how many of them under no_sync."""


def trains(rank: int, world: int, placed: Placed, tolerance: float = 0.0) -> None:
    for name, optim, micro, unsent in TRAINED:
        if tolerance and optim == "adamw":
            continue  # of a gradient that is nothing but rounding it makes a whole step
        case = CASES[name]
        both = side_by_side(case.model(), options(placed), OPTIMIZERS[optim], tolerance=tolerance)
        for step in range(2):
            batches = [case.batch(rank, micro * step + number) for number in range(micro)]
            both.step(*(partial(case_loss, batch=batch) for batch in batches), unsent=unsent)


PAIRS = [("mesh", (1, 2)), ("pair", (2, 1)), *([("mesh", (2, 1)), ("pair", (1, 2))] if matrix.WHOLE else [])]
TWO: list[Placed] = [
    ("NO_SHARD", None, ()),
    *((strategy, "one mesh", (2,)) for strategy in ONE_GROUP),
    *((strategy, groups, shape) for strategy in HYBRID for groups, shape in PAIRS),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "placed", [TWO[0], *(pytest.param(placed, marks=pytest.mark.slow) for placed in TWO[1:])], ids=name_of
)
def test_two_ranks_get_the_bits_of_torch(placed):
    """Among them groups of one rank: to shard within, or to replicate across."""
    ranks.run(trains, args=(placed,))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "placed",
    [("NO_SHARD", None, ()), ("HYBRID_SHARD", "mesh", (2, 2)), ("HYBRID_SHARD_ZERO2", "pair", (2, 2))],
    ids=name_of,
)
def test_four_ranks_agree_with_torch_within_rounding(placed):
    ranks.run(trains, 4, args=(placed, 1e-5))


@pytest.mark.parametrize("strategy", ONE_GROUP)
def test_one_process_without_a_group_trains_as_a_plain_loop(strategy):
    ranks.run(trains, args=((strategy, None, ()),), bare=True)


def kept(rank: int, world: int, placed: Placed) -> tuple[int, int, int]:
    """Elements of parameters and gradients that a rank has at rest, and of the model."""
    whole = sum(param.numel() for param in GPT().parameters())
    model = zero.FSDP(CASES["gpt"].model(), **options(placed))
    model(*CASES["gpt"].batch(rank, 0).inputs).square().mean().backward()
    params = list(model.parameters())
    return sum(p.numel() for p in params), sum(p.grad.numel() for p in params if p.grad is not None), whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placed", "shards"),
    [
        (("FULL_SHARD", None, ()), 4),
        (("SHARD_GRAD_OP", None, ()), 4),
        (("NO_SHARD", None, ()), 1),
        (("HYBRID_SHARD", "mesh", (2, 2)), 2),
        (("HYBRID_SHARD_ZERO2", "mesh", (1, 4)), 4),
        (("HYBRID_SHARD", "pair", (4, 1)), 1),
        ((zero.ShardingStrategy.NO_SHARD, None, ()), 1),
        ((TORCHS.FULL_SHARD, None, ()), 4),
        ((TORCHS.NO_SHARD, None, ()), 1),
        ((TORCHS.HYBRID_SHARD, "mesh", (2, 2)), 2),
        ((TORCHS._HYBRID_SHARD_ZERO2, "mesh", (2, 2)), 2),
    ],
    ids=str,
)
def test_at_rest_parameters_and_gradients_are_cut_by_the_group_to_shard_within(placed, shards):
    """Strategies are given by name, by zero's enum or by PyTorch's."""
    found = ranks.run(kept, 4, args=(placed,))
    copies = 4 // shards
    whole = found[0][2]
    for held in (0, 1):
        assert sum(one[held] for one in found) == copies * whole
        assert max(one[held] for one in found) <= 1.03 * whole / shards  # cuts fall on multiples of 64 bytes


def wrap(rank: int, world: int, placed: Placed, others: Placed | None = None) -> None:
    """others: what rank 0 is given, if not the same."""
    zero.FSDP(GPT(), **options(others if others and rank == 0 else placed))


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        (("ZERO3", None, ()), ["sharding_strategy='ZERO3' is unknown", "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"]),
        ((3, None, ()), ["sharding_strategy=3 is unknown"]),
        (("HYBRID_SHARD", None, ()), ["HYBRID_SHARD needs two groups", "DeviceMesh of two dimensions"]),
        (("HYBRID_SHARD_ZERO2", "one mesh", (2,)), ["HYBRID_SHARD_ZERO2 needs two groups"]),
        (("HYBRID_SHARD", "one mesh", (1, 1, 2)), ["HYBRID_SHARD needs two groups"]),
        (("FULL_SHARD", "mesh", (1, 2)), ["FULL_SHARD takes one process group", "given 2"]),
        (("NO_SHARD", "pair", (1, 2)), ["NO_SHARD takes one process group", "HYBRID_SHARD takes two"]),
        (("SHARD_GRAD_OP", "one mesh", (1, 1, 2)), ["SHARD_GRAD_OP takes one process group", "given 3"]),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_the_strategy_are_refused(placed, words):
    ranks.expect_error(wrap, 2, ValueError, *words, args=(placed,), timeout=15)


def test_a_strategy_that_one_rank_alone_does_not_know_is_refused_on_every_rank():
    args = (("ZERO3", None, ()), ("FULL_SHARD", None, ()))
    ranks.expect_error(wrap, 2, ValueError, "'ZERO3' is unknown", args=args, timeout=15)


@pytest.mark.parametrize("kind", ["the same twice", "all twice", "all across", "mesh and group"])
@ranks.raises(4, ValueError, "process_group", timeout=15)
def test_pairs_of_groups_that_make_up_no_mesh_are_refused(rank, world, kind):
    halves, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    crosswise, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    given = {
        "the same twice": (halves, halves),
        "all twice": (dist.group.WORLD, dist.group.WORLD),
        "all across": (halves, dist.group.WORLD),
        "mesh and group": (halves, crosswise),
    }[kind]
    extra = mesh(2, 2) if kind == "mesh and group" else {}
    zero.FSDP(GPT(), sharding_strategy="HYBRID_SHARD", process_group=given, **extra)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        chosen: torch.Tensor = self.blocks[number](self.blocks[0](inputs))
        return chosen


@ranks.raises(2, RuntimeError, "out of step", r"averaging over replicas of unit 'blocks\.[12]'")
def test_gradients_of_different_units_are_not_averaged_over_replicas(rank: int, world: int) -> None:
    model = zero.FSDP(Chosen(), sharding_strategy="NO_SHARD", auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model(torch.ones(2, 8), 1 + rank).sum().backward()
