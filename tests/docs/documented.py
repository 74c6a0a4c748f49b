"""What the code of the pages builds on: a small GPT, batches, and the names of `PREAMBLES`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import zero

Namespace = dict[str, Any]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model() -> Namespace:
    """A plain model, a batch of this rank's, and a list of such batches."""
    torch.manual_seed(dist.get_rank())
    batches = [(torch.randint(16, (2, 4)), torch.randint(16, (2, 4))) for _ in range(3)]
    names = {"model": GPT(), "batches": batches, "tokens": batches[0][0], "targets": batches[0][1]}
    classes = [Block, GPT, DistributedDataParallel, ModuleWrapPolicy]
    modules = {"torch": torch, "nn": nn, "dist": dist, "zero": zero, "functools": functools}
    return {**names, **modules, **{cls.__name__: cls for cls in classes}}


def trained(stage: int) -> Namespace:
    """The model at a stage, after a step and another backward."""
    names = model()
    wrapped, optimizer = zero.setup(names["model"], torch.optim.Adam, stage=stage, lr=1e-3)
    for tokens, targets in names["batches"][:2]:
        optimizer.step()
        optimizer.zero_grad()
        wrapped(tokens, targets).backward()
    return {**names, "model": wrapped, "optimizer": optimizer}


def uneven() -> Namespace:
    """Rank 1 has fewer batches."""
    names = model()
    return {**names, "batches": names["batches"][dist.get_rank() :]}


def saved() -> Namespace:
    """A checkpoint of stage 3, as the first of the run."""
    names = trained(3)
    zero.checkpoint.save("run", names["model"], names["optimizer"])
    return names


PREAMBLES: dict[str, Callable[[], Namespace]] = {
    "model": model,
    "stage 1": functools.partial(trained, 1),
    "stage 2": functools.partial(trained, 2),
    "stage 3": functools.partial(trained, 3),
    "uneven batches": uneven,
    "a checkpoint": saved,
}
