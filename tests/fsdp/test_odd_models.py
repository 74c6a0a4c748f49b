"""Kinds of models, of inputs, and of moments for a forward that test_training.py does not have, at stage 3."""

from __future__ import annotations

import dataclasses
from collections import UserDict, defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import gpus
import ranks
from sidebyside import side_by_side
from stacks import WIDTH, Block, Scenarios, Stack, batch, loss_on, steps

SCENARIOS = scenario = Scenarios()


@scenario
def weights_that_are_computed_from_parameters(rank, world, options):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.up, self.down = weight_norm(self.up), spectral_norm(self.down)

    steps(side_by_side(Stack(block=Normed), options), rank)


@scenario
def attention_that_reads_weights_of_a_layer_inside_it(rank, world, options):
    class Attending(Block):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x):
            return x + self.inner(self.attention(x[None], x[None], x[None], need_weights=False)[0][0])

    both = side_by_side(Stack(block=Attending), options)
    steps(both, rank)
    for model in (both.model, both.plain):
        model.eval()
    with torch.no_grad():
        assert torch.equal(both.model(batch(rank, 9)), both.plain(batch(rank, 9)))


@scenario
def evaluation_between_forward_and_backward(rank, world, options):
    both = side_by_side(Stack(), options)

    def loss(model, step):
        output = model(batch(rank, step))
        with torch.no_grad():
            model(batch(rank, 20 + step))
        return output.square().mean()

    for step in range(3):
        both.step(partial(loss, step=step))


@scenario
def a_backward_between_forward_and_backward(rank, world, options):
    """The first batch's graph is there while the second's is gone through."""
    both = side_by_side(Stack(), options)
    for step in range(3):
        both.zero_grad()
        early = {model: model(batch(rank, step)) for model in (both.model, both.plain)}
        both.backward(loss_on(rank, 10 + step))
        both.backward(lambda model: early[model].square().mean())  # noqa: B023 - called at once
        both.update()


@scenario
def under_autocast(rank, world, options):
    """Which keeps cast copies of weights from one use to the next."""

    class Twice(Stack):
        def call(self, block, x):
            return block(block(x))

    both = side_by_side(Twice(), options)

    def loss(model, step):
        with torch.autocast(gpus.DEVICE, torch.bfloat16):
            output = model(batch(rank, step))
        return output.float().square().mean()

    for step in range(3):
        both.step(partial(loss, step=step))


@scenario
def an_exception_under_no_sync_and_one_in_a_forward_that_is_kept(rank, world, options):
    class Faulty(Block):
        fails = False

        def forward(self, x):
            if self.fails:
                raise KeyError("as told")
            return super().forward(x)

    both = side_by_side(Stack(block=Faulty), options)
    steps(both, rank, 2)
    both.zero_grad()
    both.backward(loss_on(rank, 2), sync=False)
    both.model.blocks[1].fails = True
    with pytest.raises(KeyError), both.model.no_sync():
        both.model(batch(rank, 3))
    both.model.blocks[1].fails = False
    both.backward(loss_on(rank, 4))  # what no_sync kept before the exception is there still
    both.update()
    both.model.blocks[2].fails = True
    with pytest.raises(KeyError), torch.no_grad():
        both.model(batch(rank, 3))
    both.model.blocks[2].fails = False
    steps(both, rank, 2)


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "SHARD_GRAD_OP"}], ids=["resharded", "kept"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_numbers_are_those_of_the_reference(name, options):
    ranks.run(SCENARIOS[name], args=(options,), timeout=20)


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Tensor


@dataclasses.dataclass
class Derived:
    """With a field that the constructor does not take."""

    hidden: Tensor
    doubled: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.hidden * 2


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Taking(Block):
    def forward(self, given: Any) -> Any:
        hidden = given["hidden"] if hasattr(given, "__getitem__") else given.hidden
        return hidden + self.inner(hidden)


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "frozen dataclass": Frozen,
    "dataclass with more fields": Derived,
    "defaultdict": lambda hidden: defaultdict(list, hidden=hidden),
    "UserDict": lambda hidden: UserDict(hidden=hidden),
    "namespace": lambda hidden: SimpleNamespace(hidden=hidden),
    "object with slots": Slots,
}


@pytest.mark.parametrize("container", CONTAINERS)
@ranks.on(2, timeout=15)
def test_inputs_in_containers_of_all_kinds(rank, world, container):
    class Giving(Stack):
        def call(self, block, x):
            return block(CONTAINERS[container](x))

    steps(side_by_side(Giving(block=Taking), {}), rank)
