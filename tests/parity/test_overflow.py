"""An overflow on one rank skips the step on all: what is trained with a loss scale is, bit for bit, what is trained at
the same place without one and without that step. Scales are powers of two."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gpus
import matrix
import ranks
import zero
from assertions import close, same
from rows import adam
from runs import on_mesh, sgd, stage_3
from transports import calling, in_turn
from zoo import FEATURES, built, odd_batch

SCALE = {"init_scale": 2.0**8, "growth_interval": 2}
STEPS, BAD = 5, 2  # in step BAD one element of one rank's gradient is infinite
GROWN, SHRUNK = [256, 512, 512, 1024, 1024], [256, 512, 256, 256, 512]  # the scales after each step


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 40))


def one_weight() -> nn.Module:
    return nn.Linear(FEATURES, 3, bias=False)


WHOLE, FP16 = {"partition": "whole"}, {"precision": "fp16"}
OFFLOADED = {"offload": zero.CPUOffload(pin_memory=False)}
PLACES: dict[str, tuple[int, Any, Any, dict[str, Any]]] = {
    "nothing sharded": (0, layers, sgd, {}),
    "stage 1": (1, layers, sgd, {}),
    "stage 1 whole": (1, layers, adam, WHOLE),
    "stage 1 whole of one weight": (1, one_weight, sgd, WHOLE),
    "stage 1 in float16": (1, layers, sgd, FP16),
    "stage 1 offloaded": (1, layers, adam, OFFLOADED),
    "stage 2": (2, layers, adam, {}),
    "stage 2 whole": (2, layers, sgd, WHOLE),
    "stage 2 whole of one weight": (2, one_weight, sgd, WHOLE),
    "stage 2 in float16": (2, layers, sgd, FP16),
    "stage 2 offloaded": (2, layers, sgd, OFFLOADED),
    "stage 3": (3, layers, sgd, {}),
    "stage 3 whole": (3, layers, adam, WHOLE),
    "stage 3 whole of one weight": (3, one_weight, sgd, WHOLE),
    "stage 3 in float16": (3, layers, sgd, FP16),
    "stage 3 offloaded": (3, layers, adam, OFFLOADED),
    "stage 3 hybrid": (3, layers, sgd, {"replicas": 2}),
}


def at(place: str, world: int) -> tuple[nn.Module, Any]:
    stage, make, optim, options = PLACES[place]
    if stage == 3:
        return stage_3(built(make), optim, **on_mesh(world, options))
    return zero.setup(built(make), optim, stage=stage, **options)


def spoil(gradient: Tensor) -> Tensor:
    """The last element, of which one rank alone has a shard, is infinite."""
    gradient = gradient.clone()
    gradient.view(-1)[-1] = torch.inf
    return gradient


def train(
    rank: int, world: int, place: str, scaler: Any = None, spoiler: int | None = None, clips: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """Losses and weights, and scales. Without a scaler the bad step is left out."""
    model, optimizer = at(place, world)
    told, scales = {}, []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(odd_batch(rank, step).to(next(model.parameters()).dtype)).float().square().mean()
        told[f"loss {step}"] = loss.detach()
        bad = spoiler is not None and step == BAD
        hook = next(model.parameters()).register_hook(spoil) if bad and rank == spoiler and scaler else None
        (scaler.scale(loss) if scaler else loss).backward()
        if hook:
            hook.remove()
        if clips:
            scaler and scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.05)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        elif not bad:
            optimizer.step()
    return told | zero.full_state_dict(model, to=None), scales


def beside_none(rank: int, world: int, place: str, clips: bool) -> None:
    without = {bad: train(rank, world, place, None, bad, clips)[0] for bad in (None, 0)}
    for spoiler in (None, *([*range(world)] if matrix.WHOLE else [world - 1])):
        scaler = torch.amp.GradScaler(gpus.DEVICE, **SCALE)
        found, scales = train(rank, world, place, scaler, spoiler, clips)
        assert scales == (GROWN if spoiler is None else SHRUNK)
        tolerance = 2e-3 if "16" in place else 0.0  # small gradients are none without a scale
        for name, expected in without[None if spoiler is None else 0].items():
            assert close(found[name], expected, tolerance), f"{name} with an infinite gradient on rank {spoiler}"


QUICK = {"stage 1", "stage 2 whole of one weight", "stage 3"}
LEFT_OUT = {"stage 1 whole", "stage 1 offloaded", "stage 2", "stage 3 whole"}
"""Of the suite; `make matrix` has them."""
CASES = [
    pytest.param(name, in_turn(number), marks=[] if name in QUICK else pytest.mark.slow)
    for number, name in enumerate(PLACES)
    if matrix.WHOLE or name not in LEFT_OUT
]


@pytest.mark.matrix
@pytest.mark.parametrize(("place", "transport"), CASES)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(place, transport):
    ranks.run(calling, args=(transport, beside_none, place, False))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["stage 1", "stage 2", "stage 3"])
def test_so_it_is_after_clipping_on_three_ranks(place):
    ranks.run(beside_none, 3, args=(place, True))


@pytest.mark.parametrize("place", ["stage 1", "stage 2", "stage 3"])
@ranks.on(2)
def test_disabled_it_does_nothing(rank, world, place):
    found, scales = train(rank, world, place, torch.amp.GradScaler(gpus.DEVICE, enabled=False))
    same(found, train(rank, world, place)[0], "losses and weights")
    assert scales == [1.0] * STEPS
