"""The stages and optimizers that can be chosen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Stage:
    """number: the `stage` of `zero.setup`. name: what the README calls it. ddp: whether DDP averages the gradients."""

    number: int
    name: str
    ddp: bool


STAGES = {
    "ddp": Stage(0, "DDP", ddp=True),
    "oss": Stage(1, "OSS", ddp=True),
    "sdp": Stage(2, "ShardedDDP", ddp=False),
    "fsdp": Stage(3, "FSDP", ddp=False),
}


@dataclass(frozen=True)
class OptimizerChoice:
    type: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]


OPTIMIZERS = {
    "adam": OptimizerChoice(torch.optim.Adam, {"lr": 1e-3}),
    "adamw": OptimizerChoice(torch.optim.AdamW, {"lr": 1e-3}),
    "sgd": OptimizerChoice(torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
}


def predict_ddp_sent(*, world: int, gradients_bytes: int) -> int:
    """Bytes that a rank sends in one ring all-reduce of its gradients."""
    return 2 * (world - 1) * gradients_bytes // world
