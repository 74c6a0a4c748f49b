"""Rows of one call each: a sentence, a program, and what is expected (loops.py).

    row = Sentences("B5: p.data = ... inside forward", __name__, net=Net)
    row("a weight is clamped", lambda t, i: update(t, t.loss(i)), or_refused="body.weight", fails={3})

Options of Sentences hold for all its rows. or_refused: instead of the numbers of stage 0 there may be an error on every
rank, with this pattern in it; no rank may wait, and ranks may not find themselves out of step.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import ranks
from loops import Loop, Row, Rows

KINDS: dict[str, Sentences] = {}


def update(t: Loop, loss: Tensor, act: Callable[[Loop], object] | None = None) -> None:
    """act: what is done between backward and step."""
    loss.backward()
    if act is not None:
        act(t)
    t.o.step()
    t.o.zero_grad()


def trains(t: Loop, i: int) -> None:
    update(t, t.loss(i))


@dataclass(frozen=True, eq=False)
class Sentence(Row):
    """Ranks import its module and find it there, so that programs may be lambdas."""

    found: tuple[str, str, int]
    or_refused: str | None

    def __reduce__(self) -> Any:
        return _find, self.found

    def check(self, stage: int, transport: str, folder: Path) -> None:
        __tracebackhide__ = True
        try:
            super().check(stage, transport, folder)
        except ranks.RankError as error:
            if stage == 0 or self.or_refused is None or not all(map(self._refuses, error.outcomes)):
                raise

    def _refuses(self, outcome: ranks.Outcome) -> bool:
        refused = {"RuntimeError", "ValueError"} & {*outcome.types} and "out of step" not in outcome.message
        return bool(refused and re.search(self.or_refused or "", outcome.message))


class Sentences(Rows):
    def __init__(self, kind: str, module: str, **always: Any) -> None:
        super().__init__(kind)
        self._module, self._always = module, always
        KINDS[kind] = self

    def __call__(  # type: ignore[override]
        self,
        sentence: str,
        program: Callable[[Loop, int], object] = trains,
        *,
        or_refused: str | None = None,
        **how: Any,
    ) -> None:
        super().__call__(sentence, **{**self._always, **how})(program)
        found = (self._module, self.kind, len(self.rows) - 1)
        self.rows[-1] = Sentence(**vars(self.rows[-1]), found=found, or_refused=or_refused)


def _find(module: str, kind: str, number: int) -> Row:
    importlib.import_module(module)
    return KINDS[kind].rows[number]
