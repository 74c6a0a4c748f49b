"""Optimizers and schedules that DeepSpeed's configurations describe, whose values may be "auto"."""

from __future__ import annotations

import math
from functools import partial
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


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("kind", SCHEDULES)
@ranks.on(2)
def test_placeholders_become_what_the_sections_say(rank: int, world: int, kind: str) -> None:
    for stage in (0, 2, 3):
        with launched(rank, world):
            accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin.from_json(config(stage, kind)))
            model = Net()
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


@ranks.on(2)
def test_what_cannot_be_built_is_refused_on_every_rank(rank: int, world: int) -> None:
    def preparing(section: str | None, optim: Any, *scheduler: Any) -> str:
        model = Net()
        own = {name: value for name, value in config(2, "WarmupLR").items() if name in ("zero_optimization", section)}
        with launched(rank, world):
            accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin.from_json(own))
            optimizer = optim(model.parameters())
            return ranks.refusal(lambda: accelerator.prepare(model, optimizer, *(one(optimizer) for one in scheduler)))

    adam = partial(torch.optim.AdamW, lr=0.1)
    decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    found = {
        "DummyOptim is a placeholder, and the configuration has no section": preparing(None, DummyOptim),
        "has a section 'optimizer', and a AdamW was prepared": preparing("optimizer", adam),
        "DummyScheduler is a placeholder, and the configuration has no": preparing(None, adam, DummyScheduler),
        "has a section 'scheduler', and a ExponentialLR was prepared": preparing("scheduler", adam, decay),
    }
    for expected, error in found.items():
        assert error.startswith("ValueError") and expected in error, error
    auto = ZeroPlugin.from_json({"optimizer": {"type": "AdamW", "params": {"eps": "auto"}}})
    assert auto.optimizer is not None
    with pytest.raises(ValueError, match="eps='auto' has no value here"):
        auto.optimizer.optimizer(Net().parameters(), {})
