"""Units chosen by hand: FSDP inside FSDP, and PyTorch's `wrap` while a model is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap
from torch.optim import AdamW

import ranks
import zero
from sidebyside import SideBySide, data, sgd
from stacks import WIDTH, Block
from zero.fsdp.fsdp import running_model


class Net(nn.Module):
    """Wraps what it builds where the user has enabled it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(wrap(Block()) for _ in range(2))
        self.middle = nn.Sequential(wrap(Block()), nn.Tanh(), Block())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.middle(x))


def by_wrap() -> zero.FSDP:
    with enable_wrap(wrapper_cls=zero.FSDP):
        return wrap(Net())


def by_hand() -> zero.FSDP:
    model = Net()
    model.blocks[0] = zero.FSDP(model.blocks[0], reshard_after_forward=False)
    model.blocks[1] = zero.FSDP(model.blocks[1], auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model.middle = zero.FSDP(nn.Sequential(zero.FSDP(model.middle[0]), model.middle[1], model.middle[2]))
    return zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))


UNITS = {
    by_wrap: {"", "blocks.0", "blocks.1", "middle.0"},
    by_hand: {"", "blocks.0", "blocks.1", "blocks.1.up", "blocks.1.down", "middle", "middle.0"},
}


@pytest.mark.parametrize("optim", [sgd, AdamW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("build", UNITS, ids=lambda build: build.__name__)
@ranks.on(2)
def test_units_chosen_by_hand_train_exactly_and_keep_the_models_own_names(rank, world, build, optim):
    def stage(model: nn.Module, optim: Any) -> Any:
        wrapped = build()
        return wrapped, optim(wrapped.parameters())

    both = SideBySide(Net(), stage, optim)
    assert [name for name, _ in both.model.module.named_parameters()] == [n for n, _ in both.plain.named_parameters()]
    for step in range(3):
        both.step(lambda model: model(data(4, WIDTH, rank=rank, step=step)).square().mean())  # noqa: B023
    inputs = data(4, WIDTH, rank=rank), data(4, WIDTH, rank=rank, step=9)
    both.step(*(lambda model, x=x: model(x).square().mean() for x in inputs), unsent=1)
    assert all(group.full.untyped_storage().nbytes() == 0 for group in running_model(both.model).index.groups)
    units = {unit.name for unit in both.model._units}
    assert units == UNITS[build]


@ranks.raises(2, RuntimeError, r"unit 'blocks\.1\.up'", r"unit 'middle'", "out of step", timeout=15)
def test_errors_call_units_by_their_names_in_the_whole_model(rank, world):
    model = by_hand()
    if rank:
        del model.module.blocks[1]
    model(data(4, WIDTH, rank=rank)).sum().backward()


@ranks.raises(2, ValueError, "partition='rows'", timeout=15)
def test_an_inner_fsdp_goes_on_where_the_outer_one_was_refused(rank, world):
    inner = zero.FSDP(Block())
    model = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH))
    try:
        zero.FSDP(model, partition="rows")
    except ValueError:
        assert model[0] is inner
        inner(data(4, WIDTH, rank=rank)).sum().backward()
        assert all(param.grad is None or param.grad.shape == param.shape for param in inner.parameters())
        raise
