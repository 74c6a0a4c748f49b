"""A rank that fails, wherever it does: all others end with an error that says where, at once or at the time-out.

`make faults` sets ZERO_FAULTS=1 and runs every case.
"""

import math
import os
import re
import sys
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import faults
import gpus
import ranks
import zero
from faults import ENDS, GROUP_TIMEOUT, PLACES, SLIPS, VICTIM, WORLD, Case
from transports import TRANSPORTS

WHOLE = bool(os.environ.get("ZERO_FAULTS"))
SOON = 5.0 if gpus.ON else 1.0  # seconds
STAGES = [2, 3] if gpus.ON else [1, 2, 3]
"""At stage 1 on a GPU a host that waits for DistributedDataParallel's own all-reduce is not ours to end."""

FAULTS = [*product(SLIPS, ["training"]), *((end, place) for place in PLACES for end in ENDS)]
CASES = [
    case
    for stage, transport in product(STAGES, TRANSPORTS)
    for fault, place in FAULTS
    if (case := Case(fault, place, stage, transport)).possible
]
SOME = [  # each fault at each place, with one that stops at two of them: these take as long as the time-out
    Case(
        fault,
        place,
        3 if place in ("summon_full_params", "offload") else STAGES[number % len(STAGES)],
        TRANSPORTS[number % len(TRANSPORTS)],
    )
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
    if case.fault == "stopped" and case.transport != "host memory":
        return rf"RuntimeError: rank \d failed in \w+ .+: (another rank|rank 1) of the group of {WORLD} has "
    return rf"RuntimeError: rank \d failed in \w+ .+: (another rank|rank 1) of the group of {WORLD} has stopped"


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


def closed_without_the_victim(rank: int, world: int) -> list[str]:
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT))
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    optimizer = zero.OSS(model.parameters(), torch.optim.SGD, group, lr=0.1)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1, 4)).sum()
        if rank == VICTIM:
            os._exit(0)
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except RuntimeError as error:
        return error.__notes__
    return []


@gpus.cpu_only("DistributedDataParallel's wait for another rank ends by NCCL's own watchdog there")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 errors have no notes")
def test_an_error_of_distributed_data_parallel_in_a_closure_says_what_this_rank_waited_for():
    with pytest.raises(ranks.RankError) as raised:
        ranks.run(closed_without_the_victim, 2)
    (note,) = raised.value.outcomes[0].value
    assert re.match(r"Rank 0 was in the closure of a step of OSS\. If .* of the group of 2 has stopped or did", note)
