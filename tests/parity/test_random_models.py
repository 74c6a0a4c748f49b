"""Random models, options and schedules at stages 1, 2 and 3 train as torch alone trains them.

`make fuzz` tries 500 by each transport, others each time; here are 60 that are always the same, 15 of them by Gloo. A
failing case is printed as the code that makes it: paste it into FOUND, with what was wrong.
"""

import os
import re

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import ranks
from fuzz.cases import Case, Micro, Node, Step
from fuzz.drawing import cases
from fuzz.training import refusals, train
from transports import TRANSPORTS, calling

# A loop may drop the gradients of all that is trained, of which OSS warns.
pytestmark = pytest.mark.filterwarnings("ignore:In two steps one after another OSS found no gradient:UserWarning")
SEARCHES = "ZERO_FUZZ" in os.environ
SHARE = {"gloo": 15, "host memory": 45} if len(TRANSPORTS) > 1 else {TRANSPORTS[0]: 60}
"""How many by each transport; Gloo costs twice as much as host memory."""


def train_each(rank: int, world: int, cases: list[Case]) -> None:
    for case in cases:
        train(rank, world, case)


def check(transport: str, *cases: Case) -> None:
    try:
        ranks.run(calling, cases[0].world, (transport, train_each, cases), timeout=20 * len(cases))
    except ranks.RankError as error:
        patterns = [pattern for case in cases for pattern in refusals(case)]
        if not all(any(re.search(pattern, one.message) for pattern in patterns) for one in error.outcomes):
            raise


PACKED = Node("packed", (Node("linear", size=4), Node("reentrant", (Node("table", size=5), Node("in place")))))
FOUND = {
    "a gradient of one rank alone comes too late, by re-entrant checkpointing": Case(
        (PACKED, PACKED, Node("residual", (Node("tiny"),)), Node("list", (Node("by rank"),))),
        stage=2,
        steps=(Step(), Step((Micro(), Micro(2)))),
        width=5,
        partition="whole",
        bucket=20,
    ),
    "gradients cleared by the model after a forward without backward": Case(
        (Node("linear"),), world=4, steps=(Step(before="forward alone", clear="model"),), units="size"
    ),
    "a unit is reached again that has gradients of an earlier backward": Case(
        (Node("sequence", inside=(Node("weight norm", size=5, of=1),)),),
        world=4,
        steps=(Step(), Step((Micro(2, retained=True),), clear="optimizer to zero")),
        width=3,
        partition="whole",
        units="blocks",
        prefetch="speed",
    ),
    "a fused optimizer's state of a transposed parameter is loaded": Case(
        (*[Node("linear", size=1)] * 3, Node("list", (Node("linear", size=1), Node("strided", size=2)))),
        stage=2,
        steps=(Step(), Step(before="reload optimizer")),
        width=2,
        rows=2,
        optim="fused adam",
    ),
    "a unit that stays is read by a checkpoint": Case(
        (Node("linear"), Node("reentrant", (Node("reads"),))), units="layers", strategy="SHARD_GRAD_OP"
    ),
    "a unit that stays is read, and its own output is not used": Case(
        (Node("ignored", (Node("linear"),)), Node("reads")), units="layers", strategy="SHARD_GRAD_OP"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name, transport):
    check(transport, FOUND[name])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_models_train_at_each_stage_as_by_torch_alone(transport):
    @settings(
        max_examples=int(os.environ.get("ZERO_FUZZ", SHARE[transport])),
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        print_blob=False,
        phases=[Phase.generate, Phase.shrink] if SEARCHES else [Phase.generate],
    )
    @given(cases())
    def each(same):
        together = [case for case in same if not [*refusals(case)]]
        for chosen in (together, *([case] for case in same if case not in together)):
            if chosen:
                check(transport, *chosen)

    if not SEARCHES:
        each = seed(TRANSPORTS.index(transport))(each)
    each()
