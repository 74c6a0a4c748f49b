"""Gradients of a tensor that several branches read add up in the order in which they do without units.

Autograd adds them in the order in which it comes to the branches. So units must not stand in between; all the same each
is released as soon as backward has been through it.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import gpus
import ranks
from inner import unsharded_in_backward
from odd import AT, Calling, Odds, recomputed, reentrant
from runs import SideBySide, steps
from transports import READS
from zoo import WIDTH, Block, Stack

MODELS = odd = Odds()


class Adapted(nn.Module):
    """A frozen layer beside a trained one of low rank (Hu et al., 2021): both read the input."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * self.scale


class Attention(nn.Module):
    """Three units read one tensor, with several branches each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.query, self.key, self.value, self.out = Adapted(), Adapted(), Adapted(), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        scores = self.query(seen) @ self.key(seen).transpose(-1, -2)
        return x + self.out(scores.softmax(-1) @ self.value(seen))


class Side(nn.Module):
    """Three units that read what they are given, and the sum around them."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (branch(x) for branch in self.branches)
        return x + first * torch.sigmoid(second) * third


class Leaves(Calling):
    """Its blocks read the model's input, of which a gradient is asked for, and what checkpointing hands on."""

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(x.requires_grad_())


class Mixed(Stack):
    """MultiheadAttention computes otherwise where query, key and value are not one tensor."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), blocks=1)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 3 * WIDTH, batch_first=True, dropout=0.0)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([self.first(x), x.flip(0), x.cos()], dim=1)
        x = self.encoder(self.gru(self.blocks[0](x)[0])[0])
        return self.attention(x, x, x)[0]


NESTED = [Attention, Adapted, nn.Linear]
odd("adapters in blocks", partial(Stack, Attention))
odd("adapters in units of their own", partial(Stack, Attention), units=[Adapted])
odd("adapters in units within units", partial(Stack, Attention, blocks=1), units=NESTED)
odd("adapters recomputed", lambda: Calling(recomputed, Attention, blocks=1), units=NESTED)
odd("adapters under re-entrant checkpointing", lambda: Calling(reentrant, Attention, blocks=1), units=NESTED)
odd("leaves that several units read", lambda: Leaves(reentrant, Side), units=[Adapted])
odd("recurrent layers and attention", Mixed, units=[nn.LSTM, nn.GRU, nn.TransformerEncoderLayer, nn.MultiheadAttention])


class Segments(Stack):
    def middle(self, x: Tensor, blocks: slice = slice(None)) -> Tensor:
        return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)


odd("segments recomputed", lambda: Segments(blocks=8), units=[Block])
odd("siblings", lambda: Stack(Side), units=[Adapted])
odd("siblings under re-entrant checkpointing", lambda: Calling(reentrant, Side), units=[Adapted])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("name", "at"), MODELS.cases())
@ranks.on(2, timeout=20)
def test_numbers_are_those_of_torch(rank, world, name, at):
    MODELS[name].trains(rank, at)


@pytest.mark.slow
@gpus.cpu_only("there units are gathered ahead")
@pytest.mark.parametrize("at", ["3", "3 memory first"])
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("segments", "siblings"))])
@ranks.on(2, timeout=20)
def test_units_that_read_one_tensor_or_are_recomputed_together_are_released_one_by_one(rank, world, name, at):
    model = MODELS[name]
    both = SideBySide(model.net(), partial(AT[at], **model.options))
    steps(both, rank, 1)
    counts = unsharded_in_backward(both.model, [one.up.weight for one in units(both.model)])
    steps(both, rank, 2)
    assert max(counts) <= (1 if READS or at == "3 memory first" else 2)  # over Gloo one more is gathered half-way


def units(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if isinstance(one, (Adapted, Block))]
