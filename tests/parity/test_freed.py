"""After the last references to model and optimizer their memory is free at once, as with DistributedDataParallel: no
circle of objects waits for the garbage collector."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

import ranks
import zero
from optimizers import Moments
from runs import take_step
from zoo import WIDTH, Stack, data

Use = Callable[[Any, Any, Tensor], object]


def trains(model: Any, optimizer: Any, x: Tensor) -> None:
    for _ in range(3):
        take_step(optimizer, model(x).square().mean())


def accumulates(model: Any, optimizer: Any, x: Tensor) -> None:
    for sync in (False, True):
        if sync:
            model(x).sum().backward()
        else:
            with zero.no_sync(model):
                model(x).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def is_saved(model: Any, optimizer: Any, x: Tensor) -> None:
    trains(model, optimizer, x)
    zero.load_full_state_dict(model, zero.full_state_dict(model, to=None))
    zero.load_full_optimizer_state_dict(model, optimizer, zero.full_optimizer_state_dict(model, optimizer, to=None))
    optimizer.load_state_dict(optimizer.state_dict())
    trains(model, optimizer, x)


def is_hooked(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    StepLR(optimizer, 1)
    trains(model, optimizer, x)


def is_evaluated(model: Any, optimizer: Any, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x)


def breaks_off(model: Any, optimizer: Any, x: Tensor) -> None:
    trains(model, optimizer, x)
    loss = model(x).sum() * torch.ones(2, requires_grad=True)
    try:
        loss.backward()  # it is no scalar
    except RuntimeError:
        del loss
    trains(model, optimizer, x)


def is_unwrapped(model: Any, optimizer: Any, x: Tensor) -> None:
    trains(model, optimizer, x)
    zero.unwrap(model)


USES = [trains, accumulates, is_saved, is_hooked, is_evaluated, breaks_off, is_unwrapped]
OPTIONS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},  # so it is torch's own, too
    "1": {"stage": 1},
    "1 by a class of the user's": {"stage": 1, "optim": Moments},
    "2": {"stage": 2},
    "2 offloaded": {"stage": 2, "offload": zero.CPUOffload()},
    "3": {"stage": 3},
    "3 mixed": {"stage": 3, "precision": zero.MixedPrecision(torch.bfloat16)},
    "3 of whole parameters": {"stage": 3, "partition": "whole"},
    "3 offloaded": {"stage": 3, "offload": zero.CPUOffload()},
    "3 by a class of the user's": {"stage": 3, "optim": Moments},
}


def left(rank: int, net: nn.Module, use: Use, how: dict[str, Any]) -> list[weakref.ref[Tensor]]:
    """What lived on: references to parameters, and to the state of the optimizer."""
    model, optimizer = zero.setup(net, **{"optim": Adam, "lr": 0.01, **how})
    use(model, optimizer, data(4, WIDTH, rank=rank))
    state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
    return [weakref.ref(tensor) for tensor in [*model.parameters(), *state]]


@pytest.mark.slow
@pytest.mark.parametrize("how", OPTIONS.values(), ids=[*OPTIONS])
@ranks.on(2)
def test_nothing_outlives_model_and_optimizer(rank, world, how):
    take_step(SGD([nn.Parameter(torch.ones(1))], 0.1), torch.ones(1, requires_grad=True).sum())
    gc.collect()
    gc.disable()
    try:
        for use in USES:
            net = Stack(classes=3, blocks=2)
            found = left(rank, net, use, how)
            del net
            assert not [one for one in found if one() is not None], use.__name__
    finally:
        gc.enable()
