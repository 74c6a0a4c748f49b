"""A model to compile, and the names of its weights."""

import torch
from torch import Tensor, nn

from zoo import data

WIDTH, BLOCKS = 12, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(self.norm(x))) + shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, shift=0.5)
        return 2 * self.last(torch.tanh(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.first(x))


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(data(5, WIDTH, rank=rank, step=step)) - 1).square().mean()


def plain_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the level that torch.compile puts in."""
    return {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
