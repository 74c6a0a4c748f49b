"""A plan's result, as data, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from zero.plan.timeline import Timing

TITLES = {
    "0": "DDP",
    "1": "DDP and OSS",
    "2": "ShardedDDP and OSS",
    "3 kept": "FSDP, parameters kept until backward",
    "3": "FSDP",
}


@dataclass(frozen=True)
class Cost:
    """Bytes of a settled step at one stage, on the rank that needs most.

    parameters, gradients, optimizer: resident between backward and step: parameters with the model's buffers, and the
        optimizer's state with masters.
    peak: the most bytes at any time.
    sent: the bytes that the rank sends. Buffers are counted as the first rank sends them, before each forward.
    host: what offload keeps in the host's memory, or in files: shards, their gradients and the optimizer's state. The
        other figures do not include it.
    """

    stage: str
    world: int
    parameters: int
    gradients: int
    optimizer: int
    peak: int
    sent: int
    host: int = 0

    @property
    def resident(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def transient(self) -> int:
        """What the peak adds: units that are unsharded, buckets on their way, copies, and activations if measured."""
        return self.peak - self.resident


@dataclass(frozen=True)
class Plan:
    """The costs of every stage at every number of ranks.

    parameters: how many the model has.
    memory: bytes that a rank has; None if not given.
    activations: whether the peaks include them.
    timings: of steps on the given hardware, at stage 3 with every prefetch; empty without hardware.
    """

    parameters: int
    costs: tuple[Cost, ...]
    memory: int | None
    activations: bool
    timings: tuple[Timing, ...] = ()

    def cost(self, stage: str | int, world: int | None = None) -> Cost:
        """The cost of a stage: 0, 1, 2, 3 or "3 kept". world: may be left out if only one was planned."""
        for cost in self.costs:
            if cost.stage == str(stage) and world in (None, cost.world):
                return cost
        raise KeyError(f"stage {stage} on {world} ranks is not in this plan")

    def timing(self, stage: str | int, world: int | None = None, prefetch: str | None = None) -> Timing:
        """The timing of a stage, as in `cost`. prefetch: such as "speed-first"; by default the first one."""
        for timing in self.timings:
            wanted = str(stage), world or timing.world, prefetch or timing.prefetch
            if (timing.stage, timing.world, timing.prefetch) == wanted:
                return timing
        raise KeyError(f"the time of stage {stage} on {world} ranks with prefetch {prefetch} is not in this plan")

    @property
    def worlds(self) -> list[int]:
        return list(dict.fromkeys(cost.world for cost in self.costs))

    def fits(self, cost: Cost) -> bool:
        return self.memory is None or cost.peak <= self.memory

    def recommended(self, world: int) -> Cost | None:
        """The lowest stage that fits, or None."""
        return next((cost for cost in self._at(world) if self.fits(cost)), None)

    def why(self, world: int) -> str:
        """The recommendation in words."""
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        costs, chosen = self._at(world), self.recommended(world)
        without = "" if self.activations else ", activations not counted"
        if self.memory is None:
            return f"{ranks}: say how much memory a rank has, to see which stage fits"
        available = f"{_gib(self.memory)} GiB"
        if chosen is None:
            least = min(costs, key=lambda cost: cost.peak)
            return (
                f"{ranks}: nothing fits in {available}; stage {least.stage} comes closest with {_gib(least.peak)} GiB"
                f"{without}. Take more ranks, smaller units, or less precision"
            )
        below = costs[: costs.index(chosen)]
        larger = [cost.stage for cost in costs if not self.fits(cost)]
        reason = f"of the others {', '.join(larger)} do not fit" if larger else "everything fits"
        if below:
            reason = f"stage {below[-1].stage} would need {_gib(below[-1].peak)}"
        return (
            f"{ranks}: stage {chosen.stage} ({TITLES[chosen.stage]}), the lowest that fits in {available}: it needs "
            f"{_gib(chosen.peak)} GiB{without}; {reason}"
        )

    def table(self) -> str:
        """GiB a rank, by number of ranks and stage."""
        head = ["ranks", "stage", "params", "grads", "optim", "transient", "peak", "sent"]
        offloaded = any(cost.host for cost in self.costs)
        head += ["host"] * offloaded + ["fits"] * (self.memory is not None)
        lines = [head]
        for cost in self.costs:
            sizes = [cost.parameters, cost.gradients, cost.optimizer, cost.transient, cost.peak, cost.sent]
            sizes += [cost.host] * offloaded
            fits = [] if self.memory is None else ["yes" if self.fits(cost) else "no"]
            lines.append([str(cost.world), cost.stage, *map(_gib, sizes), *fits])
        return aligned(lines)

    def times(self) -> str:
        """How long steps take, by number of ranks, stage and prefetch, as a table."""
        lines = [["ranks", "stage", "prefetch", "step ms", "exposed ms", "used FLOP/s"]]
        for one in self.timings:
            taken = [f"{one.step_ms:.1f}", f"{one.exposed_ms:.1f}", f"{one.mfu:.1%}"]
            lines.append([str(one.world), one.stage, one.prefetch or "-", *taken])
        return aligned(lines)

    def to_json(self) -> str:
        costs = [
            {**asdict(cost), "resident": cost.resident, "transient": cost.transient, "fits": self.fits(cost)}
            for cost in self.costs
        ]
        chosen = {world: cost.stage if (cost := self.recommended(world)) else None for world in self.worlds}
        content = {
            "parameters": self.parameters,
            "memory": self.memory,
            "activations": self.activations,
            "costs": costs,
            "times": [{name: getattr(timing, name) for name in _TIMING_FIELDS} for timing in self.timings],
            "recommended": [{"world": world, "stage": chosen[world], "why": self.why(world)} for world in self.worlds],
        }
        return json.dumps(content, indent=2)

    def _at(self, world: int) -> Sequence[Cost]:
        return [cost for cost in self.costs if cost.world == world]


_TIMING_FIELDS = [one.name for one in fields(Timing) if one.name != "timeline"]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A table, whose columns are as wide as their longest entries."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g}" if nbytes < 2**30 else f"{nbytes / 2**30:.1f}"
