"""How far ahead units are gathered, and how many are unsharded at once. Parity with DDP is in test_parity.py, peaks
are in test_memory.py."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch

import gpus
import matrix
import ranks
import zero
from inner import unit_names, unsharded, unsharded_in_backward
from runs import case_loss, sgd, side_by_side, take_step
from transports import READS, between_hosts, by, overlapping
from zoo import CASES, GPT, OPTIMIZERS, WIDTH, Stack, loss_on

BLOCKS = 4
BLOCK_NAMES = [f"blocks.{number}" for number in range(BLOCKS)]


class Net(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), classes=5, blocks=BLOCKS)
        self.embedding = nn.Embedding(50, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + self.embedding(x.abs().mul(10).long() % 50).sum(1))


ALONE, AHEAD = [[0], [1], [2], [3]], [[0, 1], [1, 2], [2, 3], [3]]
AS_NEEDED, ALL_AHEAD = (ALONE, [[]], ALONE[::-1]), (AHEAD, [[3]], [[2, 3], [1, 2], [0, 1], [0]])
FORWARD_ALONE = (AHEAD, *AS_NEEDED[1:])
DEFAULT = ALL_AHEAD if gpus.ON else AS_NEEDED


@pytest.mark.parametrize(
    ("prefetch", "overlaps", "expected"),
    [
        (None, False, DEFAULT),
        (None, True, ALL_AHEAD),
        (3, False, ALL_AHEAD),
        (2, True, FORWARD_ALONE),
        (2, False, FORWARD_ALONE if gpus.ON else AS_NEEDED),
        (1, True, AS_NEEDED),
    ],
    ids=["default", "default, overlapping", "3", "2, overlapping", "2", "1"],
)
@ranks.on(2)
def test_blocks_are_gathered_as_far_ahead_as_was_asked_for(rank, world, prefetch, overlaps, expected):
    """By default where transfers overlap computing."""
    with overlapping() if overlaps else nullcontext():
        units, found = unsharded_blocks(rank, prefetch=prefetch)
    assert found == expected
    assert units == (["", "first", *BLOCK_NAMES, "last", "embedding"] if prefetch == 1 else ["", *BLOCK_NAMES])


def unsharded_blocks(rank: int, **options: Any) -> tuple[list[str], tuple[list[list[int]], ...]]:
    """All units, and the blocks that are unsharded as each begins its forward, between forward and backward, and as
    each begins its backward."""
    model = zero.FSDP(Net(), **options)
    optimizer = sgd(model.parameters())
    forward, between, backward = seen = ([], [], [])

    def look(phase: list[list[int]], *_: Any) -> None:
        names = [name for name in unsharded(model) if name.startswith("blocks.")]
        phase.append([int(name.split(".")[1]) for name in names])

    for block in model.module.blocks:
        block[0].register_forward_pre_hook(partial(look, forward))
        block[1].register_full_backward_pre_hook(partial(look, backward))
    for step in range(2):
        for phase in seen:
            phase.clear()
        loss = loss_on(rank, step)(model)
        look(between)
        take_step(optimizer, loss)
    return unit_names(model), seen


BACKWARD_PRE = {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}
PREFETCHES: list[tuple[dict[str, Any], int | None]] = [
    ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, 2),
    ({"backward_prefetch": None}, 1),
    ({"limit_all_gathers": False}, 3),
    ({"forward_prefetch": True}, None),
    ({**BACKWARD_PRE, "forward_prefetch": True}, 3),
]


@pytest.mark.slow
@ranks.on(2)
def test_torchs_names_say_what_is_gathered_ahead(rank, world):
    with between_hosts():
        found = [(unsharded_blocks(rank, **given), unsharded_blocks(rank, prefetch=own)) for given, own in PREFETCHES]
    for (given, _), (one, other) in zip(PREFETCHES, found, strict=True):
        assert one == other, given
    assert len({str(counts) for counts, _ in found}) == 3, found


@gpus.cpu_only("there transfers overlap computing")
@pytest.mark.parametrize(("transport", "expected"), [("gloo", [2, 2, 2, 1]), *([("host memory", [1] * 4)] * READS)])
@pytest.mark.parametrize("frozen", [False, True], ids=["all are trained", "most are frozen"])
@ranks.on(2)
def test_over_gloo_the_next_block_travels_in_the_second_half(rank, world, transport, expected, frozen):
    """How many blocks have memory for full parameters as the first bias of each has its gradient, the last block's
    first. Of what is frozen no gradient tells how far backward is."""
    net = Stack(blocks=BLOCKS)
    for param in [param for block in net.blocks for param in block.parameters() if frozen]:
        param.requires_grad_(any(param is block.up.bias for block in net.blocks))
    with by(transport):
        model = zero.FSDP(net)
        counts = unsharded_in_backward(model, [block.up.bias for block in net.blocks])
        for step in range(2):  # the first shows the order
            counts.clear()
            loss_on(rank, step)(model).backward()
    assert counts == expected


# Sharding strategies: each trains as torch alone does, and keeps what it says. What they send is in test_memory.py.


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


TRAINED = [("gpt", "adamw", 1, 0), ("gpt", "sgd", 3, 0), ("mlp", "sgd", 3, 2)]
"""Case, optimizer, backwards in a step, and how many of them under no_sync."""


def trains(rank: int, world: int, placed: Placed, trained: tuple[str, str, int, int]) -> None:
    name, optim, micro, unsent = trained
    case, tolerance = CASES[name], 0.0 if world < 3 else 1e-5
    both = side_by_side(case.model(), options(placed), OPTIMIZERS[optim], tolerance=tolerance)
    for step in range(2):
        batches = [case.batch(rank, micro * step + number) for number in range(micro)]
        both.step(*(partial(case_loss, batch=batch) for batch in batches), unsent=unsent)


PAIRS = [("mesh", (1, 2)), ("pair", (2, 1)), *([("mesh", (2, 1)), ("pair", (1, 2))] if matrix.WHOLE else [])]
TWO: list[Placed] = [
    *((strategy, "one mesh", (2,)) for strategy in ONE_GROUP),
    *((strategy, groups, shape) for strategy in HYBRID for groups, shape in PAIRS),
]


@matrix.combined("placed, trained", TWO, TRAINED)
def test_two_ranks_get_the_bits_of_torch(placed, trained):
    """Among them groups of one rank: to shard within, or to replicate across."""
    ranks.run(trains, args=(placed, trained))


@pytest.mark.slow
@pytest.mark.parametrize("placed", [("HYBRID_SHARD", "mesh", (2, 2)), ("HYBRID_SHARD_ZERO2", "pair", (2, 2))])
def test_four_ranks_agree_with_torch_within_rounding(placed):
    ranks.run(trains, 4, args=(placed, TRAINED[2]))


@pytest.mark.parametrize("strategy", ONE_GROUP)
def test_one_process_without_a_group_trains_as_a_plain_loop(strategy):
    ranks.run(trains, args=((strategy, None, ()), TRAINED[2]), bare=True)


def wrap(rank: int, world: int, placed: Placed, others: Placed | None = None) -> None:
    """others: what rank 0 is given, if not the same."""
    zero.FSDP(GPT(), **options(others if others and rank == 0 else placed))


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        ((3, None, ()), ["sharding_strategy=3 is unknown"]),
        (("HYBRID_SHARD", None, ()), ["HYBRID_SHARD needs two groups", "DeviceMesh of two dimensions"]),
        (("HYBRID_SHARD_ZERO2", "one mesh", (2,)), ["HYBRID_SHARD_ZERO2 needs two groups"]),
        (("FULL_SHARD", "mesh", (1, 2)), ["FULL_SHARD takes one process group", "given 2"]),
        (("NO_SHARD", "pair", (1, 2)), ["NO_SHARD takes one process group", "HYBRID_SHARD takes two"]),
        (("SHARD_GRAD_OP", "one mesh", (1, 1, 2)), ["SHARD_GRAD_OP takes one process group", "given 3"]),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_the_strategy_are_refused(placed, words):
    ranks.expect_error(wrap, 2, ValueError, *words, args=(placed,), timeout=15)


def test_a_strategy_that_one_rank_alone_does_not_know_is_refused_on_every_rank():
    args, words = (("FULL_SHARD", None, ()), ("ZERO3", None, ())), "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"
    ranks.expect_error(wrap, 2, ValueError, "'ZERO3' is unknown", words, args=args, timeout=15)


@ranks.raises(4, ValueError, "process_group", timeout=15)
def test_pairs_of_groups_that_make_up_no_mesh_are_refused(rank, world):
    halves, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    zero.FSDP(GPT(), sharding_strategy="HYBRID_SHARD", process_group=(halves, dist.group.WORLD))
