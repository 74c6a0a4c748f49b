"""What is trained: a small GPT, or a chain of small layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT = 128
SEED = 0


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = math.gcd(width, max(1, width // 64))  # of about 64 numbers each
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Next-token prediction; the output layer is the embedding's own weight where it is tied."""

    def __init__(self, layers: int, width: int, words: int = 256, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = None if tied else nn.Linear(width, words, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats; both arguments are int64 of shape (batch, length)."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.output is None else self.output(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Small(nn.Module):
    """A layer of few numbers: of a row it reads the first ones, and adds to all."""

    def __init__(self, width: int, read: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(read, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)[:, : self.linear.in_features]).relu()


class Unit(nn.Sequential):
    """Several of them."""


class Chain(nn.Module):
    """Many small layers: what a step takes is what goes on around the computing."""

    def __init__(self, units: int, layers: int, width: int, read: int) -> None:
        super().__init__()
        self.units = nn.Sequential(*(Unit(*(Small(width, read) for _ in range(layers))) for _ in range(units)))
        self.output = nn.Linear(width, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return (self.output(self.units(x)) - targets).square().mean()


@dataclass(frozen=True)
class Task:
    """model: built anew on each call. block: what is sharded as a unit. draw: a rank's batch, from a generator."""

    model: Callable[[], nn.Module]
    block: type[nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, ...]]

    def build(self, device: torch.device | str) -> nn.Module:
        torch.manual_seed(SEED)
        with torch.device(device):
            return self.model()

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Always the same for the same step and rank."""
        drawn = self.draw(torch.Generator().manual_seed(1000 * step + rank))
        return tuple(one.to(device) for one in drawn)

    def __str__(self) -> str:
        parameters = [*self.build("meta").parameters()]
        return f"{sum(param.numel() for param in parameters):,} parameters in {len(parameters)} tensors"


def gpt(layers: int, width: int, words: int = 256, *, tokens: int = 2 * CONTEXT, tied: bool = False) -> Task:
    """tokens: of a batch, in sequences of CONTEXT."""
    return Task(partial(GPT, layers, width, words, tied=tied), Block, partial(_counting, words, tokens // CONTEXT))


def chain(units: int, *, layers: int = 1, width: int = 64, read: int = 64, rows: int = 128) -> Task:
    return Task(partial(Chain, units, layers, width, read), Unit, partial(_rows, rows, width))


def _counting(words: int, sequences: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each word is the next one after the word before it, which is soon learned."""
    drawn = (torch.randint(words, (sequences, 1), generator=generator) + torch.arange(CONTEXT + 1)) % words
    return drawn[:, :-1], drawn[:, 1:]


def _rows(rows: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, width, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


TASKS = {
    "gpt": gpt(6, 512, 8192, tokens=CONTEXT),  # 27M parameters
    "layers": chain(64),  # of 4K each
    "gpt-1b": gpt(18, 2048, 32768, tokens=8 * CONTEXT),  # 1.04B, for GPUs
}
