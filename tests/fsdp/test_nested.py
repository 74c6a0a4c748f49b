"""Units chosen by hand: FSDP inside FSDP, and PyTorch's `wrap` while a model is built."""

import copy
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap
from torch.optim import AdamW

import ranks
import zero
from inner import unit_names, unsharded
from runs import SideBySide, sgd, steps
from zoo import WIDTH, Block, Stack, batch, loss_on


class Net(Stack):
    """Wraps what it builds where the user has enabled it."""

    def __init__(self) -> None:
        super().__init__(lambda: wrap(Block()), classes=3, blocks=2)
        self.between = nn.Sequential(wrap(Block()), nn.Tanh(), Block())

    def middle(self, x: Tensor) -> Tensor:
        return self.between(super().middle(x))


def by_wrap() -> zero.FSDP:
    with enable_wrap(wrapper_cls=zero.FSDP):
        return wrap(Net())


def by_hand() -> zero.FSDP:
    model = Net()
    model.blocks[0] = zero.FSDP(model.blocks[0], reshard_after_forward=False)
    model.blocks[1] = zero.FSDP(model.blocks[1], auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model.between = zero.FSDP(nn.Sequential(zero.FSDP(model.between[0]), model.between[1], model.between[2]))
    return zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))


UNITS = {
    by_wrap: {"", "blocks.0", "blocks.1", "between.0"},
    by_hand: {"", "blocks.0", "blocks.1", "blocks.1.up", "blocks.1.down", "between", "between.0"},
}


@pytest.mark.parametrize(("build", "optim"), [(by_wrap, AdamW), (by_hand, sgd)])
@ranks.on(2)
def test_units_chosen_by_hand_train_exactly_and_keep_the_models_own_names(rank, world, build, optim):
    def stage(model: nn.Module, optim: Any) -> Any:
        wrapped = build()
        return wrapped, optim(wrapped.parameters())

    both = SideBySide(Net(), stage, optim)
    assert [name for name, _ in both.model.module.named_parameters()] == [n for n, _ in both.plain.named_parameters()]
    steps(both, rank, 2)
    both.step(loss_on(rank, 3), loss_on(rank, 4), unsent=1)
    assert not unsharded(both.model)
    assert {*unit_names(both.model)} == UNITS[build]


@ranks.on(2)
def test_the_default_units_do_not_depend_on_what_a_rank_has_of_units_inside(rank, world):
    """Layers of a quarter of the largest block become units; of blocks inside that are not cut one rank has nothing."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())  # of one parameter
    model = Stack(lambda: zero.FSDP(copy.deepcopy(block), partition="whole"), classes=2, blocks=2)
    assert unit_names(zero.FSDP(model, partition="whole", prefetch=1))


@ranks.raises(2, RuntimeError, r"unit 'blocks\.1\.up'", r"unit 'between'", "out of step", timeout=15)
def test_errors_call_units_by_their_names_in_the_whole_model(rank, world):
    model = by_hand()
    if rank:
        del model.module.blocks[1]
    model(batch(rank, 0)).sum().backward()


@ranks.raises(2, ValueError, "partition='rows'", timeout=15)
def test_an_inner_fsdp_goes_on_where_the_outer_one_was_refused(rank, world):
    inner = zero.FSDP(Block())
    model = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH))
    try:
        zero.FSDP(model, partition="rows")
    except ValueError:
        assert model[0] is inner
        inner(batch(rank, 0)).sum().backward()
        assert all(param.grad is None or param.grad.shape == param.shape for param in inner.parameters())
        raise
