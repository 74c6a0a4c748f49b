"""How far ahead units are gathered, and how many are unsharded at once. Parity with DDP is in test_parity.py, peaks are
in test_memory.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch

import gpus
import ranks
import zero
from sidebyside import SideBySide, data, sgd, stage_3
from transports import overlapping
from zero.fsdp.fsdp import running_model
from zero.shards.shard_group import ShardGroup

WIDTH, BLOCKS = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Net(nn.Module):
    """`turned`: the blocks run in the other order. `skipped`: one block does not run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor, turned: bool = False, skipped: int | None = None) -> Tensor:
        x = self.embedding(tokens)
        for number, block in sorted(enumerate(self.blocks), reverse=turned):
            if number != skipped:
                x = block(x)
        return self.head(x)


def tokens(rank: int, step: int = 0) -> Tensor:
    return data(3, 5, rank=rank, step=step).abs().mul(10).long() % 50


def loss(rank: int, step: int = 0, **how: Any) -> Any:
    return lambda model: model(tokens(rank, step), **how).square().mean()


@contextmanager
def events(model: zero.FSDP, told: list[str]) -> Any:
    """Notes gatherings as they are launched, and the forwards of blocks."""
    launch = ShardGroup.launch_unshard

    def noted(group: ShardGroup, *args: Any, **options: Any) -> None:
        told.append("gather " + group.label.split(".")[-1].strip("'"))
        launch(group, *args, **options)

    hooks = [
        block.linear.register_forward_pre_hook(lambda *_, number=number: told.append(f"forward {number}"))
        for number, block in enumerate(model.module.blocks)
    ]
    with mock.patch.object(ShardGroup, "launch_unshard", noted):
        yield
    for hook in hooks:
        hook.remove()


def what_happens(rank: int, world: int, prefetch: zero.Prefetch) -> list[str]:
    model = zero.FSDP(Net(), prefetch=prefetch)
    optimizer = sgd(model.parameters())
    told: list[str] = []
    for _ in range(2):
        told.clear()
        with events(model, told):
            loss(rank)(model).backward()
        optimizer.step()
    return told


AHEAD = ["gather the root unit", "gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "gather 3", "forward 2"]
AHEAD += ["forward 3", "gather 2", "gather 1", "gather 0"]  # backward would gather 3 at once: it is kept
AS_NEEDED = ["gather the root unit", "gather 0", "forward 0", "gather 1", "forward 1", "gather 2", "forward 2"]
AS_NEEDED += ["gather 3", "forward 3"]
LAST_KEPT, NONE_KEPT = ["gather 2", "gather 1", "gather 0"], ["gather 3", "gather 2", "gather 1", "gather 0"]


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [(zero.SPEED_FIRST, AHEAD), (zero.Prefetch(), AHEAD if gpus.ON else AS_NEEDED + NONE_KEPT)],
    ids=["speed first", "default"],
)
def test_the_next_unit_is_gathered_while_the_current_one_computes(prefetch, expected):
    for told in ranks.run(what_happens, args=(prefetch,)):
        assert told == expected


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (zero.Prefetch(), AHEAD),
        (zero.Prefetch(forward_prefetch=False), AS_NEEDED + LAST_KEPT),
        (zero.MEMORY_FIRST, None),
    ],
    ids=["default", "not asked for", "memory first"],
)
@ranks.on(2)
def test_by_default_forward_gathers_ahead_where_transfers_overlap(rank, world, prefetch, expected):
    with overlapping():
        told = what_happens(rank, world, prefetch)
    if expected is not None:
        assert told == expected
    assert (told.index("gather 1") < told.index("forward 0")) == (expected == AHEAD)


@pytest.mark.parametrize(
    "prefetch",
    [zero.MEMORY_FIRST, zero.Prefetch(), zero.Prefetch("BACKWARD_PRE", forward_prefetch=True), zero.SPEED_FIRST],
    ids=["memory first", "default", "ahead within 2", "speed first"],
)
@ranks.on(2)
def test_no_more_units_are_in_flight_than_the_limit(rank, world, prefetch):
    """The largest number of units, the root aside, of which full parameters or gradients exist in a block's backward,
    and the names of all units."""
    model = zero.FSDP(Net(), prefetch=prefetch)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        in_flight = [
            unit
            for unit in model._units[1:]
            if any(group.full.untyped_storage().nbytes() for group in unit.groups)
            or any(bucket.taken_bytes or bucket.reducing for bucket in unit.gradients.buckets)
        ]
        most = max(most, len(in_flight))

    for block in model.module.blocks:
        block.linear[1].register_forward_hook(look)
        block.linear[0].register_full_backward_hook(look)
    for step in range(3):
        loss(rank, step)(model).backward()
    assert most == prefetch.where(overlaps=gpus.ON).limit
    blocks = [f"blocks.{number}" for number in range(BLOCKS)]
    names = [unit.name for unit in model._units]
    assert names == (["", "embedding", *blocks, "head"] if prefetch.limit == 1 else ["", *blocks])


@pytest.mark.parametrize("prefetch", [zero.SPEED_FIRST, zero.MEMORY_FIRST], ids=["speed first", "memory first"])
@ranks.on(2)
def test_training_is_exact_where_units_run_in_another_order_than_the_last_time(rank, world, prefetch):
    both = SideBySide(Net(), lambda model, optim: stage_3(model, optim, prefetch=prefetch))
    for step, how in enumerate([{}, {"turned": True}, {"skipped": 2}, {"skipped": 3}, {"turned": True}, {}]):
        both.step(loss(rank, step, **how))
        with torch.no_grad():
            both.model(tokens(rank), turned=step % 2 == 0)
        assert all(group.full.untyped_storage().nbytes() == 0 for group in running_model(both.model).index.groups)


def test_names_of_pytorch_are_understood_and_others_refused():
    assert zero.Prefetch(BackwardPrefetch.BACKWARD_PRE) == zero.Prefetch("BACKWARD_PRE")
    with pytest.raises(ValueError, match=r"'EARLY' is unknown\. Choose one of BACKWARD_PRE, BACKWARD_POST, 'auto', or"):
        zero.Prefetch("EARLY")
    with pytest.raises(ValueError, match="limit=0"):
        zero.Prefetch(limit=0)


@ranks.raises(2, ValueError, "differ between ranks", "Prefetch", timeout=15)
def test_options_that_differ_between_ranks_are_refused_on_every_rank(rank, world):
    zero.FSDP(Net(), prefetch=zero.SPEED_FIRST if rank else None)
