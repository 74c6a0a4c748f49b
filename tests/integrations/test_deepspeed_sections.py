"""Optimizers and schedules that DeepSpeed's configurations describe, whose values may be "auto"."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ranks
from launched import launched
from zero.integrations.accelerate import Accelerator, ZeroPlugin

ADAM = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": "auto"}}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": WARMUP,
    "WarmupDecayLR": {**WARMUP, "total_num_steps": "auto", "warmup_type": "linear"},
    "WarmupCosineLR": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_min_ratio": 0.1},
}


def expected_rates(kind: str, steps: int, warmup: int, total: int, top: float) -> list[float]:
    """What DeepSpeed documents: it rises by the logarithm, or evenly; stays, falls evenly, or as a cosine."""
    rates = [0.0]
    for step in range(steps - 1):
        risen = step / warmup if kind == "WarmupDecayLR" else math.log(step + 1) / math.log(warmup)
        if step < warmup:
            ratio = 0.1 + 0.9 * risen if kind == "WarmupCosineLR" else risen
        elif kind == "WarmupLR":
            ratio = 1.0
        elif kind == "WarmupDecayLR":
            ratio = (total - step) / (total - warmup)
        else:
            half = math.pi * (step - warmup + 1) / (total - warmup)
            ratio = 0.0001 + 0.9999 * (1 + math.cos(half)) / 2
        rates.append(top * ratio)
    return rates


def config(stage: int, kind: str) -> dict[str, Any]:
    scheduler = {"type": kind, "params": SCHEDULES[kind]}
    return {"zero_optimization": {"stage": stage}, "optimizer": ADAM, "scheduler": scheduler}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize(("stage", "kind"), [*zip((0, 2, 3), SCHEDULES, strict=True)])
@ranks.on(2)
def test_placeholders_become_what_the_sections_say(rank: int, world: int, stage: int, kind: str) -> None:
    with launched(rank, world):
        accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin.from_json(config(stage, kind)))
        model = net()
        optimizer = DummyOptim(model.parameters(), lr=0.1, weight_decay=0.3)
        scheduler = DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=4)
        loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        rates = []
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        (group,) = optimizer.param_groups
    assert rates == pytest.approx(expected_rates(kind, steps=8, warmup=4, total=10, top=0.1), rel=1e-9)
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.3)
