"""Rows of tests: small training programs, each run at every stage beside stage 0, on two ranks, by each transport.

    row = Rows("B1: what stands in param.grad is the truth", __name__)

    @row(fails={2})                                       # same losses and parameters as stage 0 at stages 1 to 3
    def gradients_are_dropped_before_backward(t, i):      # once for i = 0, 1, 2
        loss = t.loss(i)
        t.n.zero_grad()
        loss.backward()
        t.o.step()

    @row(same={1}, refused={2: "first.weight"})           # at stage 2 every rank raises, with this pattern in the text
    def two_gradients_are_swapped(t, i): ...

    row.of("a block is used twice", net=lambda: Net(twice=True))    # a sentence, and a program: by default `trains`
    row.of("a loss is weighed", weighed, or_refused="first.weight")  # right, or every rank raises

    test_rows = row.tests()                               # last in the module

Stage 0 is DistributedDataParallel with the plain optimizer. It runs each program once, for all stages, unless 0 is
among `refused`. `fails`: the stages at which the row does not hold yet; there it is a strict expected failure.

A row runs on the plain axis; on another one it is `row.at(Point("a slow operation"))`, see axes/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam

import gpus
import matrix
import ranks
import zero
from axes import Axis, Point, axis_at
from transports import TRANSPORTS, by, in_turn
from zoo import WIDTH, Stack, data

sgd = partial(SGD, lr=0.1)
momentum = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
adam = partial(Adam, lr=0.01, weight_decay=0.01)

Net = partial(Stack, classes=3, blocks=2)

Program = Callable[["Loop", int], object]


class Loop:
    """What a program gets: the wrapped model `m`, the module inside `n`, the optimizer `o`, and what it keeps in
    `kept` from one step to the next. `folder` is empty at first, and the same on both ranks."""

    def __init__(self, row: Row, stage: int, rank: int, folder: str) -> None:
        torch.manual_seed(0)
        self.stage, self.rank, self.folder, self.axis = stage, rank, Path(folder), row.axis
        self.kept, self.seen = SimpleNamespace(), list[Tensor]()
        self.n = self.axis.net(self.axis.made(row.net), self)
        self.m, self.o = self.axis.wrapped(self, lambda optim: _wrapped(row, stage, self.n, optim), row.optim)

    def batch(self, i: int) -> Tensor:
        """Another one on each rank."""
        return self.axis.inputs(self.axis.made(lambda: data(4, WIDTH, rank=self.rank, step=i)))

    def forward(self, inputs: Tensor, **given: Any) -> Tensor:
        return self.axis.forward(self, inputs, **given)

    def loss(self, i: int, **given: Any) -> Tensor:
        """A forward of this rank's batch, whose loss is compared with stage 0's. given: for the model's forward."""
        return self.note(self.forward(self.batch(i), **given).square().mean())

    def note(self, value: Tensor) -> Tensor:
        """To be compared with what stage 0 has here."""
        self.seen.append(value.detach().clone())
        return value

    def backward(self, loss: Tensor) -> None:
        self.axis.backward(self, loss)

    def clip(self, most: float) -> Tensor:
        """By zero, the norm being compared with stage 0's."""
        self.axis.unscale(self)
        return self.note(clip_grad_norm_(self.m.parameters(), most).float())

    def update(self, loss: Tensor | None, act: Callable[[Loop], object] = id) -> None:
        """loss: if its backward was not called yet. act: what is done between backward and step."""
        if loss is not None:
            self.backward(loss)
        act(self)
        self.axis.update(self)
        self.o.zero_grad()


def trains(t: Loop, i: int) -> None:
    t.update(t.loss(i))


def changed(net: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(net)
    return net


@dataclass
class Record:
    seen: list[Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """program: called with a Loop and the step's number, `steps` times.

    same: the stages with the numbers of stage 0. refused: patterns that are in the error of every rank, by stage.
    or_refused: instead of the numbers of stage 0 there may be an error on every rank, with this pattern in it; no rank
    may wait, and ranks may not find themselves out of step.
    built: the optimizer is built before the model is wrapped.
    options: further arguments of zero.setup at stages 1 to 3. ddp: arguments of DistributedDataParallel at stages 0
    and 1. fsdp: arguments of FSDP, which stands in place of zero.setup at stage 3 then. tolerance: relative to each
    tensor's largest, where the order of summation differs for a reason. cpu_only: why it says nothing on GPUs.
    since: the torch from which DistributedDataParallel takes it.
    """

    program: Program
    name: str
    found: tuple[str, str, int]  # its module, kind and number: ranks find it there, as a program may be a lambda
    net: Callable[[], nn.Module] = Net
    optim: Callable[..., Any] = sgd
    built: bool = False
    steps: int = 3
    same: frozenset[int] = frozenset({1, 2, 3})
    refused: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    or_refused: str | None = None
    fails: frozenset[int] = frozenset()
    tolerance: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    cpu_only: str | None = None
    since: str = ""
    point: Point | None = None
    axis: Axis = field(default_factory=Axis)

    def __reduce__(self) -> Any:
        return _found, (*self.found, self.point)

    def at(self, point: Point, **how: Any) -> Row:
        """This row at a point of the axes. how: changes beside it."""
        axis, cut = axis_at(point), {"partition": point.partition}
        cuts = {"fsdp": {**self.fsdp, **cut} if self.fsdp else {}, "options": {**self.options, **cut}}
        refused = {stage: words for stage, words in self.refused.items() if stage in axis.stages}
        how = {"same": self.same & axis.stages, "refused": refused, "fails": frozenset(), **how}
        how["or_refused"] = axis.or_refused or self.or_refused
        if axis.refused:
            how |= {"same": frozenset(), "refused": axis.refused, "or_refused": None}
        tolerance = max(self.tolerance, axis.tolerance)
        return replace(self, point=point, axis=axis, tolerance=tolerance, **cuts, **how)

    def stages(self) -> list[int]:
        """Stage 0 runs where something is compared with it."""
        return sorted({*([0] if self.same else []), *self.same, *self.refused})

    def runs(self) -> list[list[int]]:
        """The stages that one call of the ranks runs."""
        alone = [stage for stage in self.stages() if stage in (self.fails | {*self.refused})]
        rest = [stage for stage in self.stages() if stage not in alone]
        if self.or_refused:
            alone, rest = [*rest[1:], *alone], []
        return [*([rest] if len(rest) > 1 else []), *([stage] for stage in alone)]

    def check(self, stages: list[int], transport: str, folder: Path) -> None:
        """One stage, or stage 0 and those that are to have its numbers."""
        __tracebackhide__ = True
        if len(stages) == 1:
            self._check_one(*stages, transport, folder)
        else:
            self._check_together(stages, transport, folder)

    def _check_together(self, stages: list[int], transport: str, folder: Path) -> None:
        for stage in stages:
            (folder / str(stage)).mkdir()
        for rank, records in enumerate(ranks.run(train_at_each, 2, args=(self, stages, transport, str(folder)))):
            for stage, record in zip(stages[1:], records[1:], strict=True):
                _compare(record, records[0], self.tolerance, f"stage {stage} has on rank {rank}")

    def _check_one(self, stage: int, transport: str, folder: Path) -> None:
        args = (self, stage, transport, str(folder))
        awaited = (10.0, 0.5) if stage in self.fails else (60.0, ranks.GRACE)  # one of the ranks may wait in vain
        with mock.patch.object(ranks, "GRACE", awaited[1]):
            if stage in self.refused:
                ranks.expect_error(train, 2, RuntimeError, *self.refused[stage], args=args, timeout=awaited[0])
            else:
                self._compare(lambda: ranks.run(train, 2, args=args, timeout=awaited[0]), folder)

    def _compare(self, run: Callable[[], list[Record]], folder: Path) -> None:
        try:
            found = run()
        except ranks.RankError as error:
            if self.or_refused is None or not all(map(self._refuses, error.outcomes)):
                raise
            return
        for rank, records in enumerate(zip(found, _reference(self, folder), strict=True)):
            _compare(*records, self.tolerance, f"rank {rank} has")

    def _refuses(self, one: ranks.Outcome) -> bool:
        refused = {"RuntimeError", "ValueError"} & {*one.types} and "out of step" not in one.message
        return bool(refused and re.search(self.or_refused or "", one.message))


_kinds: dict[tuple[str, str], Rows] = {}


class Rows:
    """The rows of one kind, whose name is the reason of its expected failures. module: in which they are.

    always: what holds for all of its rows, as in Row; `same` is by default every stage that does not refuse.
    """

    def __init__(self, kind: str, module: str, **always: Any) -> None:
        self.kind, self.rows = kind, list[Row]()
        self._module, self._always = module, always
        _kinds[module, kind] = self

    def of(self, name: str, program: Program = trains, **how: Any) -> None:
        """One row."""
        how = self._always | how
        refused = how.pop("refused", {})
        refused = {stage: (words,) if isinstance(words, str) else words for stage, words in refused.items()}
        how["same"] = frozenset(how.get("same", {1, 2, 3} - {*refused}))
        how["fails"] = frozenset(how.get("fails", ()))
        found = (self._module, self.kind, len(self.rows))
        self.rows.append(Row(program=program, name=name, refused=refused, found=found, **how))

    def __call__(self, name: str | None = None, **how: Any) -> Callable[[Program], Program]:
        """Takes in a program, by default under its own name."""

        def take(program: Program) -> Program:
            self.of(name or program.__name__, program, **how)
            return program

        return take

    def within(self, frame: Callable[..., object], **always: Any) -> Callable[..., None]:
        """Takes programs that differ in one place: frame(change, t, i) calls change(t, i) there.

        between = row.within(between_forward_and_backward)
        between("the module is cleared", lambda t, i: t.n.zero_grad(), fails={2})
        """

        def take(name: str, change: Program, **how: Any) -> None:
            self.of(f"{name} {frame.__name__}", partial(frame, change), **{**always, **how})

        return take

    def tests(self) -> Callable[..., None]:
        """A test of every row: by one transport or the other, under `make matrix` by each. A stage that refuses, or
        does not hold yet, is a test of its own."""
        cases = []
        for number, row in enumerate(self.rows):
            for turn, stages in enumerate(row.runs()):
                for transport in TRANSPORTS if matrix.WHOLE else [in_turn(number + turn)]:
                    cases.append(case(row, stages, transport, self.kind))
        return cases_as_test(cases)


def case(row: Row, stages: list[int], transport: str, reason: str) -> Any:
    """One run of a row. reason: why it fails where it does not hold yet."""
    assert row.fails <= {*row.stages()}, f"{row.name} fails where it does not run"
    marks = [pytest.mark.xfail(strict=not gpus.ON, reason=reason)] if row.fails & {*stages} else []
    marks += [gpus.cpu_only(row.cpu_only)] if row.cpu_only else []
    marks += [pytest.mark.skipif(torch.__version__ < row.since, reason=f"DDP takes it since torch {row.since}")]
    of = f"stage {stages[0]}" if len(stages) == 1 else "stages"
    words = (row.name.replace(" ", "_"), *([str(row.point)] if row.point else []), of, transport)
    return pytest.param(row, stages, transport, id="-".join(words), marks=marks)


def cases_as_test(cases: list[Any]) -> Callable[..., None]:
    """A test of rows."""

    @pytest.mark.matrix
    @pytest.mark.parametrize(("row", "stages", "transport"), cases)
    def test(row: Row, stages: list[int], transport: str, tmp_path: Path) -> None:
        __tracebackhide__ = True
        row.check(stages, transport, tmp_path)

    return test


def _found(module: str, kind: str, number: int, point: Point | None) -> Row:
    import_module(module)
    row = _kinds[module, kind].rows[number]
    return row if point is None else row.at(point)


def train(rank: int, world: int, row: Row, stage: int, transport: str, folder: str) -> Record:
    with by(transport), row.axis.running(rank, stage):
        loop = Loop(row, stage, rank, folder)
        for i in range(row.steps):
            row.axis.step(row.program, loop, i)
        return Record(loop.seen, row.axis.weights(loop))


def train_at_each(rank: int, world: int, row: Row, stages: list[int], transport: str, folder: str) -> list[Record]:
    records = []
    for stage in stages:
        try:
            records.append(train(rank, world, row, stage, transport, f"{folder}/{stage}"))
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} at stage {stage}") from error
    return records


def _wrapped(row: Row, stage: int, net: nn.Module, optim: Callable[..., Any]) -> tuple[nn.Module, Any]:
    options = {**row.options, **row.axis.options(stage)} if stage else {}
    if stage == 3 and row.fsdp:
        model = zero.FSDP(net, **row.fsdp)
        return model, optim(model.parameters())
    if stage > 1 or not row.ddp:
        return zero.setup(net, optim(net.parameters()) if row.built else optim, stage=stage, **options)
    params = net.named_parameters()
    optimizer = zero.OSS(params, optim, **options) if stage else optim(net.parameters())
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
    assert not other, f"{where} other numbers than stage 0: {other}"


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """NaN is NaN, and infinity itself."""
    largest = 0.0
    if tolerance and expected.numel():
        largest = expected.abs().nan_to_num(0.0, posinf=0.0).max().item()
    return torch.allclose(found, expected, rtol=0.0, atol=tolerance * largest, equal_nan=True)
