"""What a stage and an optimizer should cost: the ZeRO paper's formulas (arXiv 1910.02054, section 5) as data.

With P bytes of float32 parameters and W ranks, parameters and gradients take P each and the optimizer's state a
multiple of P. What a stage keeps in parts counts 1/W. On top come the buffers that a stage works in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Stage:
    """Where a stage keeps what, and what it works in.

    number: the `stage` of `zero.setup`.
    parted: what lies in parts, one a rank; everything else is whole on every rank.
    buffers: how many buckets (stages 1 and 2) or units (stage 3) of the largest size are alive at once, at most.
    ddp: whether DDP averages the gradients, in buckets that hold a second copy of them all.
    """

    number: int
    parted: frozenset[str]
    buffers: int
    ddp: bool


STAGES = {
    "ddp": Stage(0, frozenset(), buffers=0, ddp=True),
    "oss": Stage(1, frozenset({"optimizer"}), buffers=1, ddp=True),
    "sdp": Stage(2, frozenset({"optimizer", "gradients"}), buffers=2, ddp=False),
    "fsdp": Stage(3, frozenset({"optimizer", "gradients", "parameters"}), buffers=4, ddp=False),
}


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer, its arguments, and how many numbers of state it keeps for each parameter."""

    type: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    states: int


OPTIMIZERS = {
    "adam": OptimizerChoice(torch.optim.Adam, {"lr": 1e-3}, states=2),
    "adamw": OptimizerChoice(torch.optim.AdamW, {"lr": 1e-3}, states=2),
    "sgd": OptimizerChoice(torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}, states=1),
}


def predict_peak(
    stage: Stage, *, states: int, world: int, parameters_bytes: int, buffer_bytes: int, activations_bytes: int
) -> int:
    """Bytes of tensors on a rank at the peak of a step.

    Activations go as gradients come, so they are never there together: the larger of the two counts.

    states: numbers of optimizer state for each parameter.
    buffer_bytes: the largest bucket, or at stage 3 the largest unit.
    """

    def resident(kind: str) -> int:
        return parameters_bytes // (world if kind in stage.parted else 1)

    ddp_buckets = parameters_bytes if stage.ddp else 0
    return (
        resident("parameters")
        + states * resident("optimizer")
        + max(resident("gradients"), activations_bytes)
        + ddp_buckets
        + stage.buffers * buffer_bytes
    )


def predict_ddp_sent(*, world: int, gradients_bytes: int) -> int:
    """Bytes that a rank sends in one ring all-reduce of its gradients."""
    return 2 * (world - 1) * gradients_bytes // world
