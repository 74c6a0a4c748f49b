"""Errors of the kinds that train wrongly, leak memory, send too much, lose a checkpoint, hang, or keep silent. Each can
be put into `zero` at run time, and some test has to catch it (mutants.py).

A mutant is a function of the mutant's name, whose docstring says what goes wrong. In the place of a method or function
of zero's it is called with that one and then with its arguments:

    @mutant("OSS.zero_grad")
    def zero_grad_that_clears_nothing(_, self, *given, **named): ...

A class is found by its name wherever it lies in `zero`, a function by the name of its module and its own. What is not
there, takes no argument by the name of one of the mutant's, or lacks what the mutant asks of it, is an error with the
mutant's name: Misfit.
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

ROOMS = {
    "gradients": "tests/parity",
    "steps": "tests/parity/test_norm.py tests/offload tests/oss tests/parity",
    "parameters": "tests/fsdp tests/parity",
    "saved": "tests/checkpoint tests/state tests/parity",
    "together": "tests/faults tests/comm tests/parity",
}
"""By file of mutants: the tests that are run first, one after another."""
_HERE = Path(__file__).parent
_GIVEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Misfit(Exception):
    """A mutant does not fit to what it is to replace, so that it would test nothing."""


@dataclass(frozen=True)
class Mutant:
    function: Callable[..., Any]
    targets: tuple[str, ...]

    @property
    def tests(self) -> list[str]:
        """All tests, in the order in which they are run."""
        return [*ROOMS[self.function.__module__.rpartition(".")[2]].split(), "tests"]

    @property
    def says(self) -> str:
        """What goes wrong, in one line."""
        return " ".join((self.function.__doc__ or "").split())

    def put_in(self) -> None:
        for target in self.targets:
            found, before, function = self.fit(target)
            instead = _instead(self.function, function)
            for holder, name in found:
                setattr(holder, name, instead if function is before else type(before)(instead))

    def fit(self, target: str) -> tuple[list[tuple[Any, str]], Any, Callable[..., Any]]:
        """Returns where a target is held, what is held there, and the function in it. Raises Misfit."""
        found = _holders(target)
        held = {id(inspect.getattr_static(holder, name)) for holder, name in found}
        if len(held) != 1:
            raise self._misfit(f"zero has {len(held)} of {target}" if held else f"zero has no {target}")
        before = inspect.getattr_static(*found[0])
        function = before.__func__ if isinstance(before, (staticmethod, classmethod)) else before
        known, (_, *own) = inspect.signature(function).parameters, inspect.signature(self.function).parameters.values()
        missing = [one.name for one in own if one.kind not in _GIVEN and one.name not in known]
        if missing:
            raise self._misfit(f"{target} has no argument {missing[0]}")
        takes = {one.name for one in own}
        takes |= {*known} if any(one.kind is one.VAR_POSITIONAL for one in own) else set()
        given = [
            one.name for one in known.values() if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty
        ]
        untaken = [name for name in given[1:] if name not in takes]  # the first is `self`, or a function's only one
        if untaken:
            raise self._misfit(f"{target} is given {untaken[0]}, which the mutant does not take")
        return found, before, function

    def _misfit(self, why: str) -> Misfit:
        return Misfit(f"the mutant {name_of(self.function)} does not fit: {why}")


MUTANTS: dict[str, Mutant] = {}
"""By name, room by room. Filled by `load`."""


def mutant(*targets: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Puts a function into the table. targets: in whose places it is called."""

    def entered(function: Callable[..., Any]) -> Callable[..., Any]:
        name = name_of(function)
        assert name not in MUTANTS, f"two mutants are named {name}"
        MUTANTS[name] = Mutant(function, targets)
        return function

    return entered


def skipped(**targets: str) -> None:
    """Puts mutants into the table by their names, which say what goes wrong: in a target's place nothing is done."""
    for name, of in targets.items():
        does_nothing = lambda _, *given, **named: None  # noqa: E731
        does_nothing.__name__, does_nothing.__module__ = name, sys._getframe(1).f_globals["__name__"]
        does_nothing.__doc__ = f"{of} does nothing: {name.replace('_', ' ')}."
        mutant(*of.split())(does_nothing)


def load() -> dict[str, Mutant]:
    """Returns the table."""
    for room in ROOMS:
        importlib.import_module(f"mutations.{room}")
    return MUTANTS


def name_of(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", "-")


class Changed:
    """The handle of a transfer, whose result is changed when it is waited for."""

    def __init__(self, handle: Any, change: Callable[[Any], Any]) -> None:
        self._handle, self._change = handle, change

    def wait(self) -> Any:
        return self._change(self._handle.wait())


def _instead(function: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    called = partial(function, before)

    @wraps(before)
    def instead(*args: Any, **given: Any) -> Any:
        try:
            return called(*args, **given)
        except (AttributeError, TypeError, NameError) as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if Path(frame.f_code.co_filename).parent == _HERE:
                raise Misfit(f"the mutant {name_of(function)} does not fit: {error}") from error
            raise

    return instead


def _holders(target: str) -> list[tuple[Any, str]]:
    """Returns what holds the method or function, and under which name: several modules may hold a function."""
    importlib.import_module("zero")
    modules = {name: one for name, one in sys.modules.items() if name == "zero" or name.startswith("zero.")}
    head, _, name = target.rpartition(".")
    public = getattr(modules["zero"], head, None)
    every = [value for module in modules.values() for value in vars(module).values() if isinstance(value, type)]
    own = {kind for kind in every if kind.__module__ in modules and kind.__qualname__ == head}
    kinds = [public] if isinstance(public, type) else [*own]
    if kinds:
        return [(kind, name) for kind in kinds if hasattr(kind, name)]
    rooms = [one for full, one in modules.items() if f".{full}".endswith(f".{head or 'zero'}")]
    found = [vars(room)[name] for room in rooms if inspect.isfunction(vars(room).get(name))]
    return _held_by(modules, found[0]) if len({*found}) == 1 else [(room, name) for room in rooms if name in vars(room)]


def _held_by(modules: dict[str, ModuleType], function: Any) -> list[tuple[Any, str]]:
    return [(one, name) for one in modules.values() for name, value in [*vars(one).items()] if value is function]
