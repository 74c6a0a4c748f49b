"""`zero.report`: bytes on this rank now, by kind, and bytes that it has sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from zero.comm import Traffic, traffic
from zero.fsdp.model import models_of
from zero.oss import OSS
from zero.plan.planner import resident
from zero.plan.result import TITLES, Plan
from zero.wrappers import comms_of, each, unwrapped


@dataclass(frozen=True)
class Report:
    """Bytes on this rank.

    stage: as in a plan: "0" to "3", or "3 kept".
    parameters, gradients, optimizer: resident now: parameters with the model's buffers, and the optimizer's state with
        masters.
    peak: the most that tensors have taken on this rank's GPU since its counter was reset; None without a GPU.
    planned: the peak in the plan; None without one.
    sent: bytes that this process has sent through `zero`, since the reading `since`, or in all.
    """

    stage: str
    rank: int
    world: int
    parameters: int
    gradients: int
    optimizer: int
    peak: int | None
    planned: int | None
    sent: int

    @property
    def resident(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def numbers(self) -> dict[str, int]:
        """The known figures by name, for loggers."""
        names = ("parameters", "gradients", "optimizer", "resident", "peak", "planned", "sent")
        return {f"zero/{name}_bytes": value for name in names if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        figures = (f"{name[5:-6]} {value / 2**20:.1f} MiB" for name, value in self.numbers().items())
        return f"stage {self.stage} ({TITLES[self.stage]}), rank {self.rank} of {self.world}: {', '.join(figures)}"


def report(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    since: Traffic | None = None,
    plan: Plan | None = None,
) -> Report:
    """The bytes of a model and its optimizers that this rank holds now, and what it has sent. Sends nothing.

    Call it between backward and step to count gradients.

        before = zero.traffic()
        ...  # a step
        print(zero.report(model, optimizer, since=before))

    model: at any stage, the module inside its wrapper, or one that contains wrapped ones. optimizer: the one that
        trains it, or several; also as Accelerate has prepared them.
    since: a reading of zero.traffic(); `sent` counts from there. plan: of zero.plan, whose peak is told beside; raises
        KeyError if it has none for this stage and number of ranks.
    """
    optimizers = each(optimizer)
    inner, wrappers = unwrapped(model)
    units = [unit for _, of_one in models_of(inner) for unit in of_one]
    sharding = [one for one in optimizers if isinstance(one, OSS)]
    device = next((param.device for param in inner.parameters()), torch.device("cpu"))
    found = resident(inner, optimizers)
    del found["host"]  # plans alone tell it apart
    comms = [*comms_of(wrappers), *(one.comm for one in sharding)]
    comm = max(comms, key=lambda one: one.world)
    if units:
        stage = "3" if units[0].reshard_after_forward else "3 kept"
    elif any(one.gradients.are_sharded for one in sharding):
        stage = "2"
    else:
        stage = "1" if sharding else "0"
    return Report(
        stage,
        comm.rank,
        comm.world,
        **found,
        peak=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        planned=None if plan is None else plan.cost(stage, comm.world).peak,
        sent=(traffic() - (since or Traffic())).total,
    )
