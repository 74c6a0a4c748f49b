"""Gradients of a tensor that several branches read add up in the order in which they do without units.

Autograd adds them in the order in which it comes to the branches. So units must not stand in between; all the same each
is released as soon as backward has been through it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import matrix
import ranks
import zero
from sidebyside import side_by_side
from stacks import WIDTH, Scenarios, Stack, batch, steps, unsharded_in_backward

SCENARIOS = scenario = Scenarios()


class Adapted(nn.Module):
    """A frozen layer beside a trained one of low rank: both read the input."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Attention(nn.Module):
    """Three units read one tensor, with several branches each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = Adapted(), Adapted(), Adapted(), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        scores = self.query(seen) @ self.key(seen).transpose(-1, -2)
        return x + self.out(scores.softmax(-1) @ self.value(seen))


NESTED = {"auto_wrap_policy": ModuleWrapPolicy({Attention, Adapted, nn.Linear})}
INNER = {"auto_wrap_policy": ModuleWrapPolicy({Adapted})}


@scenario
def adapters_in_units_of_their_own(rank, world, options):
    for units in (INNER, NESTED):
        steps(side_by_side(Stack(Attention), options | units), rank)


@scenario
def adapters_under_checkpointing(rank, world, options):
    for reentrant in (False, True):

        class Checkpointed(Stack):
            def call(self, block, x):
                return checkpoint(block, x, use_reentrant=reentrant)  # noqa: B023 - called before the next

        steps(side_by_side(Checkpointed(Attention), options | NESTED), rank)


@scenario
def recurrent_layers_and_attention(rank, world, options):
    """MultiheadAttention computes otherwise where query, key and value are not one tensor."""

    class Mixed(Stack):
        def __init__(self):
            super().__init__(lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), blocks=1)
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 3 * WIDTH, batch_first=True, dropout=0.0)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x):
            x = torch.stack([self.first(x), x.flip(0), x.cos()], dim=1)
            x = self.encoder(self.gru(self.blocks[0](x)[0])[0])
            return self.attention(x, x, x)[0]

    policy = ModuleWrapPolicy({nn.LSTM, nn.GRU, nn.TransformerEncoderLayer, nn.MultiheadAttention})
    steps(side_by_side(Mixed(), options | {"auto_wrap_policy": policy}), rank)


class Side(nn.Module):
    """Three units that read what they are given, and the sum around them."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (branch(x) for branch in self.branches)
        return x + first * torch.sigmoid(second) * third


@scenario
def leaves_that_several_units_read(rank, world, options):
    """The model's input, of which a gradient is asked for, and what re-entrant checkpointing hands on."""

    class Checkpointed(Stack):
        def call(self, block, x):
            return checkpoint(block, x, use_reentrant=True)

        def forward(self, x):
            return self.middle(x)

    both = side_by_side(Checkpointed(Side), options | INNER)
    for step in range(3):
        inputs = []

        def loss(model, step=step, inputs=inputs):
            inputs.append(batch(rank, step).requires_grad_())
            return model(inputs[-1]).square().mean()

        both.step(loss)
        assert torch.equal(inputs[0].grad, inputs[1].grad)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "memory first": {"prefetch": zero.MEMORY_FIRST},
    "speed first": {"prefetch": zero.SPEED_FIRST},
    "kept": {"reshard_after_forward": False},
}


@matrix.combined("name, options", SCENARIOS, OPTIONS, each=2)
def test_gradients_of_what_several_branches_read_add_up_in_the_same_order(name, options):
    ranks.run(SCENARIOS[name], args=(OPTIONS[options],), timeout=20)


class Siblings(Stack):
    """The units of a block read one tensor: a leaf where the block runs under re-entrant checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(Side)
        self.reentrant = reentrant

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("options", ["default", "memory first"])
@ranks.on(2, timeout=20)
def test_units_that_read_one_tensor_are_released_one_by_one(rank, world, options, reentrant):
    both = side_by_side(Siblings(reentrant), OPTIONS[options] | INNER)
    branches = [branch for block in both.model.module.blocks for branch in block.branches]
    counts = unsharded_in_backward(both.model, [branch.up.weight for branch in branches])
    steps(both, rank)
    assert max(counts) == 1
