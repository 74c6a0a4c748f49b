"""What ranks do in test_fabric: one script with Fabric, by strategy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightnings import WIDTH, Environment, Module
from torch import Tensor

import ranks
import zero
from sidebyside import data
from zero.integrations.lightning import ZeroFabricStrategy

CASES = {"plain": (None, None), "in bfloat16": ("bf16-mixed", None), "clipped": (None, 0.5)}
"""Precision, and the norm to clip by."""


def fabric_at(rank: int, world: int, stage: int, precision: Any = None, **options: Any) -> Any:
    strategy = ZeroFabricStrategy(stage, **options) if stage else DDPStrategy()
    plugins = [Environment(rank, world)]
    fabric = lightning.Fabric(
        accelerator="cpu", devices=world, strategy=strategy, plugins=plugins, precision=precision or "32-true"
    )
    fabric.launch()
    return fabric


def set_up(fabric: Any) -> tuple[Any, Any, Any]:
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    model, optimizer = fabric.setup(module, optimizer)
    return model, optimizer, scheduler


def train(fabric: Any, parts: tuple[Any, Any, Any], steps: range, max_norm: float | None = None) -> list[float]:
    """Two batches a step, the first without sending."""
    model, optimizer, scheduler = parts
    losses = []
    for step in steps:
        for number in range(2):
            with fabric.no_backward_sync(model, enabled=number == 0):
                x = data(4, WIDTH, rank=fabric.global_rank, step=2 * step + number)
                loss = model(x).square().mean()
                fabric.backward(loss)
            losses.append(loss.item())
        if max_norm is not None:
            losses.append(fabric.clip_gradients(model, optimizer, max_norm=max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def all_cases(rank: int, world: int, stage: int) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for name, (precision, max_norm) in CASES.items():
        fabric = fabric_at(rank, world, stage, precision)
        parts = set_up(fabric)
        losses = train(fabric, parts, range(3), max_norm)
        found[name] = losses, zero.full_state_dict(parts[0]._forward_module)
    return found


def resumed(rank: int, world: int, kind: str, stages: list[int], folder: str) -> None:
    """By fabric.load, and by load_state_dict of what a file holds."""
    options = {"checkpoint": "sharded"} if kind == "sharded" else {}
    fabric = fabric_at(rank, world, 0)
    parts = set_up(fabric)
    expected = train(fabric, parts, range(4))[4:]
    for first in stages:
        fabric = fabric_at(rank, world, first, **(options if first else {}))
        parts = set_up(fabric)
        train(fabric, parts, range(2))
        path = Path(folder, f"{kind} {first}")
        model, optimizer, scheduler = parts
        fabric.save(path, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 2})
        for second in stages:
            fabric = fabric_at(rank, world, second, **(options if second else {}))
            parts = model, optimizer, scheduler = set_up(fabric)
            state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
            if kind == "full" and first == second:
                found = fabric.load(path)
                model.load_state_dict(found["model"]) if second < 3 else fabric.load_raw(path, {"model": model})
                optimizer.load_state_dict(found["optimizer"])
                scheduler.load_state_dict(found["scheduler"])
            else:
                fabric.load(path, state)
                assert state["step"] == 2
            assert train(fabric, parts, range(2, 4)) == expected, (first, second)


def by_value(fabric: Any) -> None:
    model, optimizer, _ = set_up(fabric)
    fabric.clip_gradients(model, optimizer, clip_val=1.0)


def of_some(fabric: Any) -> None:
    module = Module()
    halves = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module.blocks, module.head)]
    model, *optimizers = fabric.setup(module, *halves)
    fabric.backward(model(data(4, WIDTH, rank=0)).sum())
    fabric.clip_gradients(model, optimizers[0], max_norm=1.0)


def alone(fabric: Any) -> None:
    fabric.setup_module(Module())


def overflown(fabric: Any) -> None:
    model, optimizer, _ = set_up(fabric)
    fabric.backward(model(data(4, WIDTH, rank=0)).sum() * (float("inf") if fabric.global_rank else 1.0))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)


def refusals(rank: int, world: int) -> None:
    infinite = ["RuntimeError", "total norm of order 2.0", "error_if_nonfinite=False"]
    for stage, call, words in [
        (2, by_value, ["ValueError", "by value", "stage 2"]),
        (3, by_value, ["ValueError", "by value", "stage 3"]),
        (3, of_some, ["ValueError", "does not hold 'head.weight'"]),
        (2, alone, ["RuntimeError", "fabric.setup(model, optimizer)"]),
        (2, overflown, infinite),
        (3, overflown, infinite),
    ]:
        told = ranks.refusal(partial(call, fabric_at(rank, world, stage)))
        assert all(word in told for word in words), (call.__name__, told)


def compiled_inside(rank: int, world: int, folder: str) -> None:
    """A file has the names of the plain module, and loads with and without torch.compile."""
    for stage in (1, 2, 3):
        fabric = fabric_at(rank, world, stage)
        for compiled in (True, False):
            module = Module()
            if compiled:
                module.blocks[0] = torch.compile(module.blocks[0], backend="eager")
            model, _ = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.02))
            state = {"model": model}
            if compiled:
                path = Path(folder, str(stage))
                fabric.save(path, state)
                saved = torch.load(path, weights_only=True)["model"]
                assert list(saved) == list(Module().state_dict())
                for param in module.parameters():
                    param.data.zero_()
            fabric.load(path, state)
            assert all(torch.equal(value, saved[name]) for name, value in zero.full_state_dict(model).items())
