"""A small model of blocks, and tables of what is done with it beside a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import zero
from sidebyside import SideBySide, data

WIDTH = 10

Scenario = Callable[[int, int, Any], None]
"""Of rank, number of ranks, and options of FSDP or a stage. Raises where numbers are not those of the reference."""


class Scenarios(dict[str, Scenario]):
    """By name. Called with a function, takes it in."""

    def __call__(self, function: Scenario) -> Scenario:
        self[function.__name__] = function
        return function


class Block(nn.Module):
    """Two layers; a ModuleList of these becomes a list of units at stage 3."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.between = between or nn.Tanh()

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


def unsharded_in_backward(model: zero.FSDP, params: Iterable[nn.Parameter]) -> list[int]:
    """To be filled with how many units beside the root are unsharded whenever one of the parameters has a gradient."""
    counts: list[int] = []
    for param in params:
        param.register_hook(lambda _: counts.append(sum(unit.unsharded for unit in model._units[1:])))
    return counts


def batch(rank: int, step: int) -> Tensor:
    return data(4, WIDTH, rank=rank, step=step)


def loss_on(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(batch(rank, step)).square().mean()


def steps(both: SideBySide, rank: int, count: int = 3) -> None:
    for step in range(count):
        both.step(loss_on(rank, step))
