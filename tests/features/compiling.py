"""A model to compile, and the names of its weights."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import zero
from models import OPTIMIZERS, take_step

WIDTH, BLOCKS = 12, 3


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


def plain_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the level that torch.compile puts in."""
    return {name.replace("_orig_mod.", ""): value for name, value in weights.items()}


needs_gpt2 = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("sklearn")), reason="needs transformers and scikit-learn"
)


def gpt2_trained(rank: int, build: Callable[[nn.Module, Any], tuple[nn.Module, nn.Module]]) -> tuple[Any, int]:
    """A real model, whose blocks take a cache and return tuples: its weights, and how many graphs were compiled.

    build: of it and a backend, the wrapped model and what to call.
    """
    from families import FAMILIES

    family = FAMILIES["gpt2"]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = family.model().eval()  # compiled dropout draws by itself
    model.config.use_cache = False
    wrapped, called = build(model, counter)
    optimizer = OPTIMIZERS["sgd"](wrapped.parameters())
    for step in range(3):
        take_step(optimizer, family.loss(rank, step)(called))
    return zero.full_state_dict(wrapped), counter.frame_count
