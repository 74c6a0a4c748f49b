"""A rank that fails, wherever it does: all others end with an error that says where, at once or at the time-out.

`make faults` sets ZERO_FAULTS=1 and runs every case.
"""

import re
from itertools import product

import faulty
import pytest
from faulty import ENDS, PLACES, VICTIM, WORLD, Case

import gpus
import matrix
import ranks
from transports import TRANSPORTS

STAGES = [2, 3] if gpus.ON else [1, 2, 3]
"""At stage 1 on a GPU a host that waits for DistributedDataParallel's own all-reduce is not ours to end."""

CASES = [
    case
    for stage, transport, place, end in product(STAGES, TRANSPORTS, PLACES, ENDS)
    if (case := Case(end, place, stage, transport)).possible
]
SOME = [  # each end, stage and transport, and most places; one that stops takes as long as the time-out
    Case(end, place, stage if stage in STAGES else 3, TRANSPORTS[number % len(TRANSPORTS)])
    for number, (end, place, stage) in enumerate(
        [
            ("killed", "save", 3),
            ("left", "forward", 1),
            ("stopped", "backward", 2),
            ("raised", "backward", 3),
            ("killed", "load", 2),
            ("raised", "construction", 2),
            ("killed", "summon_full_params", 3),
        ]
    )
]
HYBRID = [Case("killed", "backward", 3, transport, hybrid=True) for transport in TRANSPORTS]
CASES, SOME = [*CASES, *HYBRID], [*SOME, *HYBRID[-1:]]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in SOME[1:]]


def expected_text(case):
    if case.fault == "raised" and case.where in ("save", "load", "construction", "summon_full_params"):
        return r"Fault: the victim's own.*\(on rank 1\)"
    if case.fault == "raised" and case.where == "forward" and case.stage == 3:
        return "RuntimeError: rank 1 has raised Fault: the victim's own"
    if case.stage == 1 and case.where in ("forward", "backward"):
        return "RuntimeError: "  # DistributedDataParallel's own, if it is not ours
    failed = r"RuntimeError: (zero\.setup\(model, SGD, stage=\d\): )?rank \d failed in [\w.]+( .+)?: "
    if case.hybrid:
        return rf"{failed}(another rank|rank \d) of the group of 2 has stopped"
    has = "has" if case.fault == "stopped" and case.transport != "host memory" else "has stopped"
    return rf"{failed}(another rank|rank 1) of the group of {WORLD} {has}"


@pytest.mark.faults
@pytest.mark.parametrize("case", CASES if matrix.FAULTS else [SOME[0], *SLOW], ids=str)
def test_when_one_rank_fails_all_others_end_and_say_where(case, tmp_path):
    try:
        outcomes = [ranks.Outcome("returned", value) for value in ranks.run(faulty.run, case.world, (case, tmp_path))]
    except ranks.RankError as error:
        outcomes = error.outcomes
    if not outcomes[VICTIM].returned:
        assert outcomes.pop(VICTIM).verdict.startswith("died with exit code")
    assert len(outcomes) >= case.world - 1
    for outcome in outcomes:
        assert outcome.returned, f"{outcome.verdict}\n{outcome.detail}"
        came, text = outcome.value
        assert re.match(f"(ValueError: .*|CheckpointError: .*)?{expected_text(case)}", text, re.DOTALL), text
        assert came, f"the fault never came, but: {text}"
