"""Optimizers that wrap another one and keep state of their own, as Lookahead does: as without `zero`, or refused."""

from typing import Any

import pytest
from torch.optim import Adam

import ranks
import zero
from assertions import same
from optimizers import Slow
from runs import train
from zoo import built


def slow_adam(params: Any, **options: Any) -> Slow:
    return Slow(Adam(params, **options))


def trained(rank: int, stage: int, *, inside: bool = True) -> tuple[Any, Any]:
    model, optimizer = zero.setup(built(), slow_adam if inside else Adam, stage=stage, lr=0.01)
    return train(model, optimizer if inside else Slow(optimizer), rank, range(3)), zero.full_state_dict(model, to=None)


@pytest.mark.parametrize(("stage", "inside"), [(1, False), (2, False), (2, True), (3, True)])
@ranks.on(2)
def test_wrappers_train_as_the_plain_ones_inside_oss_and_around_parameters_of_fsdp(rank, world, stage, inside):
    same(trained(rank, stage, inside=inside), trained(rank, 0), "losses and weights")
