"""What a row of tests (rows.py) goes through beside its own program: one file an axis, and in it what may happen there.

    slow     one rank sleeps before an operation
    layout   parameters and gradients lie in other memory than an nn.Linear's
    dtype    16 bits: parameters, autocast, mixed precision, master weights, loss scaling
    hooks    the user's own, at every place where torch lets them
    kept     an output, a gradient, a graph is kept, on one rank or on all
    device   the default device is not the model's; shards lie in files

What happens is a class, or several by `name`; it is entered under the name of its axis and its own:

    @happens("kept: the output on rank 0")
    class OutputIsKept(Axis): ...
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

import zero

if TYPE_CHECKING:
    from rows import Loop

FILES = ("slow", "layout", "dtype", "hooks", "kept")
"""From which points are drawn. What is in MORE happens to some rows always."""
MORE = ("device",)
Make = TypeVar("Make", bound="Callable[[], Axis]")
Wrap = Callable[[Callable[..., Any]], tuple[nn.Module, Any]]
"""Of an optimizer's class. Returns the wrapped model and its optimizer."""


class Axis:
    """The plain axis: nothing happens. The others override what they change.

    stages: at which something happens. refused, or_refused, tolerance: as of a row, for any row at this point. seed: of
    what a class leaves open, the same on every rank.
    """

    stages = frozenset({1, 2, 3})
    refused: Mapping[int, tuple[str, ...]] = {}
    or_refused: str | None = None
    tolerance = 0.0
    seed = ""

    def running(self, rank: int, stage: int) -> AbstractContextManager[object]:
        """Around one training."""
        return nullcontext()

    def made(self, make: Callable[[], Any]) -> Any:
        """What the user makes: the module, a batch."""
        return make()

    def net(self, net: nn.Module, t: Loop) -> nn.Module:
        """Before wrapping."""
        return net

    def options(self, stage: int) -> dict[str, Any]:
        """Of zero.setup at stages 1 to 3."""
        return {}

    def wrapped(self, t: Loop, wrap: Wrap, optim: Callable[..., Any]) -> tuple[nn.Module, Any]:
        return wrap(optim)

    def step(self, program: Callable[[Loop, int], object], t: Loop, i: int) -> None:
        program(t, i)

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def forward(self, t: Loop, x: Tensor, **given: Any) -> Tensor:
        output: Tensor = t.m(x, **given)
        return output

    def backward(self, t: Loop, loss: Tensor) -> None:
        loss.backward()

    def unscale(self, t: Loop) -> None:
        """Before gradients are read."""

    def update(self, t: Loop) -> None:
        t.o.step()

    def weights(self, t: Loop) -> dict[str, Tensor]:
        """At the end, in full."""
        return zero.full_state_dict(t.m, to=None)


@dataclass(frozen=True)
class Point:
    """name: what happens, one of `every()`. draw: seed of what that leaves open."""

    name: str
    draw: int = 0
    partition: str = "auto"

    def __str__(self) -> str:
        return f"{self.name}, {self.partition}, {self.draw}"


_happens: dict[str, Callable[[], Axis]] = {"plain": Axis}


def happens(*names: str) -> Callable[[Make], Make]:
    """Enters a class, or what makes one, under "axis: what happens"."""

    def take(make: Make) -> Make:
        for name in names:
            assert name not in _happens, f"two are named {name!r}"
            _happens[name] = make
        return make

    return take


def every() -> list[str]:
    """All that happens, axis by axis."""
    for file in (*FILES, *MORE):
        importlib.import_module(f"axes.{file}")
    return [*_happens]


def axis_at(point: Point) -> Axis:
    every()
    axis = _happens[point.name]()
    axis.seed = str(point)
    return axis
