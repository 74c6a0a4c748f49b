"""Sharding strategies: each trains as DistributedDataParallel does, keeps what it says, and sends what it says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import gpus
import matrix
import ranks
import zero
from models import CASES, GPT, OPTIMIZERS, Record, reference, train
from sidebyside import close
from zero.comm import Comm
from zero.fsdp.fsdp import running_model

TORCHS = torch.distributed.fsdp.ShardingStrategy

ONE_GROUP = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
HYBRID = ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]


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


HOW: dict[str, dict[str, Any]] = {
    "plain": {"steps": 3},
    "no_sync": {"steps": 2, "micro": 3, "sync": False},
    "accumulated": {"steps": 2, "micro": 3, "sync": True},
}
EVERY = [
    *(("gpt", optim, how) for optim in ("sgd", "adamw") for how in HOW),
    *(("mlp", "sgd", how) for how in ("plain", "no_sync")),
    ("convnet", "sgd", "plain"),
]
SOME = [
    ("gpt", "adamw", "plain"),
    ("gpt", "sgd", "accumulated"),
    ("mlp", "sgd", "no_sync"),
    ("convnet", "sgd", "plain"),
]
TRAINED = EVERY if matrix.WHOLE else SOME


def trained(rank: int, case: str, optim: str, given: dict[str, Any], **how: Any) -> Record:
    model = zero.FSDP(CASES[case].model(), **given)
    losses = train(model, OPTIMIZERS[optim](model.parameters()), CASES[case], rank, **how)
    return Record(losses, zero.full_state_dict(model))


def tolerances(tolerance: float) -> dict[tuple[str, str, str], float]:
    """Of all that is trained, where ranks are to agree within a tolerance."""
    # Where each micro-batch is reduced, shards are added to averages.
    off = {one: max(tolerance, 1e-5) if one[2] == "accumulated" else tolerance for one in TRAINED}
    # Of a gradient that is nothing but rounding, Adam makes a whole step.
    return {one: value for one, value in off.items() if not (value and one[1] == "adamw")}


def by_ddp(rank: int, world: int, tolerance: float) -> list[Record]:
    chosen = tolerances(tolerance)
    return [reference(rank, CASES[case], OPTIMIZERS[optim], **HOW[how]) for case, optim, how in chosen]


@cache
def ddp(world: int, tolerance: float) -> list[list[Record]]:
    """By rank. The same for all strategies."""
    return ranks.run(by_ddp, world, args=(tolerance,))


def assert_trains_as_ddp(
    rank: int, world: int, placed: Placed, tolerance: float, expectations: list[list[Record]]
) -> None:
    given = options(placed)
    for ((case, optim, how), off), expected in zip(tolerances(tolerance).items(), expectations[rank], strict=True):
        found = trained(rank, case, optim, given, **HOW[how])
        assert all(map(math.isfinite, expected.losses))
        assert found.losses == (pytest.approx(expected.losses, rel=off, abs=0) if off else expected.losses)
        assert list(found.weights) == list(expected.weights)
        for name, value in expected.weights.items():
            assert close(found.weights[name], value, off), f"{name} of {case}, {optim}, {how}"


PAIRS = [("mesh", (1, 2)), ("pair", (2, 1)), *([("mesh", (2, 1)), ("pair", (1, 2))] if matrix.WHOLE else [])]
TWO: list[Placed] = [
    ("NO_SHARD", None, ()),
    *((strategy, "one mesh", (2,)) for strategy in ONE_GROUP),
    *((strategy, groups, shape) for strategy in HYBRID for groups, shape in PAIRS),
]


@pytest.mark.matrix
@pytest.mark.parametrize("placed", TWO, ids=name_of)
def test_two_ranks_get_the_bits_of_ddp(placed):
    """Among them groups of one rank: to shard within, or to replicate across."""
    ranks.run(assert_trains_as_ddp, args=(placed, 0.0, ddp(2, 0.0)))


FOUR: list[Placed] = [
    ("NO_SHARD", None, ()),
    ("HYBRID_SHARD", "mesh", (2, 2)),
    ("HYBRID_SHARD_ZERO2", "pair", (2, 2)),
]


@pytest.mark.matrix
@pytest.mark.parametrize("placed", FOUR, ids=name_of)
def test_four_ranks_agree_with_ddp_within_rounding(placed):
    ranks.run(assert_trains_as_ddp, 4, args=(placed, 2e-6, ddp(4, 2e-6)))


@ranks.on(bare=True)
def test_one_process_without_a_group_trains_as_a_plain_loop(rank, world):
    for strategy in ONE_GROUP:
        for case, optim in (("mlp", "adamw"), ("convnet", "sgd")):
            found = trained(rank, case, optim, {"sharding_strategy": strategy})
            expected = reference(rank, CASES[case], OPTIMIZERS[optim])
            assert found.losses == expected.losses
            assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())


@ranks.on(2)
def test_a_group_of_one_trains_as_a_plain_loop(rank, world):
    """Each rank trains by itself, as if there was no other."""
    own, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    for strategy in ONE_GROUP:
        model = zero.FSDP(CASES["gpt"].model(), process_group=own, sharding_strategy=strategy)
        losses = train(model, OPTIMIZERS["adamw"](model.parameters()), CASES["gpt"], rank)
        plain = CASES["gpt"].model()
        assert losses == train(plain, OPTIMIZERS["adamw"](plain.parameters()), CASES["gpt"], rank)


def kept(rank: int, world: int, placed: Placed) -> tuple[int, int, int]:
    """Elements of parameters and gradients that a rank has at rest, and of the model."""
    whole = sum(param.numel() for param in GPT().parameters())
    model = zero.FSDP(CASES["gpt"].model(), **options(placed))
    model(*CASES["gpt"].batch(rank, 0).inputs).square().mean().backward()
    params = list(model.parameters())
    return sum(p.numel() for p in params), sum(p.grad.numel() for p in params if p.grad is not None), whole


@pytest.mark.parametrize(
    ("placed", "shards"),
    [
        (("FULL_SHARD", None, ()), 4),
        (("SHARD_GRAD_OP", None, ()), 4),
        (("NO_SHARD", None, ()), 1),
        (("HYBRID_SHARD", "mesh", (2, 2)), 2),
        (("HYBRID_SHARD_ZERO2", "mesh", (1, 4)), 4),
        (("HYBRID_SHARD", "pair", (4, 1)), 1),
    ],
    ids=str,
)
def test_at_rest_parameters_and_gradients_are_cut_by_the_group_to_shard_within(placed, shards):
    found = ranks.run(kept, 4, args=(placed,))
    copies = 4 // shards
    whole = found[0][2]
    for held in (0, 1):
        assert sum(one[held] for one in found) == copies * whole
        assert max(one[held] for one in found) <= 1.03 * whole / shards  # cuts fall on multiples of 64 bytes


def other_replicas(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return CASES["convnet"].build()


@ranks.on(4)
def test_replicas_start_from_the_weights_of_rank_0(rank, world):
    expected = other_replicas(0).state_dict()
    for strategy in ("NO_SHARD", "HYBRID_SHARD"):
        given = {} if strategy == "NO_SHARD" else mesh(2, 2)
        found = zero.FSDP(other_replicas(rank), sharding_strategy=strategy, **given).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected), strategy


@ranks.on(2)
def test_pytorchs_own_enum_is_understood(rank, world):
    for strategy in (TORCHS.FULL_SHARD, TORCHS.SHARD_GRAD_OP, TORCHS.NO_SHARD, TORCHS.HYBRID_SHARD):
        named, enum = (
            trained(rank, "gpt", "sgd", options((given, groups, (1, 2))))
            for given in (strategy.name, strategy)
            for groups in ["mesh" if strategy is TORCHS.HYBRID_SHARD else None]
        )
        assert named.losses == enum.losses
    own = zero.ShardingStrategy.SHARD_GRAD_OP
    assert trained(rank, "gpt", "sgd", {"sharding_strategy": own}).losses == named.losses


@ranks.on(2)
def test_pytorchs_name_for_the_hybrid_of_zero2_is_understood(rank, world):
    zero.FSDP(GPT(), sharding_strategy=TORCHS._HYBRID_SHARD_ZERO2, **mesh(1, 2))


def wrap(rank: int, world: int, placed: Placed, others: Placed | None = None) -> None:
    """others: what rank 0 is given, if not the same."""
    given = options(placed)
    if others is not None:
        given = options(others) if rank == 0 else given
    zero.FSDP(GPT(), **given)


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


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_strategies_that_differ_between_ranks_are_refused_on_every_rank(strategy):
    args = ((strategy, None, ()), ("FULL_SHARD", None, ()))
    ranks.expect_error(wrap, 2, ValueError, "differ between ranks", strategy, args=args, timeout=15)


def test_a_strategy_that_one_rank_does_not_know_is_refused_on_every_rank():
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


UNITS = 4
"""Of the GPT: the root and three blocks, of one shard group each."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often `zero` gathers, reduces, sums over replicas, and compares where the ranks are."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Any:
        original = getattr(Comm, name)

        def count(self: Comm, *args: Any, **kwargs: Any) -> Any:
            if self.world > 1:
                counts[name] += 1
            return original(self, *args, **kwargs)

        return mock.patch.object(Comm, name, count)

    with counting("gather"), counting("reduce"), counting("all_reduce"), counting("agree"):
        yield counts


def expected_counts(strategy: str, micro: int, sync: bool) -> dict[str, int]:
    """Forward gathers every unit; backward every unit again but the root, where they are not kept.

    Ranks compare where they are at the end of every backward, in each of their groups. Where parameters are cut, the
    optimizer's step is a small sum over ranks, by which all refuse it or none.
    """
    reduced = micro if sync else 1
    if strategy == "NO_SHARD":
        return {"all_reduce": reduced * UNITS, "agree": micro}
    counts = {"gather": micro * UNITS, "reduce": reduced * UNITS, "agree": micro, "all_reduce": 1}
    if strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        counts["gather"] += micro * (UNITS - 1)
    if strategy in HYBRID:
        counts["agree"] += micro
        counts["all_reduce"] += reduced * UNITS
    return counts


COUNTED: list[tuple[Placed, int]] = [
    *(((strategy, None, ()), 2) for strategy in ONE_GROUP),
    *(((strategy, "mesh", (2, 2)), 4) for strategy in HYBRID),
]


@gpus.cpu_only("the unit that ran last is kept for backward there, from the second step on")
@pytest.mark.parametrize(("micro", "sync"), [(1, True), (3, True), (3, False)], ids=["step", "accumulated", "no_sync"])
@pytest.mark.parametrize(("placed", "world"), COUNTED, ids=[placed[0] for placed, _ in COUNTED])
@ranks.on("world")
def test_a_step_gathers_and_reduces_as_often_as_its_strategy_says(rank, world, placed, micro, sync):
    model = zero.FSDP(CASES["gpt"].model(), **options(placed))
    assert len(running_model(model).index.groups) == UNITS
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    steps = []
    for step in range(3):
        with counted() as counts:
            optimizer.zero_grad()
            for number in range(micro):
                with nullcontext() if sync or number == micro - 1 else model.no_sync():
                    loss: Tensor = model(*CASES["gpt"].batch(rank, step * micro + number).inputs).square().mean()
                    loss.backward()
            optimizer.step()
        steps.append(dict(counts))
    assert steps[0] == steps[1] == steps[2]
    expected = expected_counts(placed[0], micro, sync)
    assert steps[0] == expected


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
