"""Measures the kind of an optimizer by stepping a few small tensors on the CPU.

    full     a list of tensors, by one optimizer
    lists    the same tensors, by two optimizers of half of them each, in another order
    shards   tensors cut in two, the first shards by one optimizer, the second by another

All start from the same values, take the same gradients and draw the same random numbers. If an optimizer's `shards`
equal `full`, parameters may be cut for it; if its `lists` do, it may be sharded between parameters. Compared are the
tensors and their state, bit for bit, and the numbers that the optimizer writes into its param_groups: an optimizer that
estimates one number over all parameters (Prodigy) changes that number before it changes the parameters.

The optimizers are foreign code: nothing of random generators, hooks and modes is as it was not before when they have
run, and no other rank hears of it.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.optimizers import without_optimizer_hooks
from zero._torch.recording import DispatchMode
from zero._torch.tensors import has_hooks
from zero.measure.param_groups import options
from zero.measure.shapes import shard_shape

Build = Callable[[list[dict[str, Any]]], Optimizer]
"""Makes a new optimizer from parameter groups."""

Shapes = Sequence[tuple[int, ...]]

# RAdam begins to rectify in the sixth step. Gradients grow, so that clipping shows. The probe sets its own learning
# rate, because a schedule may begin at 0.
_STEPS, _GROWTH, _RATE = 6, 2.0, 0.1

_SECONDS = 10.0  # the time limit, after which an optimizer's kind stays unknown

_MATRIX, _VECTOR, _KERNEL = (12, 16), (37,), (4, 3, 2, 2)
# Optimizers with 8-bit state use it from 4,096 elements on: the shards have fewer. Some factor matrices from 128 rows
# and columns on. These are tried last: optimizers that compute with full matrices take seconds for them.
_LONG, _LARGE = 5120, (136, 144)

# What state may have beside tensors.
_PLAIN = (type(None), str, bytes, bool, int, float, complex, np.number, torch.dtype)

# Tried in turn, as some optimizers take matrices only.
_LISTS: tuple[Shapes, ...] = ((_MATRIX, _VECTOR, _KERNEL), (_MATRIX, _VECTOR), (_MATRIX,))


class Kind(Enum):
    """What an optimizer reads to step one element: the further down, the less can be done with it."""

    ELEMENTWISE = "that element alone"
    TENSORWISE = "the parameter that it is in"
    UNKNOWN = "not known"
    COUPLED = "other parameters, too"
    HOOKED = "gradients, in hooks on parameters"
    COLLECTIVE = "what other ranks have stepped"


@dataclass(frozen=True)
class Finding:
    """reason: for the user. writes_frozen: whether a step may write into parameters that have no gradient."""

    kind: Kind
    reason: str = ""
    writes_frozen: bool = False


class _LateError(BaseException):
    """The time limit has passed. No optimizer's error: what these are caught by does not catch it."""


class _DifferenceError(Exception):
    """A comparison failed; the message says where."""


@dataclass(frozen=True)
class _Outcome:
    """The tensors' last values, their states, the numbers in param_groups after each step; whether it drew."""

    values: list[Tensor]
    states: list[dict[str, Any]]
    numbers: list[dict[str, float]]
    drew: bool = False


class Collectives(DispatchMode):
    """Raises in place of each collective, for which ranks would wait in vain. called: the name of the first."""

    called: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.called = self.called or func.overloadpacket.__name__.strip("_")
            raise RuntimeError(f"the collective {self.called} was called while an optimizer was measured")
        return func(*args, **kwargs or {})


@contextmanager
def undisturbed() -> Iterator[Collectives]:
    """In this context no global hook of optimizers is called, and no collective; generators are restored."""
    collectives = Collectives()
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(without_optimizer_hooks())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(None))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiling takes minutes
        stack.enter_context(collectives)
        yield collectives


def probe(build: Build, options: Mapping[str, Any]) -> Finding:
    """Measures the optimizers that `build` makes of a group with these options. Random generators stay as they were."""
    with undisturbed() as collectives:
        param = nn.Parameter(_values([_LARGE])[0][0])  # some register hooks on large ones only
        with suppress(Exception):  # it may raise anything, and is then measured
            _made(build, options, [param])
        if has_hooks(param):
            return Finding(Kind.HOOKED)
        measure = _Measure(build, options)
        try:
            found = measure.find()
            writes_frozen = True
            if found.kind is not Kind.UNKNOWN:
                # A step of a matrix with a gradient, and of one without.
                (value, gradient), (frozen, _) = _values([_MATRIX, _MATRIX])
                with suppress(Exception):  # not measured, so it may write
                    stepped = measure.run([(value, gradient), (frozen, None)]).values[1]
                    writes_frozen = not torch.equal(stepped, frozen)
            found = replace(found, writes_frozen=writes_frozen)
        except _LateError:
            found = Finding(Kind.UNKNOWN, f"measuring it took more than {_SECONDS:g} seconds", writes_frozen=True)
        return Finding(Kind.COLLECTIVE, collectives.called) if collectives.called else found


def single_step(build: Build, options: Mapping[str, Any], dtype: torch.dtype) -> tuple[bool, dict[str, Any]]:
    """Whether a step drew random numbers, and the state that it made, of a matrix of the user's own dtype, where
    `probe` steps float32: optimizers may round 16-bit parameters at random, and keep state in a dtype of its own.

    No and none if that is not possible: the optimizer is foreign code, and may raise anything.
    """
    with undisturbed():
        param = nn.Parameter(torch.ones(12, 16, dtype=dtype, device="cpu"))
        param.grad = torch.ones_like(param)
        try:
            optimizer = _made(build, options, [param])
            _seed(0)
            drew = _draws(optimizer.step)
            return drew, dict(optimizer.state.get(param, {}))
        except Exception:
            return False, {}


class _Measure:
    def __init__(self, build: Build, options: Mapping[str, Any]) -> None:
        self._build, self._options = build, options
        self._closure = False
        self._until = time.monotonic() + _SECONDS

    def find(self) -> Finding:
        # The shapes that the optimizer takes, without a closure if possible, two tensors of each, and their outcome.
        full, first = None, None
        for self._closure, shapes in product((False, True), _LISTS):
            given = _values([*shapes, *(shape[::-1] for shape in shapes)])
            try:
                full = self.run(given)
                if not all(value.isfinite().all() for value in full.values):
                    raise ArithmeticError("it made numbers that are not finite")
                if any(torch.equal(value, old) for value, (old, _) in zip(full.values, given, strict=True)):
                    raise RuntimeError("it left a tensor as it was")
                break
            except Exception as error:
                full, first = None, first or error
        if full is None:
            return Finding(Kind.UNKNOWN, f"steps of small tensors: {_text(first)}")
        try:
            count = len(given) // 2
            one = [kind + count * (kind % 2) for kind in range(count)][::-1]
            other = [kind + count * (1 - kind % 2) for kind in range(count)]
            for half in (one, other):  # each has one tensor of each shape
                outcome = self.run([given[index] for index in half])
                _compare_numbers(outcome, full, "some of the parameters")
                where = "beside other tensors, or at another place in the list"
                if full.drew:
                    where += " (it draws random numbers, for one tensor after another)"
                for index, value, state in zip(half, outcome.values, outcome.states, strict=True):
                    tensor = f"a tensor of shape {list(value.shape)}"
                    if not _same(value, full.values[index]):
                        raise _DifferenceError(f"{tensor} was stepped to other values {where}")
                    for key in state.keys() & full.states[index].keys():
                        if not _same(state[key], full.states[index][key]):
                            raise _DifferenceError(f"the state {key!r} of {tensor} became another {where}")
        except _DifferenceError as difference:
            return Finding(Kind.COUPLED, str(difference))
        except Exception as error:
            return Finding(Kind.UNKNOWN, f"a step of some of its tensors raised {_text(error)}")
        try:
            self._compare_shards(shapes)
            self._compare_shards([_LARGE])
            if _VECTOR in shapes:
                self._compare_shards([(_LONG,)])
        except _DifferenceError as difference:
            return Finding(Kind.TENSORWISE, str(difference))
        except Exception as error:
            return Finding(Kind.TENSORWISE, f"a step of shards of tensors raised {_text(error)}")
        return Finding(Kind.ELEMENTWISE)

    def _compare_shards(self, shapes: Shapes) -> None:
        given = _values(shapes)
        full, shards = self.run(given), list[list[tuple[Tensor, Tensor]]]([[], []])
        for value, gradient in given:  # cut inside a row and inside a SIMD vector
            numel = value.numel()
            cut = numel // 2 if numel == _LONG else numel * 3 // 7
            for half, part in enumerate([slice(None, cut), slice(cut, None)]):
                own = shard_shape(value.shape, len(value.flatten()[part]))
                shards[half].append((value.flatten()[part].view(own), gradient.flatten()[part].view(own)))
        halves = [self.run(half) for half in shards]
        for outcome in halves:
            _compare_numbers(outcome, full, "shards of them")
        for index, (value, state) in enumerate(zip(full.values, full.states, strict=True)):
            tensor = f"a tensor of shape {list(value.shape)}"
            for key, leaf in state.items():  # state of rows or matrices may take effect only after some steps
                per_element = isinstance(leaf, Tensor) and (leaf.shape == value.shape or leaf.numel() <= 1)
                if not per_element and not isinstance(leaf, _PLAIN):
                    of = f"of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                    raise _DifferenceError(f"the state {key!r} of {tensor} is {of}")
                if isinstance(leaf, Tensor) and type(leaf) not in (Tensor, nn.Parameter):
                    raise _DifferenceError(f"the state {key!r} is a {type(leaf).__name__}")
            states = [half.states[index] for half in halves]
            if not _same(torch.cat([half.values[index].flatten() for half in halves]), value.flatten()):
                raise _DifferenceError(f"{tensor} was stepped to other values than its shards")
            for key in state.keys() & states[0].keys():
                leaf = state[key]
                single = leaf.numel() == 1 if isinstance(leaf, Tensor) else isinstance(leaf, (int, float))
                if single and not all(key in of and _same(of[key], leaf) for of in states):
                    raise _DifferenceError(f"the state {key!r} of a tensor is not that of its shards")

    def run(self, given: Sequence[tuple[Tensor, Tensor | None]]) -> _Outcome:
        """Steps copies of tensors, each given with its first gradient if it has one, by a new optimizer."""
        params = [nn.Parameter(value.clone()) for value, _ in given]
        _seed(0)
        optimizer = _made(self._build, self._options, params)
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                group["lr"] = torch.full_like(rate, _RATE, device="cpu")
            elif isinstance(rate, (int, float)):
                group["lr"] = _RATE
        written, drew = [_numbers(optimizer.param_groups[0])], False
        for step in range(_STEPS):
            gradients = [None if gradient is None else gradient * _GROWTH**step for _, gradient in given]

            def evaluate(gradients: Sequence[Tensor | None] = gradients) -> Tensor:
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = None if gradient is None else gradient + param.detach() / 8
                return torch.ones((), device="cpu")

            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            _seed(step + 1)
            step_once: Callable[..., Any] = optimizer.step
            drew = _draws(partial(step_once, evaluate) if self._closure else step_once) or drew
            written.append(_numbers(optimizer.param_groups[0]))
            if time.monotonic() > self._until:
                raise _LateError
        states = [dict(_leaves("", optimizer.state.get(param, {}))) for param in params]
        return _Outcome([param.detach() for param in params], states, written, drew)


def _compare_numbers(outcome: _Outcome, full: _Outcome, of: str) -> None:
    for step, (got, expected) in enumerate(zip(outcome.numbers, full.numbers, strict=True)):
        for key in got.keys() & expected.keys():
            if got[key] != expected[key]:
                raise _DifferenceError(
                    f"it wrote {key!r} {expected[key]:.6g} into its param_groups in step {step}, and "
                    f"{got[key]:.6g} where it had {of}"
                )


def _made(build: Build, options: Mapping[str, Any], params: list[nn.Parameter]) -> Optimizer:
    """A new optimizer of one group with these options, ready to step."""
    optimizer = build([{**deepcopy(dict(options)), "params": params}])
    if callable(train := getattr(optimizer, "train", None)):
        train()  # Schedule-Free requires it
    return optimizer


def _values(shapes: Shapes) -> list[tuple[Tensor, Tensor]]:
    """Tensors and their gradients, the same for the same shapes."""
    randn = partial(torch.randn, generator=torch.Generator(device="cpu").manual_seed(1), device="cpu")
    return [(randn(shape) / 16, randn(shape)) for shape in shapes]


def _seed(number: int) -> None:
    """Seeds the generators of the CPU. torch.manual_seed would also seed those of GPUs."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _draws(work: Callable[[], object]) -> bool:
    """Whether the work draws from the generators of torch, on the CPU, or of Python."""
    before = torch.get_rng_state(), random.getstate()
    work()
    return not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    given = options(dict(group)).items()
    plain = {key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for key, value in given}
    return {key: float(value) for key, value in plain.items() if isinstance(value, (int, float, np.number))}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(f"{key}.{number}", item)
    else:
        yield key, value


def _same(one: Any, other: Any) -> bool:
    """Whether both are equal bit for bit, NaN equal to NaN; True for values that cannot be compared."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return False
        with suppress(RuntimeError, NotImplementedError):  # tensor classes of other libraries
            return bool(((one == other) | ((one != one) & (other != other))).all())
    elif isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return one == other or (one != one and other != other)
    return True


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
