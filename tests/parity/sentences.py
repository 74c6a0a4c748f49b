"""Rows of one call each: a sentence, a program, and what is expected (loops.py). Options of Sentences hold for all.

or_refused: instead of the numbers of stage 0 there may be an error on every rank, with this pattern in it; no rank may
wait, and ranks may not find themselves out of step.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import ranks
from loops import Loop, Row, Rows

KINDS: dict[str, Sentences] = {}


def update(t: Loop, loss: Tensor | None, act: Callable[[Loop], object] = id) -> None:
    """loss: if its backward was not called yet. act: what is done between backward and step."""
    if loss is not None:
        loss.backward()
    act(t)
    t.o.step()
    t.o.zero_grad()


def trains(t: Loop, i: int) -> None:
    update(t, t.loss(i))


def changed(net: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(net)
    return net


@dataclass(frozen=True, eq=False)
class Sentence(Row):
    """Ranks import its module and find it there, so that programs may be lambdas."""

    found: tuple[str, str, int]
    or_refused: str | None

    def __reduce__(self) -> Any:
        return _find, self.found

    def stages(self) -> list[int]:
        """Stage 0 runs where something is compared with it."""
        return sorted({*([0] if self.same else []), *self.same, *self.refused})

    def check(self, stage: int, transport: str, folder: Path) -> None:
        __tracebackhide__ = True
        try:
            super().check(stage, transport, folder)
        except ranks.RankError as error:
            if stage == 0 or self.or_refused is None or not all(map(self._refuses, error.outcomes)):
                raise

    def _refuses(self, one: ranks.Outcome) -> bool:
        refused = {"RuntimeError", "ValueError"} & {*one.types} and "out of step" not in one.message
        return bool(refused and re.search(self.or_refused or "", one.message))


class Sentences(Rows):
    def __init__(self, kind: str, module: str, **always: Any) -> None:
        super().__init__(kind)
        self._module, self._always = module, always
        KINDS[kind] = self

    def __call__(self, sentence, program=trains, **how):  # type: ignore[no-untyped-def]
        how = self._always | how
        or_refused = how.pop("or_refused", None)
        super().__call__(sentence, **how)(program)
        found = (self._module, self.kind, len(self.rows) - 1)
        self.rows[-1] = Sentence(**vars(self.rows[-1]), found=found, or_refused=or_refused)


def _find(module: str, kind: str, number: int) -> Row:
    importlib.import_module(module)
    return KINDS[kind].rows[number]
