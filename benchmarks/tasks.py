"""What the variants are compared on: a model, the blocks that it is wrapped by, and batches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpt import GPT, Block
from launch import Rank

SEED = 0


class Tiny(nn.Module):
    """One of many small layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.linear(self.norm(x)).relu()
        return mixed


class Chain(nn.Module):
    """Many small layers: what a step takes is what goes on around the computing."""

    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tiny(width) for _ in range(layers))
        self.output = nn.Linear(width, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.output(x) - targets).square().mean()


@dataclass(frozen=True)
class Task:
    """model: built anew on each call. draw: a rank's batch, of so many sequences or rows; fixed by the generator."""

    model: Callable[[], nn.Module]
    block: type[nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    dtype: torch.dtype = torch.float32

    def build(self, device: torch.device) -> nn.Module:
        torch.manual_seed(SEED)
        with torch.device(device):
            return self.model().to(self.dtype)

    def batch(self, step: int, rank: Rank) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank.rank)
        inputs, targets = self.draw(generator)
        return inputs.to(rank.device), targets.to(rank.device)


def _tokens(tokens: int, sequences: int, length: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(tokens, (sequences, length + 1), generator=generator)
        return drawn[:, :-1], drawn[:, 1:]

    return draw


def _rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(128, 64, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


TASKS = {
    "gpt": Task(lambda: GPT(layers=6, width=512, tokens=8192, tied=False), Block, _tokens(8192, 2, 64)),
    "tiny": Task(lambda: Chain(layers=64), Tiny, _rows),
    "gpt-1b": Task(
        lambda: GPT(layers=18, width=2048, tokens=32768, tied=False), Block, _tokens(32768, 8, 128), torch.bfloat16
    ),
    "one": Task(lambda: Chain(layers=1), Tiny, _rows),
}
"""gpt: 27M parameters. tiny: 64 layers of 4K. gpt-1b: 1.04B, for GPUs. one: a single small layer."""
