"""A rank that fails, wherever it does: all others end with an error that says where, at once or at the time-out.

`make faults` sets ZERO_FAULTS=1 and runs every case.
"""

import math
import os
import re
from itertools import product

import pytest

import faults
import ranks
from faults import ENDS, GROUP_TIMEOUT, PLACES, SLIPS, VICTIM, WORLD, Case
from transports import TRANSPORTS

WHOLE = bool(os.environ.get("ZERO_FAULTS"))
SOON = 1.0  # seconds

FAULTS = [*product(SLIPS, ["training"]), *((end, place) for place in PLACES for end in ENDS)]
CASES = [
    case
    for stage, transport in product([1, 2, 3], TRANSPORTS)
    for fault, place in FAULTS
    if (case := Case(fault, place, stage, transport)).possible
]
SOME = [  # each fault at each place, with one that stops at two of them: these take as long as the time-out
    Case(fault, place, 3 if place in ("summon_full_params", "offload") else number % 3 + 1, TRANSPORTS[number % 2])
    for number, (fault, place) in enumerate(FAULTS)
    if fault != "stopped" or place in ("backward", "load")
]


def seconds_to_end(case):
    if case.fault == "stopped" or (case.stage == 1 and case.fault in SLIPS):  # where DistributedDataParallel waits
        return GROUP_TIMEOUT * (1 if case.transport == "host memory" else 2) + SOON  # Gloo: to receive, then to send
    return SOON


def expected_text(case):
    if case.fault == "raised" and (case.where in ("save", "load") or (case.where == "construction" and case.stage < 3)):
        return r"Fault: the victim's own.*\(on rank 1\)"
    if case.stage == 1 and case.where in ("training", "forward", "backward"):
        return "RuntimeError: "  # DistributedDataParallel's own, if it is not ours
    if case.fault in SLIPS:
        return r"RuntimeError: ranks are out of step: rank \d is in \w+ .+, but rank \d in \w+ "
    return rf"RuntimeError: rank \d waited in vain in \w+ .+: another rank of the group of {WORLD} has stopped"


@pytest.mark.parametrize("case", CASES if WHOLE else SOME, ids=str)
def test_when_one_rank_fails_all_others_end_and_say_where(case, tmp_path):
    try:
        outcomes = [ranks.Outcome("returned", value) for value in ranks.run(faults.run, WORLD, (case, tmp_path))]
    except ranks.RankError as error:
        outcomes = error.outcomes
    if case.fault in ENDS and not outcomes[VICTIM].returned:
        assert outcomes.pop(VICTIM).verdict.startswith("died with exit code")
    assert len(outcomes) >= WORLD - 1
    for outcome in outcomes:
        assert outcome.returned, f"{outcome.verdict}\n{outcome.detail}"
        seconds, text = outcome.value
        assert re.match(f"(ValueError: .*|CheckpointError: .*)?{expected_text(case)}", text, re.DOTALL), text
        assert not math.isnan(seconds), f"the fault never came, but: {text}"
        assert seconds < seconds_to_end(case), text
