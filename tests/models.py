"""Models to train in tests, data for them, and the loop that trains them with DistributedDataParallel or alone.

Every model is called with the tensors of one batch and returns logits. The models are small, their losses stay finite
and their sizes are no multiples of one another, so that cuts fall in odd places. `FeedForward` and `Stack` are for
tests that put models together themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import gpus
from zero.fsdp.fsdp import FSDP, running_model

VOCABULARY, CONTEXT = 61, 12
CLASSES = 7

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


class Block(nn.Module):
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
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
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


class FeedForward(nn.Module):
    """Two matrices and their biases, as in a transformer's block, and the residual around them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks between two layers. Its weights are the same wherever it is built."""

    def __init__(self, block: Callable[[], nn.Module], width: int, classes: int, *, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


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


@dataclass(frozen=True)
class Record:
    """What a training came to on one rank. `weights` has parameters and buffers, whole, under the model's own names."""

    losses: list[float]
    weights: dict[str, Tensor]


def train(
    model: nn.Module, optimizer: Optimizer, case: Case, rank: int, *, steps: int = 3, micro: int = 1, sync: bool = True
) -> list[float]:
    """The losses of `steps` steps, each on `micro` batches; without `sync`, all but the last under no_sync."""
    losses = []
    for step in range(steps):
        batches = [case.batch(rank, step * micro + number) for number in range(micro)]
        losses += train_step(model, optimizer, batches, sync=sync)
    return losses


def train_step(model: nn.Module, optimizer: Optimizer, batches: list[Batch], *, sync: bool = True) -> list[float]:
    losses = []
    optimizer.zero_grad()
    for number, batch in enumerate(batches, start=1):
        held_back = not sync and number < len(batches) and hasattr(model, "no_sync")
        context: AbstractContextManager[Any] = model.no_sync() if held_back else nullcontext()
        with context:
            loss = loss_of(model, batch)
            loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return losses


def take_step(optimizer: Optimizer, loss: Tensor) -> float:
    """Down one loss, by its gradients alone. The loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(*batch.inputs)
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


def reference(rank: int, case: Case, optim: Callable[..., Optimizer], **how: Any) -> Record:
    """The same training by torch alone: with DistributedDataParallel, or a plain loop without a process group."""
    model = case.model()
    wrapped = DistributedDataParallel(model, **case.ddp) if torch.distributed.is_initialized() else model
    losses = train(wrapped, optim(model.parameters()), case, rank, **how)
    return Record(losses, {name: value.detach().clone() for name, value in model.state_dict().items()})


def unit_bytes(model: FSDP) -> int:
    """Bytes of the full parameters of the largest unit."""
    return max(sum(group.full.nbytes for group in unit.groups) for unit in running_model(model).units)


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
