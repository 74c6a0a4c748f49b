"""Models to train in tests, and data for them.

Models are small, their losses stay finite and their sizes are no multiples of one another, so that cuts fall in odd
places. Those of CASES are called with the tensors of one batch and return logits. `Block` and `Stack` are for tests
that put models together themselves.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import gpus

VOCABULARY, CONTEXT = 61, 12
CLASSES = 7
WIDTH = 10  # of blocks and stacks
FEATURES = 24  # of OddNet's inputs

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": partial(AdamW, lr=1e-3, weight_decay=0.1),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.mix(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """A small language model. Its embedding is also its output layer (tied)."""

    def __init__(self, width: int = 20, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(DecoderBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(CONTEXT, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """One layer of OddMLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.tensor(1.1))  # 0-dim
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.sometimes = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, *, sometimes: bool) -> Tensor:
        x = torch.tanh(self.linear(x)) * self.gain + self.frozen
        return x + self.sometimes if sometimes else x


class OddMLP(nn.Module):
    """Parameters of every odd kind.

    `sometimes` is used where the batch says so: by odd ranks always, by the others at every other step. `never` is used
    by none, `transposed` and `strided` are not contiguous, `empty` has no elements, two layers share their weight.
    """

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.layers[2].linear.weight = self.layers[0].linear.weight
        self.transposed = nn.Parameter(torch.randn(width, 9).t() / 3)
        self.strided = nn.Parameter(torch.randn(CLASSES, 2 * 9)[:, ::2] / 3)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.never = nn.Linear(3, 5)
        self.last = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, sometimes: bool) -> Tensor:
        x = self.frozen(x)
        for layer in self.layers:
            x = layer(x, sometimes=sometimes)
        return x @ self.transposed.t() @ self.strided.t() + self.last + self.empty.sum()


class ConvNet(nn.Module):
    """Convolutions with batch normalisation, whose buffers change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
            )
            for before, after in [(3, 6), (6, 10), (10, 5)]
        )
        self.head = nn.Linear(5, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        for stage in self.stages:
            images = stage(images)
        return self.head(images.mean((2, 3)))


class WideMLP(nn.Module):
    """Layers whose gradients are large enough to travel by themselves (from 256 KiB), beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(before, after), nn.Tanh()) for before, after in [(13, 270), (270, 277), (277, 290)]
        )
        self.head = nn.Linear(290, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    """Two layers and the residual around them; a ModuleList of these becomes a list of units at stage 3."""

    def __init__(self, width: int = WIDTH, hidden: int = 2 * WIDTH, between: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.between = between or nn.Tanh()

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gained(nn.Module):
    """A layer behind a norm, times a number, and the residual around them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(self.norm(x))) + shift


class Adapted(nn.Module):
    """A frozen layer beside a trained one of low rank (Hu et al., 2021)."""

    def __init__(self, before: int = WIDTH, after: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(before, after).requires_grad_(False)
        self.down, self.up = nn.Linear(before, 2, bias=False), nn.Linear(2, after, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * self.scale


class Stack(nn.Module):
    """Blocks between a layer and, if there are classes, another. Its weights are the same wherever it is built.

    A forward may choose among the blocks.
    """

    def __init__(
        self, block: Callable[[], nn.Module] = Block, width: int = WIDTH, classes: int = 0, *, blocks: int = 3
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.last = nn.Linear(width, classes) if classes else nn.Identity()

    def forward(self, x: Tensor, blocks: slice | None = None) -> Tensor:
        x = self.first(x)
        return self.last(self.middle(x) if blocks is None else self.through(self.blocks[blocks], x))

    def middle(self, x: Tensor) -> Tensor:
        return self.through(self.blocks, x)

    def through(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = self.call(block, x)
        return x

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


def made(kind: type[nn.Module], forward: Callable[..., Any], **parts: Callable[[], Any]) -> type[nn.Module]:
    """A class like `kind` with another forward, and with more modules or parameters, each made by a call."""

    def __init__(self: nn.Module, *args: Any, **how: Any) -> None:
        kind.__init__(self, *args, **how)
        for name, make in parts.items():
            setattr(self, name, make())

    return type(kind.__name__, (kind,), {"__init__": __init__, "forward": forward})


class TiedBlocks(nn.Module):
    """With tied weights, buffers and a frozen parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3))
        self.head = nn.Linear(width, width)
        self.head.weight = self.blocks[0][0].weight
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class OddNet(nn.Module):
    """What cuts treat differently: matrices, vectors, a scalar, no elements, transposed, frozen and tied weights."""

    def __init__(self, nothing: tuple[int, ...] = (3, 0)) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 37)
        self.norm = nn.LayerNorm(37)
        self.conv = nn.Conv1d(1, 3, 5, padding=2)
        self.middle = nn.Linear(37, 37, bias=False)
        self.tied = nn.Linear(37, 37)
        self.tied.weight = self.middle.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(nothing))
        self.transposed = nn.Parameter(torch.randn(37, 5).t() / 6)
        self.frozen = nn.Parameter(torch.randn(37), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(inputs)) + self.frozen)
        hidden = hidden + self.conv(hidden.unsqueeze(1)).sum(1)
        hidden = self.tied(torch.relu(self.middle(hidden))) * self.scale
        return hidden @ self.transposed.t() + self.nothing.sum()


def filled() -> OddNet:
    """For optimizers that divide by the number of a parameter's elements."""
    return OddNet(nothing=(3, 1))


def matrices() -> nn.Sequential:
    """Matrices only, which is all that Muon takes."""
    return nn.Sequential(
        nn.Linear(FEATURES, 40, bias=False), nn.Tanh(), nn.Linear(40, 24, bias=False), nn.Linear(24, 5, bias=False)
    )


def built(make: Callable[[], nn.Module] = OddNet) -> nn.Module:
    """The same model whenever it is called, on whatever rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make()


@dataclass(frozen=True)
class Batch:
    inputs: tuple[Any, ...]
    targets: Tensor


def gpt_batch(random: torch.Generator, rank: int, step: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (3, CONTEXT + 1), generator=random)
    return Batch((tokens[:, :-1],), tokens[:, 1:])


def mlp_batch(random: torch.Generator, rank: int, step: int) -> Batch:
    x = torch.randn(5, 13, generator=random)
    return Batch((x, bool(rank % 2 or step % 2)), torch.randint(CLASSES, (5,), generator=random))


def image_batch(random: torch.Generator, rank: int, step: int) -> Batch:
    images = torch.randn(4, 3, 6, 6, generator=random) + rank
    return Batch((images,), torch.randint(CLASSES, (4,), generator=random))


def wide_batch(random: torch.Generator, rank: int, step: int) -> Batch:
    return Batch((torch.randn(5, 13, generator=random),), torch.randint(CLASSES, (5,), generator=random))


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int, int], Batch]
    ddp: dict[str, Any] = field(default_factory=dict)  # what DistributedDataParallel needs to be told

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def batch(self, rank: int, step: int) -> Batch:
        return self.draw(gpus.generator(1000 * rank + step), rank, step)


CASES = {
    "gpt": Case(GPT, gpt_batch),
    "mlp": Case(OddMLP, mlp_batch, {"find_unused_parameters": True}),
    "convnet": Case(ConvNet, image_batch),
    "wide": Case(WideMLP, wide_batch),
}


def data(*shape: int, rank: int, step: int = 0, seed: int = 0) -> Tensor:
    """Normal numbers, others on each rank and at each step."""
    generator = gpus.generator(10_000 * seed + 100 * rank + step)
    return torch.randn(*shape, generator=generator)


def odd_batch(rank: int, step: int) -> Tensor:
    """For OddNet: different on every rank and in every step."""
    return torch.randn(6, FEATURES, generator=gpus.generator(1000 * rank + step))


def odd_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(odd_batch(rank, step)).square().mean()


def batch(rank: int, step: int) -> Tensor:
    """For Stack."""
    return data(4, WIDTH, rank=rank, step=step)


def loss_on(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(batch(rank, step)).square().mean()
