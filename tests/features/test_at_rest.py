"""Penalties in the loss: computed from shards they are refused on every rank, inside forward they count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from sidebyside import SideBySide, data, sgd

WIDTH, POLICY = 6, ModuleWrapPolicy({nn.Linear})


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Penalised(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), penalty(self)


def penalty(module: nn.Module) -> Tensor:
    return sum((param.square().sum() for param in module.parameters()), torch.zeros(()))


def after(rank: int, world: int, options: dict[str, object]) -> None:
    model = zero.FSDP(Net(), auto_wrap_policy=POLICY, **options)
    loss = model(data(4, WIDTH, rank=rank)).square().mean()
    (loss + penalty(model)).backward()


def before(rank: int, world: int, options: dict[str, object]) -> None:
    model = zero.FSDP(Net(), auto_wrap_policy=POLICY, **options)
    found = penalty(model)
    (model(data(4, WIDTH, rank=rank)).square().mean() + found).backward()


def test_where_full_parameters_have_another_dtype_the_error_names_parameter_and_remedy():
    options = {"mixed_precision": zero.MixedPrecision(param_dtype=torch.bfloat16)}
    words = [r"[02]\.(weight|bias)", "inside forward", "summon_full_params"]
    ranks.expect_error(after, 2, RuntimeError, *words, args=(options,), timeout=15)


@pytest.mark.parametrize("when", [after, before])
def test_elsewhere_autograd_refuses_a_gradient_of_the_shards_shape(when):
    ranks.expect_error(when, 2, RuntimeError, "invalid gradient", args=({},), timeout=15)


@ranks.on(2)
def test_a_penalty_inside_forward_counts(rank, world):
    def build(module, optim):
        model = zero.FSDP(module, auto_wrap_policy=POLICY)
        return model, optim(model.parameters())

    both = SideBySide(Penalised(), build, sgd)
    for step in range(3):
        both.step(lambda model: sum(part.square().mean() for part in model(data(4, WIDTH, rank=rank, step=step))))  # noqa: B023
