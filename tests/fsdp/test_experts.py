"""A mixture of experts of which each rank runs others, gathered as one unit: exact against one process on all data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import gpus
import ranks
import zero
from models import OPTIMIZERS, take_step
from sidebyside import close, data

WIDTH, EXPERTS, TOKENS = 10, 6, 8


class Expert(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """Sends each token to the expert that it likes best of those that the batch allows. Idle experts are not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert(inner=5 + number % 2) for number in range(EXPERTS))

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


class Model(nn.Module):
    def __init__(self, checkpointed: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, allowed, use_reentrant=self.checkpointed == "re-entrant")
            else:
                x = layer(x, allowed)
        return x


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and which experts they may go to: others on each rank and in each step, and the last one never."""
    allowed = torch.zeros(TOKENS, EXPERTS)
    for number in range(2):
        allowed[:, (2 * rank + step + number) % (EXPERTS - 1)] = 1.0
    return data(TOKENS, WIDTH, rank=rank, step=step), allowed


def loss_on(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    return (model(*inputs) - 1).square().mean()


def as_one_process(world: int, optim: str, steps: int, micro: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Trains on the batches of all ranks. The losses of each rank's, and the weights."""
    model = Model()
    optimizer = OPTIMIZERS[optim](model.parameters())
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            for number in range(micro):
                loss = loss_on(model, batch(rank, step * micro + number))
                loss.backward()
                losses[rank].append(loss.item())
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= world
        optimizer.step()
    return losses, model.state_dict()


def on_the_whole_batch(world: int, steps: int) -> dict[str, Tensor]:
    """The same, by one forward on all tokens at once."""
    model = Model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        inputs = zip(*(batch(rank, step) for rank in range(world)), strict=True)
        loss_on(model, tuple(torch.cat(one) for one in inputs)).backward()
        optimizer.step()
    return model.state_dict()


def assert_weights(model: nn.Module, expected: dict[str, Tensor], tolerance: float) -> None:
    found = zero.full_state_dict(model)
    assert list(found) == list(expected)
    assert [name for name, value in expected.items() if not close(found[name], value, tolerance)] == []


def train(
    rank: int, world: int, model: nn.Module, optim: str = "sgd", *, steps: int = 4, micro: int = 1, tolerance: float
) -> None:
    """Trains, and compares with one process; its own micro-batches under no_sync but for the last."""
    optimizer = OPTIMIZERS[optim](model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(micro):
            with nullcontext() if number == micro - 1 else model.no_sync():
                loss = loss_on(model, batch(rank, step * micro + number))
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
    expected, weights = as_one_process(world, optim, steps, micro)
    assert losses == (pytest.approx(expected[rank], rel=tolerance, abs=0) if tolerance else expected[rank])
    assert_weights(model, weights, tolerance)


UNITS: dict[str, Callable[[Model], dict[str, Any]]] = {
    "by_class": lambda _: {"as_one_unit": [Mixture]},
    "by_instance": lambda model: {"as_one_unit": [layer.mixture for layer in model.layers]},
    "whole_layers": lambda _: {"as_one_unit": [Layer]},
    "beside_a_policy": lambda _: {
        "auto_wrap_policy": ModuleWrapPolicy({Layer, Expert, nn.Linear}),
        "as_one_unit": [Mixture],
    },
    "kept": lambda _: {"as_one_unit": [Mixture], "reshard_after_forward": False},
    "in_whole_parts": lambda _: {"as_one_unit": [Mixture], "partition": "whole"},
}


@pytest.mark.parametrize("units", UNITS)
@ranks.on(2)
def test_each_rank_runs_other_experts_and_training_is_that_of_one_process(rank, world, units):
    for optim in OPTIMIZERS:
        inner = Model()
        model = zero.FSDP(inner, **UNITS[units](inner))
        names = [unit.name for unit in model._units]
        assert not any("experts" in name for name in names)
        assert units == "whole_layers" or {"layers.0.mixture", "layers.1.mixture"} <= set(names)
        train(rank, world, model, optim, tolerance=0.0)


def test_the_batches_send_each_rank_to_other_experts_and_leave_one_alone():
    """What the tests here rest on."""
    for step in range(4):
        by_rank = [set(batch(rank, step)[1][0].nonzero().flatten().tolist()) for rank in range(2)]
        assert by_rank[0].isdisjoint(by_rank[1])
        assert EXPERTS - 1 not in by_rank[0] | by_rank[1]


@ranks.on(4)
def test_four_ranks_agree_with_one_process_on_the_whole_batch(rank, world):
    train(rank, world, zero.FSDP(Model(), as_one_unit=[Mixture]), tolerance=2e-6)
    model = zero.FSDP(Model(), as_one_unit=[Mixture])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(4):
        take_step(optimizer, loss_on(model, batch(rank, step)))
    assert_weights(model, on_the_whole_batch(world, 4), 5e-6)
    mesh = init_device_mesh(gpus.DEVICE, (2, 2))
    hybrid = zero.FSDP(Model(), as_one_unit=[Mixture], sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    train(rank, world, hybrid, tolerance=2e-6)


@ranks.on(2)
def test_micro_batches_under_no_sync_use_experts_of_their_own(rank, world):
    for options in ({}, {"reshard_after_forward": False}):
        model = zero.FSDP(Model(), as_one_unit=[Mixture], **options)
        train(rank, world, model, steps=2, micro=3, tolerance=1e-6)  # the sums of one process run on through all


@ranks.on(2)
def test_experts_under_activation_checkpointing(rank, world):
    for kind in ("re-entrant", "not re-entrant"):
        train(rank, world, zero.FSDP(Model(kind), as_one_unit=[Mixture]), tolerance=0.0)
        train(rank, world, zero.FSDP(Model(kind), as_one_unit=[Layer]), tolerance=0.0)


@ranks.on(2)
def test_evaluation_on_experts_of_its_own(rank, world):
    model, plain = zero.FSDP(Model(), as_one_unit=[Mixture]), Model()
    for step in range(3):
        with torch.no_grad():
            assert torch.equal(model(*batch(rank, 7 + step)), plain(*batch(rank, 7 + step)))
    train(rank, world, model, tolerance=0.0)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"as_one_unit": [nn.LayerNorm]}], ids=str)
@ranks.raises(2, RuntimeError, r"unit 'layers\.0\.mixture\.experts\.\d'", "rank 0", "rank 1", "as_one_unit", timeout=15)
def test_without_it_every_rank_raises_and_names_the_experts_and_the_remedy(rank, world, options):
    model = zero.FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({Layer, Expert}), **options)
    for step in range(2):
        loss_on(model, batch(rank, step)).backward()
