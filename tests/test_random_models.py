"""Random models, options and schedules at stages 1, 2 and 3 train as torch alone trains them.

`make fuzz` tries 500, others each time; here are 25 that are always the same. A failing case is printed as the code
that makes it: paste it into FOUND, with what was wrong.
"""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import sampled_from

import ranks
from fuzz.cases import Case, Node, Step
from fuzz.drawing import cases
from fuzz.training import refusals, train
from transports import TRANSPORTS, calling

COUNT = int(os.environ.get("ZERO_FUZZ", "25"))


def check(case: Case, transport: str) -> None:
    try:
        ranks.run(calling, case.world, (transport, train, case), timeout=20)
    except ranks.RankError as error:
        patterns = [*refusals(case)]
        if not all(any(re.search(pattern, one.message) for pattern in patterns) for one in error.outcomes):
            raise


FOUND = {
    "gradients cleared by the model after a forward without backward": Case(
        (Node("linear"),), world=4, steps=(Step(before="forward alone", by_model=True),), units="size"
    ),
    "a unit that stays is read by a checkpoint": Case(
        (Node("linear"), Node("reentrant", (Node("reads"),))), units="layers", strategy="SHARD_GRAD_OP"
    ),
    "a unit that stays is read, and its own output is not used": Case(
        (Node("ignored", (Node("linear"),)), Node("reads")), units="layers", strategy="SHARD_GRAD_OP"
    ),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name, transport):
    check(FOUND[name], transport)


@settings(
    max_examples=COUNT,
    derandomize="ZERO_FUZZ" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[*HealthCheck],
    print_blob=False,
)
@given(cases(), sampled_from(TRANSPORTS))
@pytest.mark.timeout(0)
def test_random_models_train_as_by_torch_alone(case, transport):
    check(case, transport)
