"""A small run at any stage in which one rank fails, wherever it does: all others end with an error that says where, at
once or at the time-out.

`make faults` sets ZERO_FAULTS=1 and runs every case.
"""

import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.optim import Optimizer

import gpus
import matrix
import ranks
import zero
from runs import take_step
from transports import TRANSPORTS, by

WORLD, VICTIM = 3, 1
STEPS, FAULTY_STEP = 4, 2
GROUP_TIMEOUT = 10.0 if gpus.ON else 2.0  # NCCL's own watchdog ends the process at this time
"""Seconds that a rank which has stopped is waited for. Others are not waited for: the run would end before."""

ENDS = ["killed", "stopped", "left", "raised"]
"""How a rank may end, wherever it is."""

PLACES = ["forward", "backward", "save", "load", "construction", "summon_full_params", "offload"]


@dataclass(frozen=True)
class Case:
    """fault: what the victim does. where: in which part of the run. hybrid: two replicas are sharded over two ranks."""

    fault: str
    where: str
    stage: int
    transport: str
    hybrid: bool = False

    def __str__(self) -> str:
        return f"{self.fault} in {self.where}, stage {self.stage}{' hybrid' * self.hybrid}, {self.transport}"

    @property
    def world(self) -> int:
        return 4 if self.hybrid else WORLD

    def groups(self, rank: int) -> dict[str, Any]:
        """Collective. Options that say among which ranks it is sharded."""
        timeout = timedelta(seconds=GROUP_TIMEOUT if self.fault == "stopped" else 200)
        if not self.hybrid:
            return {"process_group": dist.new_group(timeout=timeout)}
        made = {ranks: dist.new_group(ranks, timeout=timeout) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
        own = tuple(group for ranks, group in made.items() if rank in ranks)
        return {"process_group": own, "sharding_strategy": "HYBRID_SHARD"}

    @property
    def possible(self) -> bool:
        return self.stage == 3 or self.where not in ("summon_full_params", "offload")


class Fault(Exception):
    """What a victim raises."""


class Trigger:
    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self._fault = case.fault if rank == VICTIM else None
        self._note = folder / "fault"
        self.armed = ""

    def pull(self, where: str) -> None:
        if self._fault is None or where != self.armed:
            return
        self.armed = ""
        self._note.touch()
        if self._fault == "raised":
            raise Fault("the victim's own")
        if self._fault == "left":
            os._exit(0)
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[self._fault])

    def has_gone_off(self) -> bool:
        return self._note.exists()


class Faulty(nn.Module):
    """Passes its input on, and is asked by autograd and checkpoints where a rank may fail."""

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self._pull = trigger.pull

    def forward(self, inputs: Tensor) -> Tensor:
        self._pull("forward")
        output = inputs * 1
        if output.requires_grad:
            output.register_hook(lambda _: self._pull("backward"))
        return output

    def get_extra_state(self) -> int:
        self._pull("save")
        return 0

    def set_extra_state(self, state: int) -> None:
        self._pull("load")


class FailingSGD(torch.optim.SGD):
    def __init__(self, params: Any, trigger: Trigger, **options: Any) -> None:
        trigger.pull("construction")
        super().__init__(params, **options)


def run(rank: int, world: int, case: Case, folder: Path) -> tuple[bool, str]:
    """Whether the fault was there as this rank ended, and its error. A victim that raises or leaves ends for good."""
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    trigger = Trigger(case, rank, folder)
    groups = case.groups(rank)
    with by(case.transport):
        try:
            _train(case, groups, trigger, folder)
            told = "no error"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            if isinstance(error, Fault) and rank == VICTIM:  # others raise an error of its class
                os._exit(1)
    ended = trigger.has_gone_off()
    if case.fault == "stopped":
        _end_the_stopped(rank, folder)
    return ended, told


def _train(case: Case, groups: dict[str, Any], trigger: Trigger, folder: Path) -> None:
    model, optimizer = _build(case, groups, trigger, folder)
    if case.where == "load":
        zero.checkpoint.save(folder / "run", model, optimizer)
    for step in range(STEPS):
        if step == FAULTY_STEP:
            trigger.armed = case.where
            _visit(case.where, model, optimizer, trigger, folder)
        take_step(optimizer, model(torch.randn(4, 64)).square().mean())


def _visit(where: str, model: Any, optimizer: Optimizer, trigger: Trigger, folder: Path) -> None:
    """What the run does once, where the fault lies there."""
    if where == "save":
        zero.checkpoint.save(folder / "run", model, optimizer)
    elif where == "load":
        zero.checkpoint.load(folder / "run", model, optimizer)
    elif where == "summon_full_params":
        with model.summon_full_params():
            trigger.pull(where)
    elif where == "offload":
        trigger.pull(where)


def _build(case: Case, groups: dict[str, Any], trigger: Trigger, folder: Path) -> tuple[nn.Module, Optimizer]:
    group, optim = groups["process_group"], partial(FailingSGD, trigger=trigger)
    if case.where == "construction":
        zero.setup(nn.Linear(8, 8), torch.optim.SGD, stage=3, process_group=group, lr=0.01)  # so that ranks have met
        zero.OSS(nn.Linear(8, 8).parameters(), optim, group, partition="even", lr=0.01)  # so that it was measured
        trigger.armed = case.where
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), Faulty(trigger), nn.Linear(64, 64))
    if case.where == "construction" and case.stage < 3:
        return model, zero.OSS(model.parameters(), optim, group, partition="even", lr=0.01)
    policy = CustomPolicy(lambda _: trigger.pull("construction") or False)
    offload = zero.DiskOffload(folder / "shards") if case.where == "offload" else None
    options = {"auto_wrap_policy": policy, "offload": offload, **groups}
    if case.hybrid:
        model = zero.FSDP(model, **options)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)
    return zero.setup(model, torch.optim.SGD, stage=case.stage, lr=0.01, **options)


def _end_the_stopped(rank: int, folder: Path) -> None:
    """Once all others have ended, so that none of them was told by its end."""
    (folder / f"ended-{rank}").touch()
    others = [other for other in range(WORLD) if other != VICTIM]
    if rank == others[0]:
        until = time.monotonic() + 3 * GROUP_TIMEOUT
        while not all((folder / f"ended-{other}").exists() for other in others) and time.monotonic() < until:
            time.sleep(0.01)
        with suppress(ProcessLookupError):
            os.kill(int((folder / f"process-{VICTIM}").read_text()), signal.SIGKILL)


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
            ("raised", "save", 3),
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
    if case.fault == "raised" and case.where == "forward" and case.stage > 1:
        return "RuntimeError: rank 1 has raised Fault: the victim's own"
    if case.stage == 1 and case.where in ("forward", "backward"):
        return "RuntimeError: "  # DistributedDataParallel's own, if it is not ours
    failed = r"RuntimeError: (zero\.setup\(model, SGD, stage=\d\): )?rank \d failed in [\w.]+( .+)?: "
    if case.hybrid:
        return rf"{failed}(another rank|rank \d) of the group of 2 has stopped"
    has = "has" if case.fault == "stopped" else "has stopped"
    return rf"{failed}(another rank|rank 1) of the group of {WORLD} {has}"


@pytest.mark.faults
@pytest.mark.parametrize("case", CASES if matrix.FAULTS else [SOME[0], *SLOW], ids=str)
def test_when_one_rank_fails_all_others_end_and_say_where(case, tmp_path):
    try:
        outcomes = [ranks.Outcome("returned", value) for value in ranks.run(run, case.world, (case, tmp_path))]
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
