"""Tests of which `make matrix` (ZERO_MATRIX=1) runs every case, and the suite those that say what the others would.

Of those that are marked `faults` it is `make faults` (ZERO_FAULTS=1) that runs every case; those in tests/clusters are
run by `make clusters` (ZERO_CLUSTERS=1) alone.
"""

import itertools
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest

WHOLE = bool(os.environ.get("ZERO_MATRIX"))
FAULTS = bool(os.environ.get("ZERO_FAULTS"))
CLUSTERS = bool(os.environ.get("ZERO_CLUSTERS"))

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def only(test: Callable[..., Any]) -> Callable[..., Any]:
    """The suite leaves this test out: it takes seconds, and says of something larger what a fast one says already."""
    return pytest.mark.matrix(pytest.mark.skipif(not WHOLE, reason="make matrix runs it")(test))


def clusters(*packages: str) -> pytest.MarkDecorator:
    """Only `make clusters` runs these tests, which need these packages."""
    missing = [package for package in packages if find_spec(package) is None]
    needs = f", and needs {', '.join(missing)}" if missing else ""
    return pytest.mark.skipif(not CLUSTERS or bool(missing), reason=f"make clusters runs it{needs}")


def combined(
    names: str, *values: Iterable[Any], each: int = 1, slow: Callable[..., bool] = lambda *case: False
) -> Decorator:
    """Every combination; in the suite the last argument's values take turns over the combinations of the others.

    Of three arguments, each value so meets each value of the others as long as there are enough of these.

    each: how many of the last argument's values meet a combination of the others in the suite. slow: of which cases it
    is true the quick subset leaves out.
    """
    every = [list(of) for of in values]
    numbers = [range(len(of)) for of in every]
    turns = [
        (*rest, (each * sum(rest) + turn) % len(every[-1]))
        for rest in itertools.product(*numbers[:-1])
        for turn in range(each)
    ]
    assert {turn[-1] for turn in turns} == {*numbers[-1]}, "each value has to have its turn"
    chosen = itertools.product(*numbers) if WHOLE else turns
    cases = [tuple(of[number] for of, number in zip(every, case, strict=True)) for case in chosen]
    cases = [pytest.param(*case, marks=[pytest.mark.slow] if slow(*case) else []) for case in cases]

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        return pytest.mark.matrix(pytest.mark.parametrize(names, cases)(function))

    return mark
