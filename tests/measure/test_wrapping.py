"""Optimizers that wrap another one and keep state of their own, as Lookahead does: as without `zero`, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

import ranks
import zero
from models import take_step
from optimizers import Slow
from reference import built, loss_of, same, train


def slow_adam(params: Any, **options: Any) -> Slow:
    return Slow(Adam(params, **options))


class Passing(Optimizer):
    """Hands everything on, as the optimizers of training libraries do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["optimizer"], name)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def trained(rank: int, stage: int, *, inside: bool = True) -> tuple[Any, Any]:
    model = built()
    if stage == 3:
        wrapped: Any = zero.FSDP(model)
        optimizer: Any = slow_adam(wrapped.parameters(), lr=0.01)
    elif stage == 0:
        wrapped, optimizer = DistributedDataParallel(model), slow_adam(model.parameters(), lr=0.01)
    else:
        sharded = zero.OSS(model.parameters(), slow_adam if inside else Adam, lr=0.01)
        optimizer = sharded if inside else Slow(sharded)
        wrapped = DistributedDataParallel(model) if stage == 1 else zero.ShardedDDP(model, sharded)
    return train(wrapped, optimizer, rank, range(5)), zero.full_state_dict(wrapped)


@pytest.mark.parametrize(("stage", "inside"), [(1, True), (1, False), (2, True), (3, True)])
@ranks.on(2)
def test_wrappers_train_as_the_plain_ones_inside_oss_and_around_parameters_of_fsdp(rank, world, stage, inside):
    same(trained(rank, stage, inside=inside), trained(rank, 0), "losses and weights")


@ranks.raises(
    2, RuntimeError, "Slow steps by OSS and keeps state of its own", r"lambda params, \*\*options: Slow\(Adam"
)
def test_around_oss_they_are_refused_at_stage_2_where_gradients_are_with_their_owners(rank, world):
    trained(rank, 2, inside=False)


@ranks.on(2)
def test_those_that_only_hand_on_are_not(rank, world):
    model = built()
    sharded = zero.OSS(model.parameters(), Adam, lr=0.01)
    wrapped, optimizer = zero.ShardedDDP(model, sharded), Passing(sharded)
    for step in range(2):
        take_step(optimizer, loss_of(wrapped, rank, step))
