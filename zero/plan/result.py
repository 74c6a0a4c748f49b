"""A plan's result, as data, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

HELD_BACK = 0.08
"""Of a rank's memory, for what a plan does not count: CUDA's context, NCCL's buffers, fragmentation."""

_BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}

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
    host: what offload keeps in the host's memory, or in files: shards, their gradients (at stage 1 only during a step)
        and the optimizer's state. The other figures do not include it.
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
    memory: bytes that a rank has, of which HELD_BACK stays free; None if not given.
    activations: whether the peaks include them.
    """

    parameters: int
    costs: tuple[Cost, ...]
    memory: int | None
    activations: bool

    def cost(self, stage: str | int, world: int | None = None) -> Cost:
        """The cost of a stage: 0, 1, 2, 3 or "3 kept". world: may be left out if only one was planned."""
        for cost in self.costs:
            if cost.stage == str(stage) and world in (None, cost.world):
                return cost
        raise KeyError(f"stage {stage} on {world} ranks is not in this plan")

    @property
    def worlds(self) -> list[int]:
        return list(dict.fromkeys(cost.world for cost in self.costs))

    def fits(self, cost: Cost) -> bool:
        return self.memory is None or cost.peak <= (1 - HELD_BACK) * self.memory

    def recommended(self, world: int) -> Cost | None:
        """The lowest stage that fits, but 2 where 1 and 2 do; None if nothing fits."""
        fitting = [cost for cost in self._at(world) if self.fits(cost)]
        if [cost.stage for cost in fitting[:2]] == ["1", "2"]:
            return fitting[1]
        return next(iter(fitting), None)

    @property
    def unit(self) -> str:
        """In which the table and `why` say bytes: KiB, MiB or GiB, of which the largest peak has one at least."""
        largest = max(cost.peak for cost in self.costs)
        return next((unit for unit in ("GiB", "MiB") if largest >= _BYTES[unit]), "KiB")

    def why(self, world: int) -> str:
        """The recommendation in words."""
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        chosen = self.recommended(world)
        without = "" if self.activations else ", activations not counted"
        if self.memory is None:
            return f"{ranks}: with memory= (--memory 80GiB) of a rank the plan says which stage to take"
        usable = self._size((1 - HELD_BACK) * self.memory)
        available = (
            f"{usable} {self.unit} ({self._size(self.memory)} {self.unit} less {HELD_BACK:.0%} for what is not counted)"
        )
        if chosen is None:
            least = min(self._at(world), key=lambda cost: cost.peak)
            return (
                f"{ranks}: nothing fits in {available}; stage {least.stage} comes closest with "
                f"{self._size(least.peak)} {self.unit}{without}. {self._remedies()}"
            )
        lowest = "which" if self._instead_of_1(chosen) else "the lowest that"
        return (
            f"{ranks}: stage {chosen.stage} ({TITLES[chosen.stage]}), {lowest} fits in {available}: it needs "
            f"{self._size(chosen.peak)} {self.unit}{without}; {self._reason(chosen)}"
        )

    def _remedies(self) -> str:
        offload = "" if any(cost.host for cost in self.costs) else "offload=zero.CPUOffload() (--offload), "
        return f"Take more ranks, {offload}activation checkpointing, smaller units, or less precision"

    def _instead_of_1(self, chosen: Cost) -> Cost | None:
        """The cost of stage 1, if that fits and the chosen one is 2."""
        fitting = (cost for cost in self._at(chosen.world) if cost.stage == "1" and self.fits(cost))
        return next(fitting, None) if chosen.stage == "2" else None

    def _reason(self, chosen: Cost) -> str:
        costs = self._at(chosen.world)
        if first := self._instead_of_1(chosen):
            sent = f" and sends {first.sent / chosen.sent:.2g} times as much" if chosen.sent else ""
            return f"stage 1 would need {self._size(first.peak)}{sent}: take it for what needs DDP itself"
        if below := costs[: costs.index(chosen)]:
            return f"stage {below[-1].stage} would need {self._size(below[-1].peak)}"
        larger = [cost.stage for cost in costs if not self.fits(cost)]
        return f"of the others {', '.join(larger)} do not fit" if larger else "everything fits"

    def _size(self, nbytes: float) -> str:
        number = nbytes / _BYTES[self.unit]
        return f"{number:.3g}" if number < 1 else f"{number:.1f}"

    def table(self) -> str:
        """Bytes a rank in `unit`, by number of ranks and stage."""
        head = ["ranks", "stage", "params", "grads", "optim", "transient", "peak", "sent"]
        offloaded = any(cost.host for cost in self.costs)
        head += ["host"] * offloaded + ["fits"] * (self.memory is not None)
        lines = [head]
        for cost in self.costs:
            sizes = [cost.parameters, cost.gradients, cost.optimizer, cost.transient, cost.peak, cost.sent]
            sizes += [cost.host] * offloaded
            fits = [] if self.memory is None else ["yes" if self.fits(cost) else "no"]
            lines.append([str(cost.world), cost.stage, *map(self._size, sizes), *fits])
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
            "recommended": [{"world": world, "stage": chosen[world], "why": self.why(world)} for world in self.worlds],
        }
        return json.dumps(content, indent=2)

    def _at(self, world: int) -> Sequence[Cost]:
        return [cost for cost in self.costs if cost.world == world]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A table, whose columns are as wide as their longest entries."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
