"""Objects of a step that somebody keeps for longer: rank 0 alone, or each rank; no garbage is collected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from axes import Axis, Wrap, happens
from axes.layout import linears

if TYPE_CHECKING:
    from rows import Loop


class Kept(Axis):
    """Keeps what it is given by `keep`. alone: on rank 0."""

    def __init__(self, alone: bool) -> None:
        self.alone, self.held = alone, list[Any]()

    @contextmanager
    def running(self, rank: int, stage: int) -> Iterator[None]:
        gc.disable()
        try:
            yield
        finally:
            self.held.clear()
            gc.enable()

    def keep(self, t: Loop, *what: Any) -> None:
        if not self.alone or t.rank == 0:
            self.held.extend(what)


class Output(Kept):
    def forward(self, t: Loop, x: Tensor, **given: Any) -> Tensor:
        output = super().forward(t, x, **given)
        self.keep(t, output)
        return output


class Loss(Kept):
    def backward(self, t: Loop, loss: Tensor) -> None:
        super().backward(t, loss)
        self.keep(t, loss)


class Gradients(Kept):
    """As they stand in `param.grad` between backward and step: at stage 2 the placeholders."""

    def update(self, t: Loop) -> None:
        self.keep(t, *(param.grad for param in t.n.parameters()))
        super().update(t)


class Data(Kept):
    def step(self, program: Any, t: Loop, i: int) -> None:
        self.keep(t, *(param.detach() for param in t.n.parameters()))
        super().step(program, t, i)


class Cycle(Kept):
    def forward(self, t: Loop, x: Tensor, **given: Any) -> Tensor:
        output = super().forward(t, x, **given)
        if not self.alone or t.rank == 0:
            cycle: list[Any] = [output]
            cycle.append(cycle)
        return output


class Parts(Kept):
    def wrapped(self, t: Loop, wrap: Wrap, optim: Callable[..., Any]) -> tuple[nn.Module, Any]:
        linears(t.n)[1].register_forward_hook(lambda _, __, output: self.keep(t, output[:1]))
        return super().wrapped(t, wrap, optim)


for kind in (Output, Loss, Gradients, Data, Cycle, Parts):
    for alone, who in ((True, "rank 0"), (False, "all ranks")):
        happens(f"kept: {kind.__name__.lower()} on {who}")(partial(kind, alone))
