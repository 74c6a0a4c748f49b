"""partition="whole": optimizers that read whole parameters train as without sharding, and ranks own about as much."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

import matrix
import ranks
import zero
from models import Stack
from optimizers import Lamb, Shampoo
from sidebyside import SideBySide, data, on_mesh, stage_3

WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.transposed = nn.Parameter(torch.randn(WIDTH, 7).t() / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x)))) @ self.transposed.t() @ self.transposed


BLOCKS = ModuleWrapPolicy({Block})


def net(blocks: int = 3) -> nn.Module:
    return Stack(Block, WIDTH, 3, blocks=blocks)


def loss_on(rank: int, step: int) -> Any:
    return lambda model: (model(data(4, WIDTH, rank=rank, step=step)) - 1).square().mean()


class Both(Optimizer):
    """Muon for matrices, and AdamW for the rest, as one. It has the parameters of both, and steps by them."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        super().__init__(params, {})
        self.shards = [Muon(matrices, lr=0.02), AdamW(rest, lr=1e-3)]

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.shards:
            optimizer.step()


OPTIMIZERS: dict[str, Any] = {
    "Muon and AdamW": Both,
    "Shampoo-like": Shampoo,
    "LAMB-like": Lamb,
    "Adafactor": partial(Adafactor, lr=0.05),
    "SGD": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
}


def trains(rank: int, world: int, optim: str, options: dict[str, Any], tolerance: float) -> None:
    build = partial(stage_3, partition="whole", auto_wrap_policy=BLOCKS, **on_mesh(world, options))
    both = SideBySide(net(), build, OPTIMIZERS[optim], tolerance=tolerance)
    before = both.model.state_dict()
    for step in range(4):
        both.step(loss_on(rank, step))
    after = both.model.state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in after.items())


@matrix.combined("optim, options", OPTIMIZERS, [{}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"replicas": 2}])
def test_two_ranks_get_the_bits_of_the_unsharded_run(optim, options):
    ranks.run(trains, args=(optim, options, 0.0))


@pytest.mark.parametrize("optim", [one for one in OPTIMIZERS if one != "Adafactor"])
def test_three_ranks_agree_with_the_unsharded_run_within_rounding(optim):
    ranks.run(trains, 3, args=(optim, {}, 1e-4))


@pytest.mark.parametrize("optim", ["Shampoo-like", "LAMB-like", "Adafactor"])
@ranks.on(2)
def test_setup_cuts_for_the_optimizer(rank, world, optim):
    """zero.setup chooses the whole cut for an optimizer that it does not know to treat each element by itself."""
    both = SideBySide(
        net(), lambda model, optim: zero.setup(model, optim, stage=3, auto_wrap_policy=BLOCKS), OPTIMIZERS[optim]
    )
    for step in range(3):
        both.step(loss_on(rank, step))


def owned(rank: int, world: int, frozen: bool) -> tuple[int, int]:
    """Elements that a rank owns, of the trained ones, and all trained ones."""
    model = net(blocks=8)
    if frozen:
        for block in model.blocks[:4]:
            block.up.requires_grad_(False)
    whole = sum(param.numel() for param in model.parameters() if param.requires_grad)
    wrapped = zero.FSDP(model, partition="whole")
    return sum(param.numel() for param in wrapped.parameters() if param.requires_grad), whole


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_own_about_as_much_over_all_units(world, frozen):
    """Each unit has two large matrices: by itself it could not be cut for three ranks."""
    found = ranks.run(owned, world, args=(frozen,))
    total = found[0][1]
    assert sum(own for own, _ in found) == total
    assert max(own for own, _ in found) <= 1.1 * total / world


def every_parameter_with_one_rank(rank: int, world: int) -> list[int]:
    shapes = [param.shape for param in net().parameters()]
    model = zero.FSDP(net(), partition="whole")
    for param, shape in zip(model.parameters(), shapes, strict=True):
        assert param.shape == shape or param.numel() == 0
    return [param.numel() for param in model.parameters()]


def test_each_parameter_is_whole_with_one_rank():
    one, other = ranks.run(every_parameter_with_one_rank)
    expected = [param.numel() for param in net().parameters()]
    assert all({here, there} == {0, whole} for here, there, whole in zip(one, other, expected, strict=True))
