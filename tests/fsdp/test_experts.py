"""A mixture of experts of which each rank runs others, gathered as one unit: training is that of torch, bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import matrix
import ranks
import zero
from inner import unit_names
from odd import recomputed, reentrant
from runs import SideBySide, on_mesh, side_by_side
from zoo import OPTIMIZERS, Block, Stack, data, made

WIDTH, EXPERTS, TOKENS = 6, 5, 6


Expert = made(Block, lambda self, x: self.inner(x))


class Mixture(nn.Module):
    """Sends each token to the expert that it likes best of those that the batch allows. Idle experts are not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert(WIDTH, 5 + number % 2) for number in range(EXPERTS))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        weights, chosen = (self.router(x) + allowed.log()).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            (tokens,) = (chosen == number).nonzero(as_tuple=True)
            output = output.index_add(0, tokens, self.experts[number](x[tokens]) * weights[tokens, None])
        return output


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.mixture = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Mixture()

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return x + self.mixture(self.norm(x), allowed)


class Model(Stack):
    def __init__(self, run: Callable[..., Tensor] = lambda layer, *args: layer(*args)) -> None:
        super().__init__(Layer, WIDTH, blocks=2)
        self.run = run

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.blocks:
            x = self.run(layer, x, allowed)
        return x


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and which experts they may go to: others on each rank and in each step, and the last one never."""
    allowed = torch.zeros(TOKENS, EXPERTS)
    for number in range(2):
        allowed[:, (2 * rank + step + number) % (EXPERTS - 1)] = 1.0
    return data(TOKENS, WIDTH, rank=rank, step=step), allowed


def loss_on(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: (model(*batch(rank, step)) - 1).square().mean()


def trains(
    rank: int, options: dict[str, Any], optim: str = "sgd", *, model: Any = Model, micro: int = 1, **how: Any
) -> SideBySide:
    """With all but the last of a step's micro-batches under no_sync."""
    both = side_by_side(model(), options, OPTIMIZERS[optim], **how)
    for step in range(2):
        both.step(*(loss_on(rank, micro * step + number) for number in range(micro)), unsent=micro - 1)
    return both


UNITS: dict[str, dict[str, Any]] = {
    "by class": {"as_one_unit": [Mixture]},
    "whole layers": {"as_one_unit": [Layer]},
    "beside a policy": {"auto_wrap_policy": ModuleWrapPolicy({Layer, Expert, nn.Linear}), "as_one_unit": [Mixture]},
    "kept": {"as_one_unit": [Mixture], "reshard_after_forward": False},
    "in whole parts": {"as_one_unit": [Mixture], "partition": "whole"},
}


@pytest.mark.slow
@matrix.combined("units, optim", UNITS, OPTIMIZERS)
@ranks.on(2)
def test_each_rank_runs_other_experts_and_training_is_that_of_torch(rank, world, units, optim):
    names = unit_names(trains(rank, UNITS[units], optim).model)
    assert not any("experts" in name for name in names)
    assert units == "whole layers" or {"blocks.0.mixture", "blocks.1.mixture"} <= set(names)


@pytest.mark.slow
@ranks.on(4)
def test_four_ranks_of_two_replicas_agree_within_rounding(rank, world):
    trains(rank, on_mesh(world, {"as_one_unit": [Mixture], "replicas": 2}), tolerance=5e-6)


@pytest.mark.slow
@ranks.on(2)
def test_micro_batches_under_no_sync_and_evaluation_use_experts_of_their_own(rank, world):
    both = trains(rank, UNITS["kept"], micro=2)
    with torch.no_grad():
        assert torch.equal(*(model(*batch(rank, 7)) for model in (both.model, both.plain)))


@pytest.mark.slow
@pytest.mark.parametrize(("units", "run"), [("by class", reentrant), ("whole layers", recomputed)])
@ranks.on(2)
def test_experts_under_activation_checkpointing(rank, world, units, run):
    trains(rank, UNITS[units], model=partial(Model, run))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@ranks.raises(2, RuntimeError, r"unit 'blocks\.0\.mixture\.experts\.\d'", "rank 0", "rank 1", "as_one_unit", timeout=15)
def test_without_it_every_rank_raises_and_names_the_experts_and_the_remedy(rank, world, options):
    model = zero.FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({Layer, Expert}), **options)
    for step in range(2):
        loss_on(rank, step)(model).backward()
