"""One rank alone calls what is collective: every rank is told so, and no rank is told to choose other units."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import matrix
import ranks
import zero
from models import FeedForward, take_step
from ranks import refusal
from sidebyside import data, sgd
from transports import TRANSPORTS, by

WIDTH = 8
COLLECTIVE = "collective: call it on every rank"


class Net(nn.Module):
    """root: whether the root unit has parameters."""

    def __init__(self, *, root: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(WIDTH, 5 + number) for number in range(3))
        self.last = nn.Linear(WIDTH, 3) if root else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def save(model: nn.Module, optimizer: Any) -> None:
    model.state_dict()


def save_to_one(model: nn.Module, optimizer: Any) -> None:
    zero.full_state_dict(model, to=0)


def save_optimizer(model: nn.Module, optimizer: Any) -> None:
    if isinstance(model, zero.FSDP):
        model.optim_state_dict(optimizer)
    else:
        optimizer.consolidate_state_dict()


def evaluate(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH))


def train(model: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    for step in range(steps):
        take_step(optimizer, model(data(4, WIDTH, rank=rank, step=step)).square().mean())


def finish(model: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    """The other rank's script ends, without an error."""


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks.on(2, timeout=20)
def test_a_rank_with_full_parameters_may_evaluate_alone(rank, world, transport):
    with by(transport):
        torch.manual_seed(0)
        model = zero.FSDP(Net(), sharding_strategy="NO_SHARD")
        optimizer = sgd(model.parameters())
        for _ in range(3):
            train(model, optimizer, rank, 3)
            if rank == 0:
                evaluate(model, optimizer)


def build(stage: int, group: Any, *, root: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return zero.setup(Net(root=root), sgd, stage=stage, process_group=group)


def told(
    rank: int,
    world: int,
    stage: int,
    transport: str,
    call: Callable[..., None],
    others: Callable[..., None],
    settled: int,
    root: bool = True,
) -> str:
    """The error of a rank. settled: steps that all ranks take together before."""
    with by(transport):
        group = dist.new_group(timeout=timedelta(seconds=2))
        model, optimizer = build(stage, group, root=root)
        train(model, optimizer, rank, settled)
        if rank == 0:
            error = refusal(lambda: call(model, optimizer))
            return error or refusal(lambda: train(model, optimizer, rank, 3))
        return refusal(lambda: others(model, optimizer, rank, 3))


@pytest.mark.parametrize(("transport", "settled"), [*product(TRANSPORTS, [0, 3])])
@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (save, r"the full tensors of .*state_dict\(\)"),
        (save_to_one, "the collection of full tensors"),
        (save_optimizer, "the collection of full tensors or state"),
        (evaluate, "rank 0 (is )?in the gathering of the root unit for forward"),
    ],
)
def test_at_stage_3_every_rank_is_told_to_call_it_too(call, operation, transport, settled):
    for error in ranks.run(told, 2, args=(3, transport, call, train, settled), timeout=20):
        assert "RuntimeError: ranks are out of step: rank " in error
        assert re.search(operation, error) and COLLECTIVE in error
        assert "as_one_unit" not in error


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_evaluation_alone_is_no_choice_of_modules_though_the_root_unit_is_empty(transport):
    for error in ranks.run(told, 2, args=(3, transport, evaluate, train, 3, False)):
        assert "unit 'blocks.0' for forward" in error and COLLECTIVE in error
        assert "as_one_unit" not in error


@matrix.combined("at, transport", [(3, save), (3, evaluate), (2, save_optimizer)], TRANSPORTS)
def test_a_rank_that_waits_for_one_that_has_finished_is_told_so(at, transport):
    stage, call = at
    first, second = ranks.run(told, 2, args=(stage, transport, call, finish, 1), timeout=20)
    assert "rank 0 failed in" in first and COLLECTIVE in first and "as_one_unit" not in first
    assert second == ""
