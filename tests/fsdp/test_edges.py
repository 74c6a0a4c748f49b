"""Losses of what does not leave a unit through what its forward returns, and units that return their own parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import ranks
import zero
from sidebyside import side_by_side
from stacks import WIDTH, Block, Scenarios, Stack, batch

SCENARIOS = scenario = Scenarios()


class Remembering(Block):
    """Puts its hidden state by."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.up(x))
        return x + self.down(self.hidden)


def hidden_of(model: Any, x: Tensor) -> list[Tensor]:
    model(x)
    return [block.hidden for block in model.blocks]


def squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.square().mean() for tensor in tensors]).sum()


def three_steps(model: nn.Module, options: dict[str, Any], rank: int, loss: Callable[[Any, Tensor], Tensor]) -> None:
    both = side_by_side(model, options)
    for step in range(3):
        inputs = batch(rank, 2 * step), batch(rank, 2 * step + 1)
        both.step(*(lambda model, x=x: loss(model, x) for x in inputs), unsent=1)


@scenario
def hidden_states_beside_the_output(rank, world, options):
    def loss(model, x):
        return model(x).square().mean() + squares([block.hidden for block in model.blocks])

    three_steps(Stack(Remembering), options, rank, loss)


@scenario
def hidden_states_alone(rank, world, options):
    three_steps(Stack(Remembering), options, rank, lambda model, x: squares(hidden_of(model, x)))


@scenario
def the_hidden_state_of_a_block_in_the_middle(rank, world, options):
    three_steps(Stack(Remembering), options, rank, lambda model, x: squares(hidden_of(model, x)[1:2]))


@scenario
def the_hidden_state_of_a_block_that_is_checkpointed(rank, world, options):
    class Checkpointed(Stack):
        def call(self, block, x):
            return checkpoint(block, x, use_reentrant=False)

    def loss(model, x):
        return model(x).square().mean() + squares([block.hidden for block in model.blocks])

    three_steps(Checkpointed(Remembering), options, rank, loss)


@scenario
def a_loss_that_forward_puts_by(rank, world, options):
    class Silent(Stack):
        def forward(self, x):
            self.loss = super().forward(x).square().mean()

    def loss(model, x):
        assert model(x) is None
        return model.loss

    three_steps(Silent(), options, rank, loss)


@scenario
def features_that_hooks_collect(rank, world, options):
    def loss(model, x):
        features = []
        modules = [model.first, model.blocks[0], model.blocks[1].up]
        hooks = [module.register_forward_hook(lambda *seen: features.append(seen[-1])) for module in modules]
        model(x)
        for hook in hooks:
            hook.remove()
        return squares(features)

    three_steps(Stack(), options | {"auto_wrap_policy": ModuleWrapPolicy(())}, rank, loss)
    three_steps(Stack(), options, rank, loss)


@scenario
def hidden_states_that_are_changed_in_place(rank, world, options):
    class Rectified(Remembering):
        def forward(self, x):
            self.hidden = self.up(x).relu_()
            return x + self.down(self.hidden).mul_(0.5)

    three_steps(Stack(Rectified), options, rank, lambda model, x: squares(hidden_of(model, x)))


@scenario
def forces_that_forward_takes_of_an_energy(rank, world, options):
    class Energy(Block):
        def forward(self, x):
            with torch.enable_grad():
                at = x if x.requires_grad else x.detach().requires_grad_()
                energy = self.down(torch.tanh(self.up(at))).square().sum()
                (force,) = torch.autograd.grad(energy, at, create_graph=True)
            return x - 0.1 * force

    class Slope(Block):
        def forward(self, x):
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(at).sum(), at)  # without a graph: nothing is trained by it
            return self.inner(x) * slope

    for block in (Energy, Slope):
        three_steps(Stack(block), options, rank, lambda model, x: model(x).square().mean())


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@scenario
def outputs_in_objects_and_deques(rank, world, options):
    class Hiding(Block):
        def __init__(self, kind):
            super().__init__()
            self.gain, self.kind = nn.Parameter(torch.ones(WIDTH)), kind

        def forward(self, x):
            return self.kind(super().forward(x) * self.gain)

    class Finding(Stack):
        def call(self, block, x):
            return block(x).hidden

        def forward(self, x):
            return deque([super().forward(x)])

    for kind in (Slots, lambda hidden: SimpleNamespace(hidden=hidden)):
        three_steps(Finding(lambda: Hiding(kind)), options, rank, lambda model, x: model(x)[0].square().mean())  # noqa: B023


class Shifted(Stack):
    """Writes into what blocks return, which is a view."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        y += 1.0
        y[..., 0] = 0
        return y.view(len(x), WIDTH)


@scenario
def views_that_are_written_into(rank, world, options):
    class Viewed(Block):
        def __init__(self):
            super().__init__()
            self.norm, self.gain = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return (self.norm(super().forward(x)) * self.gain).view(-1, 2, WIDTH)

    three_steps(Shifted(Viewed), options, rank, lambda model, x: model(x).square().mean())


@scenario
def a_view_of_an_input_that_is_written_into(rank, world, options):
    class Viewing(Block):
        def forward(self, x):
            return x.view(-1, 2, WIDTH), self.inner(x)

    class Mixing(Stack):
        def call(self, block, x):
            viewed, inner = block(x.clone())
            return viewed.view(-1, WIDTH).mul(2) + inner

    three_steps(Mixing(Viewing), options, rank, lambda model, x: model(x).square().mean())


@scenario
def inputs_that_are_written_into_and_returned(rank, world, options):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            x *= self.scale.exp()
            return x.add_(self.shift)

    class Viewing(Stack):
        def call(self, block, x):
            return block(x.view(-1, 2, WIDTH).view(-1, WIDTH))

    for stack in (Stack, Viewing):
        three_steps(stack(Scaling), options, rank, lambda model, x: model(x).square().mean())


@scenario
def a_view_that_the_root_returns_and_that_is_written_into(rank, world, options):
    class Viewed(Stack):
        def forward(self, x):
            return super().forward(x).view(-1, 2, WIDTH)

    def loss(model, x):
        y = model(x)
        y += 1.0
        return y.square().mean()

    three_steps(Viewed(), options, rank, loss)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: len(x)]


@scenario
def a_view_of_a_parameter_from_a_unit(rank, world, options):
    class Placed(Stack):
        def __init__(self):
            super().__init__()
            self.positions = Positions()

        def middle(self, x):
            return super().middle(x + self.positions(x))

    policy = ModuleWrapPolicy({Positions, Block})
    three_steps(Placed(), options | {"auto_wrap_policy": policy}, rank, lambda model, x: model(x).square().mean())
    three_steps(Placed(), options, rank, lambda model, x: model(x).square().mean())


class Returning(Stack):
    """Gives the loss its weights, beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), {"scale": self.scale, "weight": self.first.weight.t()}


def weighted(model: nn.Module, x: Tensor) -> Tensor:
    y, weights = model(x)
    return (y * weights["scale"]).square().mean() + weights["weight"].square().sum()


@scenario
def parameters_from_the_root(rank, world, options):
    three_steps(Returning(), options, rank, weighted)


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "NO_SHARD"}], ids=["default", "no shard"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_numbers_are_those_of_the_reference(name, options):
    ranks.run(SCENARIOS[name], args=(options,), timeout=20)


@pytest.mark.parametrize(
    "name",
    [
        "hidden_states_alone",
        "inputs_that_are_written_into_and_returned",
        "a_view_of_a_parameter_from_a_unit",
        "parameters_from_the_root",
    ],
)
def test_so_they_are_of_units_that_are_released_at_once(name):
    ranks.run(SCENARIOS[name], args=({"prefetch": zero.MEMORY_FIRST},), timeout=20)


@ranks.on(2)
def test_parameters_that_are_returned_in_evaluation_are_whole_and_no_hooks_pile_up_on_them(rank, world):
    model = zero.FSDP(Returning())
    before = len(model.module.scale._backward_hooks or {})
    with torch.no_grad():
        _, weights = model(batch(rank, 0))
    whole = zero.full_state_dict(model)
    assert torch.equal(weights["weight"], whole["first.weight"].t())
    for step in range(5):
        weighted(model, batch(rank, step)).backward()
    assert weights["scale"].tolist() == [2.0]
    assert len(model.module.scale._backward_hooks or {}) == before
