"""Rows of tests: small training programs, each run at every stage beside stage 0, on two ranks, by each transport.

    row = Rows("B1: what stands in param.grad is the truth")

    @row(fails={2})                                       # same losses and parameters as stage 0 at stages 1 to 3
    def gradients_are_dropped_before_backward(t, i):      # once for i = 0, 1, 2
        loss = t.loss(i)
        t.n.zero_grad()
        loss.backward()
        t.o.step()

    @row(same={1}, refused={2: "first.weight"})           # at stage 2 every rank raises, with this pattern in the text
    def two_gradients_are_swapped(t, i): ...

    test_rows = row.tests()                               # last in the module

Stage 0 is DistributedDataParallel with the plain optimizer. It runs each program once, for all stages, unless 0 is
among `refused`. `fails`: the stages at which the row does not hold yet; there it is a strict expected failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import ranks
import zero
from sidebyside import data
from transports import TRANSPORTS, by

WIDTH = 6

sgd = partial(SGD, lr=0.1)
momentum = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
adam = partial(Adam, lr=0.01, weight_decay=0.01)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """At stage 3 each block is a unit, and the rest the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@dataclass(frozen=True, eq=False)
class Row:
    """program: called with a Loop and the step's number, `steps` times. name: by default the program's.

    options: further arguments of zero.setup at stages 1 to 3. ddp: arguments of DistributedDataParallel at stages 0
    and 1. tolerance: relative to each tensor's largest, where the order of summation differs for a reason.
    """

    program: Callable[[Loop, int], object]
    name: str
    net: Callable[[], nn.Module]
    optim: Callable[..., Any]
    steps: int
    same: frozenset[int]
    refused: Mapping[int, tuple[str, ...]]
    fails: frozenset[int]
    tolerance: float
    options: Mapping[str, Any]
    ddp: Mapping[str, Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Ranks import the module of a row and find it there, as a program may be a lambda."""
        module = getattr(self.program, "func", self.program).__module__
        rows = _rows_of(module)
        return (_row_of, (module, rows.index(self))) if self in rows else super().__reduce_ex__(protocol)

    def stages(self) -> list[int]:
        return sorted({0, *self.same, *self.refused})

    def check(self, stage: int, transport: str, folder: Path) -> None:
        __tracebackhide__ = True
        args = (self, stage, transport, str(folder))
        awaited = (10.0, 0.5) if stage in self.fails else (60.0, ranks.GRACE)  # one of the ranks may wait in vain
        with mock.patch.object(ranks, "GRACE", awaited[1]):
            if stage in self.refused:
                ranks.expect_error(train, 2, RuntimeError, *self.refused[stage], args=args, timeout=awaited[0])
            elif stage == 0:
                _reference(self, folder)
            else:
                found = ranks.run(train, 2, args=args, timeout=awaited[0])
                for rank, records in enumerate(zip(found, _reference(self, folder), strict=True)):
                    _compare(*records, self.tolerance, f"on rank {rank}")


class Loop:
    """What a program gets: the wrapped model `m`, the module inside `n`, the optimizer `o`, and what it keeps in
    `kept` from one step to the next. `folder` is empty at first, and the same on both ranks."""

    def __init__(self, row: Row, stage: int, rank: int, folder: str) -> None:
        torch.manual_seed(0)
        self.stage, self.rank, self.folder, self.n = stage, rank, Path(folder), row.net()
        self.m, self.o = _wrapped(row, stage, self.n)
        self.kept, self.seen = SimpleNamespace(), list[Tensor]()

    def batch(self, i: int) -> Tensor:
        """Another one on each rank."""
        return data(4, WIDTH, rank=self.rank, step=i)

    def loss(self, i: int, **given: Any) -> Tensor:
        """A forward of this rank's batch, whose loss is compared with stage 0's. given: for the model's forward."""
        loss: Tensor = self.m(self.batch(i), **given).square().mean()
        return self.note(loss)

    def note(self, value: Tensor) -> Tensor:
        """To be compared with what stage 0 has here."""
        self.seen.append(value.detach().clone())
        return value


@dataclass
class Record:
    seen: list[Tensor]
    weights: dict[str, Tensor]


@dataclass
class Rows:
    """The rows of one kind, whose name is the reason of its expected failures."""

    kind: str
    rows: list[Row] = field(default_factory=list)

    def __call__(
        self,
        name: str | None = None,
        *,
        net: Callable[[], nn.Module] = Net,
        optim: Callable[..., Any] = sgd,
        steps: int = 3,
        same: Iterable[int] | None = None,
        refused: Mapping[int, str | tuple[str, ...]] | None = None,
        fails: Iterable[int] = (),
        tolerance: float = 0.0,
        options: Mapping[str, Any] | None = None,
        ddp: Mapping[str, Any] | None = None,
    ) -> Callable[[Callable[[Loop, int], object]], Callable[[Loop, int], object]]:
        """same: the stages with the numbers of stage 0, by default all that are not refused. refused: patterns that
        are in the error of every rank, by stage. The rest as in Row."""
        told = {stage: (words,) if isinstance(words, str) else words for stage, words in (refused or {}).items()}
        alike = frozenset({1, 2, 3} - {*told} if same is None else same)
        how = (frozenset(fails), tolerance, options or {}, ddp or {})

        def take(program: Callable[[Loop, int], object]) -> Callable[[Loop, int], object]:
            called = name or program.__name__
            self.rows.append(Row(program, called, net, optim, steps, alike, told, *how))
            return program

        return take

    def within(self, frame: Callable[..., object], **always: Any) -> Callable[..., None]:
        """Takes programs that differ in one place: frame(change, t, i) calls change(t, i) there.

        between = row.within(between_forward_and_backward)
        between("the module is cleared", lambda t, i: t.n.zero_grad(), fails={2})
        """

        def take(name: str, change: Callable[[Loop, int], object], **how: Any) -> None:
            self(f"{name} {frame.__name__}", **{**always, **how})(partial(frame, change))

        return take

    def tests(self) -> Callable[..., None]:
        """A test of every row at every stage by every transport."""
        cases = []
        for row in self.rows:
            assert row.fails <= {*row.stages()}, f"{row.name} fails where it does not run"
            for stage in row.stages():
                marks = [pytest.mark.xfail(strict=True, reason=self.kind)] if stage in row.fails else []
                for transport in TRANSPORTS if stage else TRANSPORTS[:1]:
                    words = (row.name.replace(" ", "_"), f"stage {stage}", transport)
                    cases.append(pytest.param(row, stage, transport, id="-".join(words), marks=marks))

        @pytest.mark.parametrize(("row", "stage", "transport"), cases)
        def test(row: Row, stage: int, transport: str, tmp_path: Path) -> None:
            __tracebackhide__ = True
            row.check(stage, transport, tmp_path)

        return test


def _rows_of(module: str) -> list[Row]:
    return [row for rows in vars(import_module(module)).values() if isinstance(rows, Rows) for row in rows.rows]


def _row_of(module: str, number: int) -> Row:
    return _rows_of(module)[number]


def train(rank: int, world: int, row: Row, stage: int, transport: str, folder: str) -> Record:
    with by(transport):
        loop = Loop(row, stage, rank, folder)
        for i in range(row.steps):
            row.program(loop, i)
        return Record(loop.seen, zero.full_state_dict(loop.m))


def _wrapped(row: Row, stage: int, net: nn.Module) -> tuple[nn.Module, Any]:
    if stage > 1 or not row.ddp:
        return zero.setup(net, row.optim, stage=stage, **row.options if stage else {})
    params = net.named_parameters()
    optimizer = zero.OSS(params, row.optim, **row.options) if stage else row.optim(net.parameters())
    return DistributedDataParallel(net, **row.ddp), optimizer


_references: dict[Row, list[Record]] = {}


def _reference(row: Row, folder: Path) -> list[Record]:
    if row not in _references:
        (folder / "stage 0").mkdir()
        _references[row] = ranks.run(train, 2, args=(row, 0, TRANSPORTS[0], str(folder / "stage 0")))
    return _references[row]


def _compare(found: Record, expected: Record, tolerance: float, where: str) -> None:
    assert list(found.weights) == list(expected.weights)
    assert len(found.seen) == len(expected.seen), where
    pairs = [(f"value {k}", *both) for k, both in enumerate(zip(found.seen, expected.seen, strict=True))]
    pairs += [(name, found.weights[name], expected.weights[name]) for name in expected.weights]
    other = [name for name, one, two in pairs if not _close(one, two, tolerance)]
    assert not other, f"{where} other numbers than those of stage 0: {other}"


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """NaN is NaN."""
    largest = expected.abs().max().item() if tolerance else 0.0
    return torch.allclose(found, expected, rtol=0.0, atol=tolerance * largest, equal_nan=True)
