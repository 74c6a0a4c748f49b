"""How long a step takes, and how much of that time ranks wait for transfers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from zero.fsdp import MEMORY_FIRST, SPEED_FIRST, Prefetch
from zero.plan.hardware import Hardware
from zero.plan.timeline import Timeline, play
from zero.plan.trace import Trace

PREFETCHES = {"memory-first": MEMORY_FIRST, "default": Prefetch(), "speed-first": SPEED_FIRST}

_HIDDEN = 0.05
"""The share of a step that may be exposed if communication is called hidden."""

_DOUBLINGS = 16


@dataclass(frozen=True)
class Timing:
    """A settled step of one rank that is idle before.

    prefetch: "memory-first", "default", "speed-first" or "given"; None at stages that have none.
    exposed_ms: the time in which the compute stream only waits for a transfer.
    mfu: the share of the hardware's FLOP/s that matrix multiplications and attention used, recomputation included.
    exposed_from: the lowest power of two of ranks from which more than a twentieth of a step is exposed, if each rank
        computes the same as here; None if it is less even on 65,536.
    """

    stage: str
    prefetch: str | None
    world: int
    step_ms: float
    exposed_ms: float
    mfu: float
    exposed_from: int | None
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def title(self) -> str:
        prefetch = f", {self.prefetch}" if self.prefetch else ""
        return f"stage {self.stage}{prefetch}, {self.world} ranks"


def timed(trace: Trace, hardware: Hardware, stage: str, prefetch: str | None, world: int) -> Timing:
    timeline = play(trace.tasks, hardware)

    def exposed(doublings: int) -> bool:
        elsewhere = play(trace.on_ranks(2**doublings), hardware)
        return elsewhere.exposed > _HIDDEN * elsewhere.seconds

    first = 1 + bisect_left(range(1, _DOUBLINGS + 1), True, key=exposed)
    return Timing(
        stage,
        prefetch,
        world,
        1e3 * timeline.seconds,
        1e3 * timeline.exposed,
        timeline.used,
        2**first if first <= _DOUBLINGS else None,
        timeline,
    )


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
