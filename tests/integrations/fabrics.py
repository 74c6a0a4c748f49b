"""What ranks do in test_lightning: one script with Fabric, by strategy."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import Strategy
from lightning.fabric.strategies.ddp import DDPStrategy
from lightnings import WIDTH, Adapted, Added, Module, saved_names, saves_at_the_second_try
from torch import Tensor

import ranks
import zero
from zero.integrations.lightning import ZeroFabricStrategy, ZeroStrategy
from zoo import data

SCALE = {"init_scale": 1024.0}
CASES = {"plain": (None, 1), "accumulated": (None, 2), "clipped": (0.5, 1)}
"""The norm to clip by, and batches a step."""


def fabric_at(rank: int, world: int, stage: int, precision: Any = None, **options: Any) -> Any:
    """options: of a stage, which at stage 0 are none."""
    strategy: Any = ZeroFabricStrategy(stage, **options) if stage and options else f"zero_stage_{stage}"
    strategy = strategy if stage else DDPStrategy()
    more: dict[str, Any] = {"precision": precision or "32-true"}
    if precision == "16-mixed":  # which on CPUs is bfloat16, unless by a plugin
        more = {"plugins": [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", **SCALE))]}
    plugins = [TorchElasticEnvironment(), *more.pop("plugins", [])]
    fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=plugins, **more)
    fabric.launch()
    return fabric


def set_up(fabric: Any, kind: type[Module] = Module, empty_init: bool = False) -> tuple[Any, Any, Any]:
    with fabric.init_module(empty_init):
        module = kind()
    optimizer = torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    model, optimizer = fabric.setup(module, optimizer)
    return model, optimizer, scheduler


def train(
    fabric: Any, parts: tuple[Any, Any, Any], steps: range, max_norm: float | None = None, batches: int = 1
) -> list[float]:
    model, optimizer, scheduler = parts
    losses = []
    for step in steps:
        for number in range(batches):
            with fabric.no_backward_sync(model, enabled=number < batches - 1):
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


def all_cases(rank: int, world: int, stage: int) -> dict[str, tuple[list[float], dict[str, Tensor], list[Any]]]:
    found = {}
    for name, (max_norm, batches) in CASES.items():
        fabric = fabric_at(rank, world, stage)
        parts = set_up(fabric)
        losses = train(fabric, parts, range(2), max_norm, batches)
        found[name] = losses, zero.full_state_dict(parts[0]._forward_module, to=None), []
    return found


def in_16_bits(rank: int, world: int, stage: int, asked: str, precision: str, max_norm: float | None) -> None:
    """Fabric's word is that of zero.setup: bit for bit, with as many bytes sent."""
    before, fabric = zero.traffic(), fabric_at(rank, world, stage, asked)
    parts = set_up(fabric)
    losses = train(fabric, parts, range(3), max_norm)
    sent, weights = zero.traffic() - before, zero.full_state_dict(parts[0]._forward_module, to=None)
    module, expected, before = Module(), list[float](), zero.traffic()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    model, optimizer = zero.setup(module, optimizer, stage=stage, precision=precision)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    scaler = torch.amp.GradScaler("cpu", **SCALE, enabled=precision == "fp16")
    for step in range(3):
        loss = model(data(4, WIDTH, rank=rank, step=2 * step)).float().square().mean()  # as Fabric casts outputs
        scaler.scale(loss).backward()
        expected.append(loss.item())
        if max_norm is not None:
            scaler.unscale_(optimizer)
            expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
    again = zero.traffic() - before
    assert (losses, sent.gather, sent.reduce) == (expected, again.gather, again.reduce)
    assert all(torch.equal(value, weights[name]) for name, value in zero.full_state_dict(model, to=None).items())


def two_optimizers(rank: int, world: int, stage: int) -> list[float]:
    """Of two halves of one model. Returns losses, and norms before clipping."""
    fabric, module, seen = fabric_at(rank, world, stage), Module(), list[float]()
    halves = [torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9) for half in (module.blocks, module.head)]
    model, *optimizers = fabric.setup(module, *halves)
    for step in range(3):
        loss = model(data(4, WIDTH, rank=rank, step=step)).square().mean()
        fabric.backward(loss)
        seen += [loss.item(), *(fabric.clip_gradients(model, one, max_norm=0.05).item() for one in optimizers)]
        for one in optimizers:
            one.step()
            one.zero_grad()
    return seen


def two_models(rank: int, world: int, stage: int, folder: str) -> list[float]:
    """Which one optimizer steps. Returns the losses of two steps, which are then taken once more from a state."""
    fabric, modules = fabric_at(rank, world, stage), [Module() for _ in range(2)]
    optimizer = torch.optim.AdamW([param for one in modules for param in one.parameters()], lr=0.02)
    models = [fabric.setup_module(one) for one in modules]
    state = {"first": models[0], "second": models[1], "optimizer": fabric.setup_optimizers(optimizer)}

    def train(steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = torch.stack([one(data(4, WIDTH, rank=rank, step=step)).square().mean() for one in models]).prod()
            fabric.backward(loss)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            losses.append(loss.item())
        return losses

    train(range(2))
    fabric.save(f"{folder}/{stage}", state)
    fabric.barrier()
    losses = train(range(2, 4))
    fabric.load(f"{folder}/{stage}", state)
    assert train(range(2, 4)) == losses
    return losses


def with_state(rank: int, world: int, stage: int) -> list[float]:
    """Adagrad has state as soon as it is built, before it is set up."""
    fabric, module = fabric_at(rank, world, stage), Module()
    model, optimizer = fabric.setup(module, torch.optim.Adagrad(module.parameters(), lr=0.1))
    return train(fabric, (model, optimizer, mock.Mock()), range(3))


def held(rank: int, world: int, stage: int, **options: Any) -> float:
    """The share of the gradients' bytes that a rank holds between two batches of a step."""
    fabric = fabric_at(rank, world, stage, **options)
    model, optimizer, _ = set_up(fabric)
    with fabric.no_backward_sync(model):
        fabric.backward(model(data(4, WIDTH, rank=rank)).square().mean())
    full = sum(param.nbytes for param in Module().parameters())
    return zero.report(model._forward_module, optimizer.optimizer).gradients / full


def resumed(rank: int, world: int, pairs: list[tuple[int, int]], folder: str, kind: str = "full") -> None:
    """By fabric.load."""
    fabric = fabric_at(rank, world, 0)
    expected = train(fabric, set_up(fabric), range(3))[1:]
    options = {} if kind == "full" else {"checkpoint": kind}
    for first in dict(pairs):
        parts = model, optimizer, scheduler = set_up(fabric := fabric_at(rank, world, first, **options))
        train(fabric, parts, range(1))
        fabric.save(f"{folder}/{first}", {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 2})
    for first, second in pairs:
        parts = model, optimizer, scheduler = set_up(fabric := fabric_at(rank, world, second, **options))
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
        fabric.load(f"{folder}/{first}", state)
        assert state["step"] == 2
        assert train(fabric, parts, range(1, 3)) == expected, (first, second)


def built_empty(rank: int, world: int, stage: int, folder: str) -> Any:
    parts = model, optimizer, _ = set_up(fabric := fabric_at(rank, world, 0))
    train(fabric, parts, range(1))
    fabric.save(f"{folder}/{stage}", {"model": model, "optimizer": optimizer})
    fabric = fabric_at(rank, world, stage)
    with fabric.init_module(empty_init=True):
        assert torch.nn.Linear(1, 1).weight.device.type == ("meta" if stage == 3 else "cpu")
    parts = model, optimizer, _ = set_up(fabric, empty_init=True)
    fabric.load(f"{folder}/{stage}", {"model": model, "optimizer": optimizer})
    losses = train(fabric, parts, range(1, 3))
    return losses, zero.full_state_dict(model._forward_module, to=None), []


def loaded_in_part(rank: int, world: int, stage: int, kind: str, folder: str) -> list[Any]:
    """By fabric.load(strict=False)."""
    found = []
    for saved, loaded in [(Module, Added), (Added, Module)]:
        path = f"{folder}/{stage} {kind} {saved.__name__}"
        parts = model, optimizer, _ = set_up(fabric := fabric_at(rank, world, stage, checkpoint=kind), saved)
        train(fabric, parts, range(1))
        fabric.save(path, {"model": model, "optimizer": optimizer})
        fabric.barrier()
        parts = model, optimizer, _ = set_up(fabric, loaded)
        told = ranks.refusal(lambda: fabric.load(path, {"model": model, "optimizer": optimizer}))  # noqa: B023
        assert "norm.weight" in told and "norm.running_mean" in told, told
        fabric.load(path, {"model": model, "optimizer": optimizer}, strict=False)
        losses = train(fabric, parts, range(1, 3))
        found.append((losses, zero.full_state_dict(model._forward_module, to=None), []))
    return found


def without_frozen(rank: int, world: int, stage: int, kind: str, folder: str) -> Any:
    options = {"checkpoint": kind, "exclude_frozen_parameters": True}
    parts = model, optimizer, _ = set_up(fabric := fabric_at(rank, world, stage, **options), Adapted)
    path, state = f"{folder}/{stage} {kind}", {"state_dict": model, "optimizer": optimizer}
    train(fabric, parts, range(1))
    model.module.head.bias.requires_grad_(False)
    fabric.save(path, state)
    fabric.barrier()
    assert not stage or saved_names(path) == ["head.bias", "head.weight"]
    parts = model, optimizer, _ = set_up(fabric, Adapted)
    fabric.load(path, {"state_dict": model, "optimizer": optimizer})
    losses = train(fabric, parts, range(1, 3))
    return losses, zero.full_state_dict(model._forward_module, to=None), []


def saved_in_turn(rank: int, world: int, path: str) -> None:
    for step, kind in enumerate(["sharded", "full", "sharded"]):
        fabric = fabric_at(rank, world, 2, checkpoint=kind)
        model, optimizer, _ = set_up(fabric)
        state = {"model": model, "optimizer": optimizer, "step": step}
        saves_at_the_second_try(partial(fabric.save, state=state), path)
        fabric.barrier()
        assert Path(path).is_dir() == (kind == "sharded")
        fabric.load(path, state := {**state, "step": None})
        assert state["step"] == step
        with mock.patch.object(torch, "load", side_effect=OSError("no disk") if rank else torch.load):
            assert ranks.refusal(partial(fabric.load, path, state)).startswith("OSError")


def interrupted(rank: int, world: int, folder: str) -> None:
    fabric = fabric_at(rank, world, 2, checkpoint="sharded")
    parts = model, optimizer, scheduler = set_up(fabric)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 1}
    train(fabric, parts, range(1))
    for _ in range(2):
        fabric.save(f"{folder}/fabric", state)
    fabric.barrier()
    assert len([*Path(folder, "fabric").glob("0*")]) == 1
    expected = train(fabric, parts, range(1, 2))
    with mock.patch.object(Strategy, "save_checkpoint", side_effect=OSError):
        assert ranks.refusal(lambda: fabric.save(f"{folder}/fabric", {**state, "step": 2})).startswith("OSError")
    fabric.load(f"{folder}/fabric", state)
    assert state["step"] == 1 and train(fabric, parts, range(1, 2)) == expected


def by_value(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    fabric = fabric_at(rank, world, stage)
    model, optimizer, _ = set_up(fabric)
    fabric.backward(model(data(4, WIDTH, rank=rank)).square().mean())
    fabric.clip_gradients(model, optimizer, clip_val=1e-3)
    optimizer.step()
    return zero.full_state_dict(model._forward_module, to=None)


def refusals(rank: int, world: int) -> None:
    """A module without its optimizer, the Trainer's strategy, and a step without a backward that synchronises."""
    told = ranks.refusal(lambda: lightning.Fabric(accelerator="cpu", strategy=ZeroStrategy(2)))
    assert "ZeroStrategy(stage=2" in told and "Fabric takes ZeroFabricStrategy" in told, told
    told = ranks.refusal(lambda: fabric_at(rank, world, 2).setup_module(Module()))
    assert told.startswith("RuntimeError") and "fabric.setup(model, optimizer)" in told, told
    model, optimizer, _ = set_up(fabric := fabric_at(rank, world, 1))
    with fabric.no_backward_sync(model):
        fabric.backward(model(data(4, WIDTH, rank=rank)).square().mean())
    told = ranks.refusal(optimizer.step)
    assert told.startswith("RuntimeError") and "ran under no_sync()" in told, told
