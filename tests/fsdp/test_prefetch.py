"""How far ahead units are gathered, and how many are unsharded at once. Parity with DDP is in test_parity.py, peaks are
in test_memory.py.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch

import gpus
import ranks
import zero
from inner import unit_names, unsharded, unsharded_in_backward
from runs import sgd, take_step
from transports import READS, between_hosts, by, overlapping
from zoo import WIDTH, Stack, loss_on

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
