"""`zero.report`: bytes on this rank now, by kind, and bytes that it has sent, beside the figures of zero.plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zero.comm import Comm, Traffic, traffic
from zero.fsdp.model import models_of
from zero.fsdp.unit import Unit
from zero.oss import OSS
from zero.plan.result import TITLES, Cost, aligned
from zero.plan.stages import resident
from zero.report.planned import planned_for
from zero.wrappers import prepared, unwrapped

_FIGURES = ("parameters", "gradients", "optimizer", "resident", "peak", "sent")


@dataclass(frozen=True)
class Report:
    """Bytes on this rank.

    stage: as in a plan: "0" to "3", or "3 kept".
    parameters, gradients, optimizer: resident now: parameters with the model's buffers, and the optimizer's state with
        masters.
    peak: the most that tensors have taken on this rank's GPU since its counter was reset; None without a GPU.
    sent: bytes that this process has sent through `zero`, since the reading `since`, or in all.
    planned: the plan of a settled step, without activations; None if zero.plan cannot plan the optimizer.
    """

    stage: str
    rank: int
    world: int
    parameters: int
    gradients: int
    optimizer: int
    peak: int | None
    sent: int
    planned: Cost | None

    @property
    def resident(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def numbers(self) -> dict[str, int]:
        """The known figures by name, for loggers."""
        known = {name: value for name in _FIGURES if (value := getattr(self, name)) is not None}
        if self.planned is not None:
            known |= {"planned_resident": self.planned.resident, "planned_sent": self.planned.sent}
        return {f"zero/{name}_bytes": value for name, value in known.items()}

    def __str__(self) -> str:
        """In MiB, with the plan in the line below."""
        title = f"stage {self.stage} ({TITLES[self.stage]}), rank {self.rank} of {self.world}, MiB"
        lines = [["", "params", "grads", "optim", *_FIGURES[3:]]]
        for name, one in {"here": self, "planned": self.planned}.items():
            if one is not None:
                lines.append([name, *(_mib(getattr(one, figure)) for figure in _FIGURES)])
        return f"{title}\n{aligned(lines)}"


def report(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, since: Traffic | None = None) -> Report:
    """The bytes of a model and its optimizers that this rank holds now, and what it has sent. Sends nothing.

    Call it between backward and step to count gradients.

        before = zero.traffic()
        ...  # a step
        print(zero.report(model, optimizer, since=before))

    model: at any stage, or the module inside its wrapper. optimizer: the one that trains it, or several; also as
        Accelerate has prepared them.
    since: a reading of zero.traffic(); `sent` counts from there.
    """
    optimizers = [prepared(one) for one in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]
    inner = unwrapped(model)[0]
    held = models_of(inner)
    units = [unit for _, of_one in held for unit in of_one]
    sharding = [one for one in optimizers if isinstance(one, OSS)]
    stage = _stage(units, sharding)
    comms = held[0][0].placement.all_groups() if held else [sharding[0].comm] if sharding else [Comm.default()]
    device = next((param.device for param in inner.parameters()), torch.device("cpu"))
    found = resident(inner, [group for one in sharding for group in one.shards.shard_groups], optimizers)
    del found["host"]  # plans alone tell it apart
    return Report(
        stage,
        rank=dist.get_rank() if dist.is_initialized() else 0,
        world=dist.get_world_size() if dist.is_initialized() else 1,
        **found,
        peak=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        sent=(traffic() - (since or Traffic())).total,
        planned=planned_for(stage, inner, optimizers, units, comms, device),
    )


def _stage(units: Sequence[Unit], sharding: Sequence[OSS]) -> str:
    if units:
        return "3 kept" if units[0].stays else "3"
    if any(one.gradients.arrive_sharded for one in sharding):
        return "2"
    return "1" if sharding else "0"


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.1f}"
