"""When each task of a trace begins and ends on some hardware, and how long the step takes that they make up.

Streams and the host run at the same time, and each computes as fast as if alone. A task begins once the host has
launched it and its stream is free: where the host takes longer for a unit than the device, the device waits for it.
Transfers share the links: the one that was launched first goes first, and later ones take the time that is left. If the
hardware overlaps nothing, tasks run one after another.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zero.fsdp import MEMORY_FIRST, SPEED_FIRST, Prefetch
from zero.plan.hardware import Hardware
from zero.plan.trace import COMPUTE, HOST, Task, Trace

PREFETCHES = {"memory-first": MEMORY_FIRST, "default": Prefetch(), "speed-first": SPEED_FIRST}


@dataclass(frozen=True)
class Span:
    """A task's time, in seconds since the step began. queue: a stream or the host."""

    name: str
    queue: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """exposed: seconds in which the computing did nothing but wait for a transfer. used: the share of the hardware's
    FLOP/s."""

    spans: Sequence[Span]
    seconds: float
    exposed: float
    used: float


@dataclass(frozen=True)
class Timing:
    """A settled step of one rank that is idle before.

    prefetch: "memory-first", "default", "speed-first" or "given"; None at stages that have none.
    exposed_ms: the time in which the compute stream only waits for a transfer.
    mfu: the share of the hardware's FLOP/s that matrix multiplications and attention used, recomputation included.
    """

    stage: str
    prefetch: str | None
    world: int
    step_ms: float
    exposed_ms: float
    mfu: float
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def title(self) -> str:
        prefetch = f", {self.prefetch}" if self.prefetch else ""
        return f"stage {self.stage}{prefetch}, {self.world} ranks"


def play(tasks: Sequence[Task], hardware: Hardware) -> Timeline:
    """The timeline of the tasks, from host and streams idle to all tasks done."""
    spans, exposed = (_overlapping if hardware.overlaps else _in_turn)(tasks, hardware)
    seconds = max((span.end for span in spans), default=0.0)
    ideal = sum(task.flops / hardware.peak(task.dtype) for task in tasks)
    return Timeline(spans, seconds, exposed, ideal / seconds if seconds else 0.0)


def _in_turn(tasks: Sequence[Task], hardware: Hardware) -> tuple[list[Span], float]:
    spans, now, exposed = [], 0.0, 0.0
    for task in tasks:
        fixed, sending = _seconds(task, hardware)
        taken = _on_host(task, hardware) + fixed + sending
        exposed += taken if task.kind else 0
        spans.append(Span(task.name, task.queue if task.kind else COMPUTE, now, now + taken))
        now += taken
    return [span for span in spans if span.end > span.begin], exposed


def _overlapping(tasks: Sequence[Task], hardware: Hardware) -> tuple[list[Span], float]:
    spans: list[Span] = []
    free: dict[str, float] = defaultdict(float)
    ended: list[float] = []
    busy: list[tuple[float, float]] = []
    exposed = 0.0
    for task in tasks:
        if task.queue != HOST:
            spans.append(Span(task.name, HOST, free[HOST], free[HOST] + _on_host(task, hardware)))
            free[HOST] = spans[-1].end
        could = max(free[task.queue], free[HOST])
        begin = max([could, *(ended[other] for other in task.after)])
        if task.queue == COMPUTE:
            waited_for = [ended[other] for other in task.after if tasks[other].queue != COMPUTE]
            exposed += max(0.0, max(waited_for, default=0.0) - could)
        fixed, sending = _seconds(task, hardware)
        end = begin + fixed
        if sending:
            end = _sent(busy, end, sending)
        spans.append(Span(task.name, task.queue, begin, end))
        free[task.queue] = end
        ended.append(end)
    return [span for span in spans if span.end > span.begin], exposed


def _sent(busy: list[tuple[float, float]], begin: float, seconds: float) -> float:
    """When a transfer ends that needs the links for `seconds`, in the gaps of `busy`. Adds these times to `busy`."""
    taken = []
    for start, end in [*busy, (float("inf"), float("inf"))]:
        gap = min(seconds, start - begin)
        if gap > 0:
            taken.append((begin, begin + gap))
            seconds -= gap
        if seconds <= 0:
            break
        begin = max(begin, end)
    for one in taken:
        insort(busy, one)
    return taken[-1][1]


def _on_host(task: Task, hardware: Hardware) -> float:
    """Seconds in which the host launches the task."""
    of_a_unit = task.kind is not None and task.queue != HOST
    return task.launches * hardware.launch + of_a_unit * hardware.unit


def _seconds(task: Task, hardware: Hardware) -> tuple[float, float]:
    """Seconds on its stream, without its launch, and seconds of the links if nothing else is sent."""
    if task.kind is not None and task.group is not None:
        return hardware.transfer(task.kind, task.nbytes, task.group)
    rate = hardware.cached if task.nbytes <= hardware.cache else hardware.memory
    computing = task.flops / (hardware.peak(task.dtype) * hardware.efficiency)
    return max(computing, task.nbytes / rate, task.elements / hardware.elements), 0.0


def timed(trace: Trace, hardware: Hardware, stage: str, prefetch: str | None, world: int) -> Timing:
    timeline = play(trace.tasks, hardware)
    return Timing(stage, prefetch, world, 1e3 * timeline.seconds, 1e3 * timeline.exposed, timeline.used, timeline)


def prefetches(stage: str, given: Prefetch) -> Iterator[tuple[str | None, Prefetch]]:
    """The prefetches that a stage is timed with, by name: all at stage 3, and the given one."""
    if not stage.startswith("3"):
        yield None, given
        return
    for name, known in PREFETCHES.items():
        if stage == "3" or known == given:
            yield name, known
    if given not in PREFETCHES.values():
        yield "given", given
