"""What a training loop may do at stages 2 and 3 alike: on two ranks the numbers are the reference's bit for bit."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

import matrix
import ranks
import zoo
from fuzz.cases import Case, Micro, Node, Step
from fuzz.training import train
from odd import Calling, reentrant
from runs import SideBySide
from transports import TRANSPORTS, calling, in_turn
from zoo import batch

Stack = partial(zoo.Stack, classes=3)


def loss_on(x: Tensor, **options: Any) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(x, **options).square().mean()


def steps(both: SideBySide, rank: int, count: int = 3, start: int = 0) -> None:
    for step in range(start, start + count):
        both.step(loss_on(batch(rank, step)))


at_each = pytest.mark.parametrize("stage", ["2 in small buckets", "3", "3 kept"])


@at_each
@ranks.on(2, timeout=20)
def test_blocks_run_backwards_and_are_left_out_from_step_to_step(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step, order in enumerate([slice(None), slice(None, None, -1), slice(1), slice(0, 0), slice(None)]):
        both.step(loss_on(batch(rank, step), blocks=order))


@at_each
@ranks.on(2, timeout=20)
def test_backwards_under_no_sync_are_sent_along_by_one_that_does_not_reach_them(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(2):
        losses = loss_on(batch(rank, 10 * step)), loss_on(batch(rank, 10 * step + 1), blocks=slice(1))
        both.step(*losses, unsent=1)


@at_each
@ranks.on(2, timeout=20)
def test_a_step_after_a_backward_under_no_sync_is_refused(rank, world, stage):
    both = SideBySide(Stack(), stage)
    both.backward(loss_on(batch(rank, 0)), sync=False)
    with pytest.raises(RuntimeError, match=r"(first|blocks\.\d|last)\S* has a gradient that was not reduced.*no_sync"):
        both.optimizer.step()
    both.backward(loss_on(batch(rank, 1)))
    both.update()
    steps(both, rank, start=2)


@pytest.mark.parametrize("stage", ["2", "2 in small buckets"])
@ranks.raises(2, RuntimeError, r"blocks\.\d", "use_reentrant=False", timeout=20)
def test_two_gradients_for_a_parameter_in_one_backward_by_reentrant_checkpointing(rank, world, stage):
    """Stage 2 has sent the first when the second comes, and says so, as DDP does. Stage 3 sends both."""
    both = SideBySide(Calling(reentrant, classes=3), stage, tolerance=1e-6)
    steps(both, rank)
    both.step(loss_on(batch(rank, 3)), lambda model: sum(loss_on(batch(rank, i))(model) for i in (4, 5)), unsent=1)


def row(*kinds: str | Node, steps: tuple[Step, ...] = (Step(), Step(), Step()), **options: Any) -> Case:
    return Case(tuple(Node(kind) if isinstance(kind, str) else kind for kind in kinds), steps=steps, **options)


def around(kind: str, *inside: str | Node) -> Node:
    return Node(kind, row(*inside).body)


def backwards(*synced: bool) -> tuple[Step, ...]:
    return (Step(tuple(Micro(sync=sync) for sync in synced)),) * 3


FEEDS = "feed", "feed", "feed"
MICROS = (Step(), Step((Micro(sync=False), Micro(2))))
ROWS = {
    "groups with hyperparameters of their own, clipped": row(
        *FEEDS, groups=3, steps=(Step(before="lower rate", clip=0.1),) * 3
    ),
    "several forwards before one backward": row(*FEEDS, steps=(Step((Micro(3),)),) * 3),
    "several backwards before a step": row(*FEEDS, steps=backwards(True, True, True)),
    "a block used twice in one forward": row(around("twice", "feed"), "feed"),
    "weights loaded, and written into": row(
        *FEEDS, steps=(Step(), Step(before="reload"), Step(before="write"), Step())
    ),
    "blocks that take and return dictionaries, with their input": row(*(around("packed", "feed"),) * 3),
    "backwards under no_sync are sent along later": row(*FEEDS, steps=backwards(False, False, True, True)),
    "no_sync between backwards that are reduced": row(*FEEDS, steps=backwards(True, False, True, False, False, True)),
    "gradients set to zero, not None, decay where they are not used": row(
        around("skipped", "feed"),
        *FEEDS,
        steps=tuple(Step(clear=f"{whom}{how}") for how in ("", " to zero") * 2 for whom in ("optimizer", "model")),
    ),
    "weights tied across blocks": row("linear", Node("tied", of=0), Node("tied", of=0)),
    "unused parameters": row("unused", *FEEDS),
    "parameters that some ranks use": row("by rank", "feed", "by rank", steps=(Step(),) * 4),
    "several dtypes": row("double", "half", "feed"),
    "frozen beside trained in every block": row(*(around("residual", Node("feed", frozen=True), "linear"),) * 3),
    "whole blocks frozen": row(Node("feed", frozen=True), "feed", Node("linear", frozen=True)),
    "frozen and unfrozen between steps": row(
        *FEEDS, "tied", steps=(Step(before="freeze"), Step(), Step(before="unfreeze"), Step(before="freeze"), Step())
    ),
    "a block whose output is not used": row(around("ignored", "feed"), *FEEDS),
    "a block that changes its input in place": row("in place", "feed", "in place"),
    "each block checkpointed": row(around("each checkpointed", *FEEDS), steps=MICROS),
    "each block checkpointed with a graph of its own": row(around("reentrant", "feed"), around("reentrant", "feed")),
    "checkpointed inside of blocks": row(around("checkpointed", "feed"), around("checkpointed", "feed"), steps=MICROS),
    "checkpointed on top of one another": row(
        around("checkpointed", around("each checkpointed", "feed", "feed")), steps=MICROS
    ),
    "fewer elements than ranks": row("tiny", "tiny"),
    "recurrent layers that keep a list of their weights": row("recurrent", "feed", "recurrent"),
    "batch normalisation whose statistics stay each rank's own": row(
        "batch norm", "feed", "batch norm", broadcast_buffers=False, steps=(Step(), Step(before="evaluate"), Step())
    ),
    "buffers of the first rank, also with no_sync and evaluation": row(
        "counts",
        "batch norm",
        steps=(Step((Micro(sync=False), Micro())), Step(before="evaluate"), Step(before="forward alone"), Step()),
    ),
    "units of a single layer": row(*FEEDS, units="layers"),
    "units around units that hold nothing themselves": row(
        *(around("list", around("sequence", "feed", around("sequence", "feed"))),) * 2, units="blocks"
    ),
    "buffers that are not sent, read by two forwards": row(
        "batch norm", "feed", "batch norm", broadcast_buffers=False, steps=(Step((Micro(2),)),) * 3
    ),
    "dropout": row("feed", "drop", "feed", "drop"),
}
AT: dict[str, dict[str, Any]] = {
    "2 in small buckets": {"stage": 2, "bucket": 20, "units": "default"},
    "3": {},
    "3 kept": {"strategy": "SHARD_GRAD_OP"},
}


def chosen(names: Iterable[str]) -> list[Any]:
    """Every name at one of the stages and by one of the transports, in turn; under `make matrix` at all."""
    if matrix.WHOLE:
        return [*itertools.product(names, AT, TRANSPORTS)]
    return [(name, [*AT][number % 3], in_turn(number // 3)) for number, name in enumerate(names)]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "stage", "transport"), chosen(ROWS))
def test_training_is_that_of_torch_alone(name, stage, transport):
    ranks.run(calling, args=(transport, train, dataclasses.replace(ROWS[name], **AT[stage])), timeout=20)
