"""A rank that fails, wherever it does: all others end with an error that says where, at once or at the time-out.

`make faults` sets ZERO_FAULTS=1 and runs every case.
"""

import math
import os
import re
import sys
from itertools import product

import faulty
import pytest
import torch
from faulty import ENDS, GROUP_TIMEOUT, PLACES, VICTIM, WORLD, Case
from torch import nn

import gpus
import matrix
import ranks
import zero
from transports import TRANSPORTS

SOON = 5.0 if gpus.ON else 1.0  # seconds
STAGES = [2, 3] if gpus.ON else [1, 2, 3]
"""At stage 1 on a GPU a host that waits for DistributedDataParallel's own all-reduce is not ours to end."""

CASES = [
    case
    for stage, transport, place, end in product(STAGES, TRANSPORTS, PLACES, ENDS)
    if (case := Case(end, place, stage, transport)).possible
]
SOME = [  # each end and each place, stage and transport; one that stops takes as long as the time-out
    Case(end, place, stage if stage in STAGES else 3, TRANSPORTS[number % len(TRANSPORTS)])
    for number, (end, place, stage) in enumerate(
        [
            ("killed", "save", 3),
            ("raised", "save", 1),
            ("left", "forward", 1),
            ("stopped", "backward", 2),
            ("raised", "backward", 3),
            ("killed", "load", 2),
            ("raised", "construction", 2),
            ("left", "construction", 3),
            ("killed", "summon_full_params", 3),
            ("left", "offload", 3),
        ]
    )
]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in SOME[1:]]


def seconds_to_end(case):
    if case.fault == "stopped":
        return GROUP_TIMEOUT * (1 if case.transport == "host memory" else 2) + SOON  # Gloo: to receive, then to send
    return SOON


def expected_text(case):
    if case.fault == "raised" and (case.where in ("save", "load") or (case.where == "construction" and case.stage < 3)):
        return r"Fault: the victim's own.*\(on rank 1\)"
    if case.stage == 1 and case.where in ("forward", "backward"):
        return "RuntimeError: "  # DistributedDataParallel's own, if it is not ours
    has = "has" if case.fault == "stopped" and case.transport != "host memory" else "has stopped"
    return rf"RuntimeError: rank \d failed in \w+ .+: (another rank|rank 1) of the group of {WORLD} {has}"


@pytest.mark.faults
@pytest.mark.parametrize("case", CASES if matrix.FAULTS else [SOME[0], *SLOW], ids=str)
def test_when_one_rank_fails_all_others_end_and_say_where(case, tmp_path):
    try:
        outcomes = [ranks.Outcome("returned", value) for value in ranks.run(faulty.run, WORLD, (case, tmp_path))]
    except ranks.RankError as error:
        outcomes = error.outcomes
    if not outcomes[VICTIM].returned:
        assert outcomes.pop(VICTIM).verdict.startswith("died with exit code")
    assert len(outcomes) >= WORLD - 1
    for outcome in outcomes:
        assert outcome.returned, f"{outcome.verdict}\n{outcome.detail}"
        seconds, text = outcome.value
        assert re.match(f"(ValueError: .*|CheckpointError: .*)?{expected_text(case)}", text, re.DOTALL), text
        assert not math.isnan(seconds), f"the fault never came, but: {text}"
        assert seconds < seconds_to_end(case), text


def closed_without_the_victim(rank: int, world: int) -> list[str]:
    model, optimizer = zero.setup(nn.Linear(4, 4), torch.optim.SGD, stage=1, lr=0.1)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1, 4)).sum()
        if rank == VICTIM:
            os._exit(0)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError) as raised:
        optimizer.step(closure)
    return raised.value.__notes__


@pytest.mark.slow
@gpus.cpu_only("DistributedDataParallel's wait for another rank ends by NCCL's own watchdog there")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 errors have no notes")
def test_an_error_of_distributed_data_parallel_in_a_closure_says_what_this_rank_waited_for():
    with pytest.raises(ranks.RankError) as raised:
        ranks.run(closed_without_the_victim, 2)
    (note,) = raised.value.outcomes[0].value
    assert re.match(r"Rank 0 was in the closure of a step of OSS\. If .* of the group of 2 has stopped or did", note)
