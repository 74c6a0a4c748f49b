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
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import SGD

import gpus
import ranks
from sidebyside import side_by_side
from stacks import WIDTH, Block, Scenarios, Stack, batch, loss_on, steps

SCENARIOS = scenario = Scenarios()


@scenario
def fewer_elements_than_ranks(rank, world, options):
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1, 1))

        def forward(self, x):
            return x * self.scale + self.shift

    both = side_by_side(Stack(block=lambda: nn.Sequential(Tiny())), options)
    steps(both, rank)
    both = side_by_side(Tiny(), options)
    steps(both, rank)


@scenario
def groups_of_parameters_with_hyperparameters_of_their_own(rank, world, options):
    def groups(model):
        named = dict(model.named_parameters())
        own = [{"params": [param], "lr": 0.01 * (1 + number % 5)} for number, param in enumerate(named.values())]
        return SGD(own, momentum=0.9, weight_decay=0.1)

    both = side_by_side(Stack(), options)
    both.optimizer, both.plain_optimizer = groups(both.model), groups(both.plain)
    for step in range(4):
        both.step(loss_on(rank, step))
        for optimizer in (both.optimizer, both.plain_optimizer):  # as a scheduler does
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] *= 0.5 + 0.1 * (number % 3)


@scenario
def weights_that_are_computed_from_parameters(rank, world, options):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.up, self.down = weight_norm(self.up), spectral_norm(self.down)

    steps(side_by_side(Stack(block=Normed), options), rank)


@scenario
def recurrent_layers_that_keep_a_list_of_their_weights(rank, world, options):
    class Recurrent(Block):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

        def forward(self, x):
            return x + self.inner(self.recurrent(x[:, None])[0][:, 0])

    steps(side_by_side(Stack(block=Recurrent), options), rank)


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
def batch_normalisation(rank, world, options):
    class Normalised(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return x + self.inner(self.norm(x))

    both = side_by_side(Stack(block=Normalised), {**options, "broadcast_buffers": False})
    for step in range(4):  # statistics stay each rank's own, and are compared with the weights
        for model in (both.model, both.plain):
            model.train(step != 2)
        both.step(loss_on(rank, step))


@scenario
def units_of_a_single_layer(rank, world, options):
    policy = ModuleWrapPolicy({nn.Linear, nn.Tanh})
    steps(side_by_side(Stack(), {**options, "auto_wrap_policy": policy}), rank)


@scenario
def units_around_units_that_hold_nothing_themselves(rank, world, options):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Sequential(Block(), nn.Sequential(Block()))

        def forward(self, x):
            return self.inside(x)

    policy = CustomPolicy(lambda module: isinstance(module, (Holder, nn.Sequential, Block)))
    steps(side_by_side(Stack(block=Holder), {**options, "auto_wrap_policy": policy}), rank)


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
def dropout_takes_the_same_numbers(rank, world, options):
    both = side_by_side(Stack(block=lambda: nn.Sequential(Block(), nn.Dropout(0.5))), options)

    def loss(model, step):
        torch.manual_seed(100 * rank + step)
        return model(batch(rank, step)).square().mean()

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
