"""clip_grad_norm_ of FSDP beside torch's own on a whole copy of the model, whose gradients are the ranks' average."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import zero
from models import Stack
from sidebyside import SideBySide, data, on_mesh, stage_3

WIDTH = 9
NORMS = (1.0, 2.0, 3.0, math.inf)


class Block(nn.Module):
    """A matrix, vectors, a scalar, one parameter that is frozen and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(self.norm(x))) + self.frozen


class Net(Stack):
    def __init__(self) -> None:
        super().__init__(Block, WIDTH, 2)
        self.first.requires_grad_(False)


def loss_on(rank: int, step: int) -> Any:
    return lambda model: model(data(4, WIDTH, rank=rank, step=step)).square().sum()


def side_by_side(model: nn.Module, **options: Any) -> SideBySide:
    return SideBySide(model, partial(stage_3, **options), tolerance=2e-6)


def clip(both: SideBySide, max_norm: float, norm_type: float) -> Tensor:
    """Clips both; returns the norm that both told."""
    both.give_averages()
    expected = torch.nn.utils.clip_grad_norm_(both.plain.parameters(), max_norm, norm_type)
    norm = both.model.clip_grad_norm_(max_norm, norm_type)
    assert norm.dim() == 0
    assert norm.item() == pytest.approx(expected.item(), rel=2e-6), f"norm {norm_type}"
    return norm


def clipped(rank: int, world: int, options: dict[str, Any]) -> list[float]:
    both = side_by_side(Net(), **on_mesh(world, options))
    told = []
    for step, norm_type in enumerate(NORMS):
        both.zero_grad()
        both.backward(loss_on(rank, step))
        norm = clip(both, 0.05, norm_type)
        assert norm > 0.1, "nothing would be clipped"
        both.update()
        told.append(norm.item())
    return told


OPTIONS: dict[str, dict[str, Any]] = {
    "even": {},
    "whole": {"partition": "whole"},
    "kept": {"sharding_strategy": "SHARD_GRAD_OP"},
    "not sharded": {"sharding_strategy": "NO_SHARD"},
    "hybrid": {"replicas": 2},
}


@pytest.mark.parametrize(
    ("options", "world"),
    [("even", 2), ("even", 3), ("whole", 3), ("kept", 2), ("not sharded", 2), ("hybrid", 2), ("hybrid", 4)],
)
def test_norm_and_steps_are_those_of_torch_on_the_whole_model(options, world):
    """Of hybrid groups, replicas count once."""
    told = ranks.run(clipped, world, args=(OPTIONS[options],))
    assert all(norms == told[0] for norms in told), "the norm is the same number on every rank"


@ranks.on(2)
def test_without_gradients_and_on_a_rank_that_has_no_part(rank, world):
    model = zero.FSDP(Net())
    assert model.clip_grad_norm_(1.0).item() == 0.0  # no gradient anywhere
    model = zero.FSDP(nn.Linear(1, 1, bias=False))  # one rank has nothing of it
    model(torch.ones(1, 1) * 4).sum().backward()
    assert model.clip_grad_norm_(1.0).item() == pytest.approx(4.0)
    assert model.clip_grad_norm_(1.0, math.inf).item() == pytest.approx(1.0, rel=1e-5)


@ranks.on(2)
def test_of_bfloat16_in_float32(rank, world):
    torch.manual_seed(0)
    plain = nn.Linear(40, 40, bias=False, dtype=torch.bfloat16)
    model = zero.FSDP(nn.Linear(40, 40, bias=False, dtype=torch.bfloat16))
    model.load_state_dict(plain.state_dict())
    x = data(8, 40, rank=0).bfloat16()
    for one in (plain, model):
        one(x).float().square().sum().backward()
    for norm_type in (1.0, 2.0):
        expected = plain.weight.grad.float().norm(norm_type)
        assert model.clip_grad_norm_(1e9, norm_type).item() == pytest.approx(expected.item(), rel=1e-5)


class Wide(Net):
    """Of two dtypes; the few elements of one of them lie with one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@ranks.on(2, timeout=15)
def test_of_two_dtypes_where_not_every_rank_has_parts_of_both(rank, world):
    both = side_by_side(Wide())
    for step, norm_type in enumerate(NORMS):
        both.zero_grad()
        both.backward(loss_on(rank, step))
        assert clip(both, 0.05, norm_type) > 0.1
        both.update()


@ranks.on(2)
def test_torchs_own_is_right_where_parameters_are_whole(rank, world):
    both = side_by_side(Net(), sharding_strategy="NO_SHARD")
    both.backward(loss_on(rank, 0))
    both.give_averages()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05) for each in (both.model, both.plain)]
    assert norms[0].item() == pytest.approx(norms[1].item(), rel=2e-6) and norms[0] > 0.1
    both.optimizer.step()
    both.plain_optimizer.step()
    both.compare()
