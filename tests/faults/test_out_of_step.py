"""Ranks that do different things: each rank is told so, at once, and no rank is told to choose other units.

`make faults` sets ZERO_FAULTS=1 and runs every row at all of its stages, over each transport.
"""

import re
import tempfile
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import matrix
import ranks
import zero
from assertions import same
from ranks import refusal
from runs import sgd, take_step
from transports import TRANSPORTS, by
from zoo import Stack, batch, loss_on

COLLECTIVE = "collective: call it on every rank"
IN_STEP = r"out of step: rank \d is in \w+ .+, but rank \d in \w+ "
WAITED = 2  # seconds, for a rank that does not come
SEEN = ("gloo", 3)  # in a schedule that ranks have seen before, where they look after one another once they wait


def trains(model: nn.Module, optimizer: Any, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        take_step(optimizer, loss_on(rank, step)(model))


def evaluates(model: nn.Module, optimizer: Any, rank: int) -> None:
    with torch.no_grad():
        model(batch(rank, 0))


def saves_a_checkpoint(model: nn.Module, optimizer: Any, rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        zero.checkpoint.save(folder, model, optimizer)


def steps_after(change: Callable[[Any, Any], object]) -> Callable[[nn.Module, Any, int], None]:
    """change: of the model and its optimizer, between backward and step."""

    def program(model: nn.Module, optimizer: Any, rank: int) -> None:
        loss_on(rank, 0)(model).backward()
        change(model, optimizer)
        optimizer.step()

    return program


def fail(*_: object) -> None:
    raise ValueError("no room here")


def fails_in_its_optimizer(model: nn.Module, optimizer: Any, rank: int) -> None:
    handle = optimizer.optim.register_step_pre_hook(fail)
    try:
        trains(model, optimizer, rank)
    finally:
        handle.remove()


PROGRAMS: dict[str, Callable[[nn.Module, Any, int], object]] = {
    "trains": trains,
    "has finished": lambda model, optimizer, rank: None,
    "saves": lambda model, optimizer, rank: model.state_dict(),
    "saves the optimizer": lambda model, optimizer, rank: zero.full_optimizer_state_dict(model, optimizer, to=None),
    "saves a checkpoint": saves_a_checkpoint,
    "evaluates": evaluates,
    "runs one forward": lambda model, optimizer, rank: model(batch(rank, 0)),
    "skips a step": lambda model, optimizer, rank: loss_on(rank, 0)(model).backward(),
    "casts its model": steps_after(lambda model, optimizer: model.half()),
    "edits its groups": steps_after(lambda model, optimizer: optimizer.param_groups[0]["params"].pop(0)),
    "fails in its optimizer": fails_in_its_optimizer,
}
RAISED = ("rank 0 has raised",)
Facts = tuple[str, ...]
ROWS: dict[tuple[str, str], tuple[tuple[int, ...], Facts, Facts]] = {
    # Rank 0 does the first and then trains, unless that raised; the other does the second.
    # At which stages; patterns in the error of rank 0, of the other.
    (alone, others): (stages, own or facts, facts)
    for alone, others, stages, facts, own in [
        ("saves", "trains", (3,), (IN_STEP, "state_dict", COLLECTIVE), (IN_STEP, r"called model\.state_dict\(\)")),
        ("saves the optimizer", "trains", (3,), (IN_STEP, "the collection of full tensors or state", COLLECTIVE), None),
        ("evaluates", "trains", (3,), (IN_STEP, "rank 0 (is )?in the gathering of the root unit", COLLECTIVE), None),
        ("evaluates", "has finished", (3,), ("^$",), ("rank 0 failed in", COLLECTIVE)),
        ("saves a checkpoint", "trains", (1, 2, 3), (IN_STEP,), None),
        ("runs one forward", "trains", (1, 2, 3), (IN_STEP,), None),
        ("skips a step", "trains", (1, 2, 3), (IN_STEP,), None),
        ("casts its model", "trains", (1, 2), (*RAISED, "blocks.*was moved, cast"), ("was moved, cast",)),
        ("edits its groups", "trains", (1, 2), (*RAISED, "param_groups were edited"), ("param_groups were edited",)),
        ("fails in its optimizer", "trains", (1, 2), (*RAISED, "no room here"), ("no room here",)),
    ]
}


def cases() -> list[Any]:
    """In the suite each row once, at its stages, transports and ages of a training in turn."""
    found = []
    for number, (row, (stages, _, facts)) in enumerate(ROWS.items()):
        every = [*product(stages, TRANSPORTS, [0, 3])]
        for stage, *how in every if matrix.FAULTS else [every[5 * number % len(every)]]:
            waits = facts[0] == "^$" or (facts[0] == IN_STEP and (stage == 1 or tuple(how) == SEEN))
            marks = [pytest.mark.slow] if waits else []
            name = f"{'-'.join(row)}-stage {stage}-{how[0]}-after {how[1]}"
            found.append(pytest.param(row, stage, *how, id=name, marks=marks))
    return found


def told(rank: int, world: int, row: tuple[str, str], stage: int, transport: str, settled: int) -> str:
    """The error of a rank. settled: steps that all ranks take together before."""
    with by(transport):
        net = Stack()
        net.register_buffer("sent", torch.zeros(3))  # before each forward
        group = dist.new_group(timeout=timedelta(seconds=WAITED))
        given = (*zero.setup(net, sgd, stage=stage, process_group=group), rank)
        trains(*given, steps=settled)
        error = refusal(lambda: PROGRAMS[row[min(rank, 1)]](*given))
        return error if error or rank else refusal(lambda: trains(*given))


@pytest.mark.faults
@pytest.mark.parametrize(("row", "stage", "transport", "settled"), cases())
def test_every_rank_is_told(row, stage, transport, settled):
    for rank, text in enumerate(ranks.run(told, args=(row, stage, transport, settled), timeout=20)):
        facts = ROWS[row][1 + rank]
        if stage == 1 and IN_STEP in facts:
            facts = ("^RuntimeError: ",)  # DistributedDataParallel's own, if it is not ours
        missing = [fact for fact in facts if not re.search(fact, text)]
        assert not missing, f"rank {rank} was told {text or 'nothing'}, which lacks {missing}"
        assert "as_one_unit" not in text


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks.on(2, timeout=20)
def test_a_rank_that_compares_what_others_have_launched_is_told(rank, world, transport):
    """A forward more, which sends nothing itself as all parameters are there until backward, makes what follows new to
    one rank. Over host memory ranks compare at no cost, and go on."""
    with by(transport):
        model, optimizer = zero.setup(nn.Linear(8, 8), sgd, stage=3, process_group=dist.new_group())

        def steps(number: int) -> None:
            for _ in range(number):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        steps(4)
        if rank == 0:
            model(torch.ones(2, 8))
        told = refusal(lambda: steps(2))
    assert "rank 0 is in the reduction of the root unit, before which it called other things" in told or (
        transport == "host memory" and not told
    )


@ranks.on(2, timeout=20)
def test_a_rank_with_full_parameters_may_evaluate_alone(rank, world):
    model = zero.FSDP(Stack(), sharding_strategy="NO_SHARD")
    optimizer = sgd(model.parameters())
    for _ in range(2):
        trains(model, optimizer, rank)
        if rank == 0:
            evaluates(model, optimizer, rank)


@ranks.on(2, timeout=8)
def test_an_optimizer_that_raises_on_every_rank_raises_there_and_the_next_step_is_taken(rank, world):
    model, optimizer = zero.setup(Stack(), sgd, stage=2)
    assert refusal(lambda: fails_in_its_optimizer(model, optimizer, rank)) == "ValueError: no room here"
    trains(model, optimizer, rank)


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_a_step_that_one_rank_refuses_is_taken_by_none_and_can_be_taken_once_more(rank, world, stage):
    def trained(refuses: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model, optimizer = zero.setup(Stack(), sgd, stage=stage)
        before = zero.full_state_dict(model, to=None)
        for step in range(2):
            loss_on(rank, step)(model).backward()
            if refuses and step == 0:
                params = optimizer.param_groups[0]["params"]
                taken = params.pop(0) if rank else None
                assert "param_groups were edited" in refusal(optimizer.step)
                same(zero.full_state_dict(model, to=None), before, "the weights")
                params[:0] = [] if taken is None else [taken]
            optimizer.step()
            optimizer.zero_grad()
        return zero.full_state_dict(model, to=None)

    same(trained(refuses=True), trained(refuses=False), "the weights")


@pytest.mark.parametrize("strategy", ["NO_SHARD", "HYBRID_SHARD"])
@ranks.on(4, timeout=30)
def test_what_one_rank_raises_reaches_the_ranks_of_all_groups_which_go_on(rank, world, strategy):
    groups = [[dist.new_group(two) for two in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    pair = (groups[0][rank // 2], groups[1][rank % 2]) if strategy == "HYBRID_SHARD" else None
    model = zero.FSDP(Stack(), sharding_strategy=strategy, process_group=pair)
    optimizer = sgd(model.parameters())
    loss_on(rank, 0)(model).backward()
    if rank == 3:
        hook = optimizer.register_step_pre_hook(fail)
        assert refusal(optimizer.step) == "ValueError: no room here"
        hook.remove()
    else:
        assert refusal(optimizer.step) == "ValueError: rank 3 has raised ValueError: no room here"
    optimizer.step()
    trains(model, optimizer, rank)
