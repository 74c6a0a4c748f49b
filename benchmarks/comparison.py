"""What a run side by side found: tables, ratios, and what they are meant to be. Arithmetic alone."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from report import MIB, align

AT_MOST = {
    ("gpt", "zero3", "fsdp2"): 0.60,
    ("gpt", "zero3", "fsdp1"): 0.72,
    ("gpt", "zero3", "ddp"): 1.05,
    ("tiny", "zero3", "fsdp2"): 0.50,
    ("gpt", "zero3kept", "fsdp2kept"): 0.70,
    ("gpt", "zero2", "ddp"): 0.90,
    ("gpt", "zero2", "fairscale2"): 0.85,
    ("gpt", "zero1", "zro"): 0.84,
    ("gpt", "zero1", "deepspeed1"): 0.55,
    ("gpt", "zero2", "deepspeed2"): 0.55,
    ("gpt", "zero3", "deepspeed3"): 0.55,
}
"""(task, variant of zero, peer): what the ratio of CPU time, and of a step's time, is meant to be, at most."""

CAPTION = """\
CPU ms    of a rank and step, all its threads; the mean over ranks, the median of {rounds} rounds
step ms   the median step, on the slowest rank; the median of the rounds
/ DDP     relative to plain DDP; / peer: CPU ms relative to the fastest peer of the stage. Medians of the rounds' ratios
tensors   MiB of tensors at the peak of a step, counted exactly, on the rank that needs most
process   MiB by which the whole process grew from before the model was built to its peak, in a pass of its own with
          freed blocks returned to the system at once; on a GPU, what CUDA's allocator took of it"""


@dataclass(frozen=True)
class Result:
    """One variant on one task: on the rank that needs most, CPU time as the mean over ranks.

    stage: as zero.plan names them. cpu_rounds, step_rounds: ms of one step in each round.
    """

    variant: str
    title: str
    stage: str
    cpu_rounds: list[float]
    step_rounds: list[float]
    tensor_bytes: int
    process_bytes: int
    losses: list[float]

    @property
    def ours(self) -> bool:
        return self.variant.startswith("zero")

    @property
    def cpu_ms(self) -> float:
        return statistics.median(self.cpu_rounds)

    @property
    def step_ms(self) -> float:
        return statistics.median(self.step_rounds)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cpu_ms": self.cpu_ms, "step_ms": self.step_ms}


def cpu_ratio(one: Result, other: Result) -> float:
    return _ratio(one.cpu_rounds, other.cpu_rounds)


def step_ratio(one: Result, other: Result) -> float:
    return _ratio(one.step_rounds, other.step_rounds)


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Turns next to one another meet the same machine, so they are compared with each other."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def peers_of(result: Result, results: Sequence[Result]) -> list[Result]:
    return [other for other in results if other.stage == result.stage and not other.ours]


def table(results: Sequence[Result]) -> str:
    """The first is plain DDP's."""
    head = ("variant", "CPU ms", "step ms", "CPU / DDP", "step / DDP", "CPU / peer", "tensors", "process", "last loss")
    return align([head, *(_cells(result, results) for result in results)])


def _cells(result: Result, results: Sequence[Result]) -> tuple[str, ...]:
    peers = peers_of(result, results)
    return (
        result.title,
        f"{result.cpu_ms:.1f}",
        f"{result.step_ms:.1f}",
        f"{cpu_ratio(result, results[0]):.2f}",
        f"{step_ratio(result, results[0]):.2f}",
        f"{cpu_ratio(result, min(peers, key=lambda peer: peer.cpu_ms)):.2f}" if peers else "",
        f"{result.tensor_bytes / MIB:.1f}",
        f"{result.process_bytes / MIB:.0f}",
        f"{result.losses[-1]:.4f}",
    )


def goals(found: Mapping[str, Sequence[Result]]) -> str:
    """Every ratio that is meant to be at most so much, and whether it is."""
    lines = [*_time_goals(found), *_memory_goals(found)]
    return align([("zero", "against", "on", "of", "ratio", "at most", ""), *lines], left=4) if lines else ""


def _time_goals(found: Mapping[str, Sequence[Result]]) -> Iterator[tuple[str, ...]]:
    for (task, name, against), at_most in AT_MOST.items():
        by_name = {result.variant: result for result in found.get(task, ())}
        if name in by_name and against in by_name:
            one, other = by_name[name], by_name[against]
            yield _goal(one, other, task, "CPU ms", cpu_ratio(one, other), at_most)
            yield _goal(one, other, task, "step ms", step_ratio(one, other), at_most)


def _memory_goals(found: Mapping[str, Sequence[Result]]) -> Iterator[tuple[str, ...]]:
    for task, results in found.items():
        for result in results:
            peers = peers_of(result, results)
            if result.ours and peers:
                least = min(peers, key=lambda peer: peer.process_bytes)
                ratio = result.process_bytes / max(least.process_bytes, 1)
                yield _goal(result, least, task, "process", ratio, 1.0)


def _goal(one: Result, other: Result, task: str, of: str, ratio: float, at_most: float) -> tuple[str, ...]:
    verdict = "met" if ratio <= at_most else "missed"
    return one.title, other.title, task, of, f"{ratio:.3f}", f"{at_most:.2f}", verdict
