"""A plan's result, as data and as a table."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Of a rank's memory, for what a plan does not count: CUDA's context, fragmentation.
HELD_BACK = 0.08

COMMUNICATOR, PEER = 700_000_000, 470_000_000
"""Bytes that NCCL takes of a GPU beside torch's allocator: for a communicator that sends by rings, and for each rank to
which a rank of the same host sends by itself. As others have measured them (NVIDIA/nccl, issues 964 and 1685)."""

_BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}

UNITS = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
WITH_OFFLOAD = " offload"
"""What follows the name of a stage that was planned with offload because without none fits."""


def number_in(units: dict[str, float], text: str) -> float:
    """A number that is followed by one of these units. Raises ValueError for other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in units:
        known = ", ".join(filter(None, units))
        raise ValueError(f"{text!r} is no {'size' if units is UNITS else 'number'} in one of {known}")
    return float(match[1]) * units[match[2]]


TITLES = {
    "0": "DDP",
    "1": "OSS",
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
    beside: what NCCL takes of a GPU, about; no other figure includes it.
    """

    stage: str
    world: int
    parameters: int
    gradients: int
    optimizer: int
    peak: int
    sent: int
    host: int = 0
    beside: int = 0

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
        return self.memory is None or cost.peak + cost.beside <= (1 - HELD_BACK) * self.memory

    def recommended(self, world: int) -> Cost | None:
        """The lowest stage that fits, but 2 where 1 and 2 do; None if nothing fits."""
        fitting = [cost for cost in self.costs if cost.world == world and self.fits(cost)]
        return fitting[[cost.stage for cost in fitting[:2]] == ["1", "2"]] if fitting else None

    @property
    def unit(self) -> str:
        """In which the table and `why` say bytes: KiB, MiB or GiB, of which the largest peak has one at least."""
        largest = max(cost.peak for cost in self.costs)
        return next((unit for unit in ("GiB", "MiB") if largest >= _BYTES[unit]), "KiB")

    def why(self, world: int) -> str:
        """The recommendation in words."""
        if world not in self.worlds:
            raise KeyError(f"{world} ranks are not in this plan, which is of {', '.join(map(str, self.worlds))}")
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        if self.memory is None:
            return f"{ranks}: with memory= (--memory 80GiB) of a rank the plan says which stage to take"
        chosen, costs = self.recommended(world), [cost for cost in self.costs if cost.world == world]
        beside = max(cost.beside for cost in costs) if chosen is None else chosen.beside
        usable = (1 - HELD_BACK) * self.memory - beside
        nccl = f", and about {beside / 2**30:.1f} GiB for NCCL" if beside else ""
        less = f"less {HELD_BACK:.0%} for what is not counted{nccl}"
        available = f"{self._said(usable)} ({self._said(self.memory)} {less})"
        without = "" if self.activations else ", activations not counted"
        if chosen is None:
            least = min(costs, key=lambda cost: cost.peak)
            offload = "" if least.host else "offload=zero.CPUOffload() (--offload), "
            return (
                f"{ranks}: nothing fits in {available}; stage {least.stage} comes closest with "
                f"{self._said(least.peak)}{without}. Take more ranks, {offload}activation checkpointing, smaller "
                "units, or less precision"
            )
        stage, with_offload, _ = chosen.stage.partition(WITH_OFFLOAD)
        title = TITLES[stage] + ", offload=zero.CPUOffload()" * bool(with_offload)
        below = costs[: costs.index(chosen)]
        host = f", and {self._said(chosen.host)} of the host a rank" if chosen.host else ""
        larger = [cost.stage for cost in costs if not self.fits(cost)]
        lowest, reason = "the lowest that", "everything fits"
        if below:
            plain = " without offload" * (chosen.host > 0 and not below[-1].host)
            reason = f"stage {below[-1].stage}{plain} would need {self._said(below[-1].peak)}"
            if self.fits(below[-1]):
                times = f"{below[-1].sent / chosen.sent:.2g}" if chosen.sent else "1"
                sent = "" if times == "1" else f" and sends {times} times as much"
                lowest, reason = "which", f"{reason}{sent}: take it to work with full gradients"
        elif larger:
            reason = f"of the others {', '.join(larger)} do not fit"
        return (
            f"{ranks}: stage {stage} ({title}), {lowest} fits in {available}: it needs "
            f"{self._said(chosen.peak)}{without}{host}; {reason}"
        )

    def table(self) -> str:
        """Bytes a rank in `unit`, by number of ranks and stage."""
        offloaded, limited = any(cost.host for cost in self.costs), self.memory is not None
        lines = [["ranks", "stage", f"params/{self.unit}", "grads", "optim", "transient", "peak", "sent"]]
        lines[0] += ["host"] * offloaded + ["fits"] * limited
        for cost in self.costs:
            sizes = [cost.parameters, cost.gradients, cost.optimizer, cost.transient, cost.peak, cost.sent]
            sizes += [cost.host] * offloaded
            fits = ["yes" if self.fits(cost) else "no"] * limited
            said = [self._said(size).removesuffix(f" {self.unit}") for size in sizes]
            lines.append([str(cost.world), cost.stage, *said, *fits])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)

    def _said(self, nbytes: float) -> str:
        """In `unit`, in the next smaller one if less than a tenth of it, and as 0 if less than a tenth of that."""
        units = [*_BYTES]
        first = units.index(self.unit)
        for unit in units[first : first + 2]:
            if (number := nbytes / _BYTES[unit]) >= 0.1:
                return f"{number:.3g} {unit}" if number < 1 else f"{number:.1f} {unit}"
        return "0"
