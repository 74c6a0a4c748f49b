"""Contestants side by side: each in fresh processes, in turn, over and over. For stages.py and peers.py."""

import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from contestants import CONTESTANTS, How
from launch import Launch, take_turns
from loop import Timed, Weight, time_training, weigh
from models import Task
from report import MIB, align


@dataclass(frozen=True)
class Result:
    """One contestant: CPU ms of a step and rank and ms of the slowest rank's step, by round; losses as means over the
    ranks; bytes on the rank that needs most."""

    name: str
    title: str
    stage: str
    cpu_rounds: list[float]
    step_rounds: list[float]
    losses: list[float]
    weight: Weight

    @property
    def ours(self) -> bool:
        return CONTESTANTS[self.name].ours

    @property
    def cpu_ms(self) -> float:
        return statistics.median(self.cpu_rounds)

    @property
    def step_ms(self) -> float:
        return statistics.median(self.step_rounds)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cpu_ms": self.cpu_ms, "step_ms": self.step_ms}


def compare(
    names: Sequence[str], task: Task, how: How, launch: Launch, *, rounds: int, steps: int
) -> tuple[list[Result], dict[str, str]]:
    """What can be run, in the order of `names`, and by title why others cannot. Time is taken in other processes than
    bytes are counted in. "alone" is one process without torch.distributed, on one core."""
    missing = {name: reason for name in names if (reason := CONTESTANTS[name].missing(how))}
    launches = {name: Launch(1, "none") if name == "alone" else launch for name in names if name not in missing}
    weighing = {name: partial(one, partial(weigh, name, task, how)) for name, one in launches.items()}
    weighed, failed = take_turns(weighing, 1)
    jobs = {name: partial(launches[name], partial(time_training, name, task, how, steps)) for name in weighed}
    timed, later = take_turns(jobs, rounds)
    results = [_result(name, timed[name], weighed[name][0]) for name in names if name in timed]
    reasons = {**missing, **failed, **later}.items()
    return results, {CONTESTANTS[name].title if name in CONTESTANTS else name: reason for name, reason in reasons}


def _result(name: str, rounds: list[list[Timed]], weights: list[Weight]) -> Result:
    return Result(
        name=name,
        title=CONTESTANTS[name].title,
        stage=CONTESTANTS[name].stage,
        cpu_rounds=[statistics.mean(rank.cpu_ms for rank in ranks) for ranks in rounds],
        step_rounds=[max(rank.wall_ms for rank in ranks) for ranks in rounds],
        losses=[statistics.mean(of_ranks) for of_ranks in zip(*(rank.losses for rank in rounds[0]), strict=True)],
        weight=Weight(**{key: max(asdict(one)[key] for one in weights) for key in asdict(weights[0])}),
    )


# ------------------------------------------------------------------------------------------------------------- tables

Others = Mapping[str, Result]
Figure = Callable[[Result, Others], Any]
"""A contestant's, beside those of the others, by name: a number, or None."""

Column = tuple[str, int, Figure]
"""What it says, its digits, and its figure."""


def _against(other: str, figure: str, how: Callable[[float, float], float] = operator.truediv) -> Figure:
    """Turns next to one another meet the same machine, so they are compared with each other."""

    def compared(one: Result, others: Others) -> float | None:
        peer = _fastest_peer(one, others) if other == "peer" else others.get(other)
        if peer is None:
            return None
        pairs = zip(getattr(one, figure), getattr(peer, figure), strict=False)  # an interrupt may have ended one early
        return statistics.median(how(a, b) for a, b in pairs)

    return compared


def _fastest_peer(one: Result, others: Others) -> Result | None:
    peers = [other for other in others.values() if other.stage == one.stage != "0" and not other.ours]
    return min(peers, key=lambda peer: peer.cpu_ms, default=None)


def mib(of: Callable[[Weight], int]) -> Figure:
    return lambda result, _: of(result.weight) / MIB


COLUMNS: dict[str, Column] = {
    "params": ("MiB of parameters between backward and step", 1, mib(lambda w: w.parameters)),
    "grads": ("MiB of gradients there", 1, mib(lambda w: w.gradients)),
    "optim": ("MiB of the optimizer's state there", 1, mib(lambda w: w.optimizer)),
    "CPU ms": ("of a rank and step, all its threads; mean over ranks, median of rounds", 1, lambda one, _: one.cpu_ms),
    "above alone": ("CPU ms more than one process that trains alone", 1, _against("alone", "cpu_rounds", operator.sub)),
    "/ alone": ("CPU ms relative to it; ratios are medians of the rounds'", 2, _against("alone", "cpu_rounds")),
    "/ DDP": ("CPU ms relative to plain DDP", 2, _against("ddp", "cpu_rounds")),
    "/ peer": ("CPU ms relative to the fastest peer of the stage", 2, _against("peer", "cpu_rounds")),
    "step ms": ("the median step on the slowest rank, median of rounds", 1, lambda one, _: one.step_ms),
    "step / DDP": ("relative to plain DDP", 2, _against("ddp", "step_rounds")),
    "tensors": ("MiB of tensors at the peak of a step, counted exactly", 1, mib(lambda w: w.tensors)),
    "process": ("MiB by which the process grew; on a GPU, what CUDA's allocator took", 1, mib(lambda w: w.process)),
    "sent": ("MiB that a rank sends in a step, by rings", 1, mib(lambda w: w.sent)),
    "calls": ("collectives in a step, of torch.distributed and of zero", 0, lambda one, _: one.weight.calls),
    "first loss": ("mean over the ranks", 4, lambda one, _: one.losses[0]),
    "last loss": ("after the same steps", 4, lambda one, _: one.losses[-1]),
}


def table(results: Sequence[Result], columns: Mapping[str, Column]) -> str:
    others = {result.name: result for result in results}
    lines = [("", *columns)]
    for result in results:
        found = [(figure(result, others), digits) for _, digits, figure in columns.values()]
        lines.append((result.title, *("" if one is None else f"{one:.{digits}f}" for one, digits in found)))
    return align(lines)


def caption(columns: Mapping[str, Column]) -> str:
    return align([(name, told) for name, (told, *_) in columns.items()], left=2)


def transports(results: Sequence[Result], others: str) -> str:
    """Who sends by what; others: by what torch sends."""
    ours = {result.weight.transport for result in results if result.ours}
    return ", ".join([f"zero sends by {one}" for one in sorted(ours)] + [f"others by {others}"])


def other_losses(results: Sequence[Result], tolerance: float) -> dict[str, str]:
    """Whose losses differ from those of the first that trains on all ranks, relative to them; 0 asks for the same
    bits."""
    found = {}
    first, *others = [result for result in results if result.name != "alone"] or [None]
    for other in others:
        for step, (expected, loss) in enumerate(zip(first.losses, other.losses, strict=True)):
            if not math.isclose(expected, loss, rel_tol=tolerance, abs_tol=0):
                told = (
                    f"loss {loss!r} at step {step}, {first.title} has {expected!r} (relative tolerance {tolerance:g})"
                )
                found.setdefault(other.title, told)
    return found
