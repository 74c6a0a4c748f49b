"""What wrapping and training leave as it was: torch's random numbers, what is full after a forward whose loss was
dropped, and memory, which is free at once after the last references to model and optimizer, as with
DistributedDataParallel: no circle of objects waits for the garbage collector."""

import copy
import gc
import tracemalloc
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
from assertions import plain, same
from optimizers import Moments
from rows import Net, adam
from runs import take_step
from zoo import WIDTH, Stack, data


def elements(model: zero.FSDP) -> int:
    return sum(plain(param).numel() for param in model.parameters())


@pytest.mark.parametrize("stage", range(4))
@ranks.on(2)
def test_no_random_number_is_drawn(rank, world, stage):
    net = Net()
    before = torch.get_rng_state()
    model, optimizer = zero.setup(net, adam, stage=stage)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


@ranks.on(2)
def test_reshard_releases_what_a_dropped_loss_left_full(rank, world):
    model, _ = zero.setup(Net(), adam, stage=3)
    at_rest = elements(model)
    model(torch.ones(2, WIDTH))
    assert elements(model) > at_rest
    model.reshard()
    assert elements(model) == at_rest


@ranks.on(2)
def test_a_frozen_model_that_is_called_with_gradients_keeps_nothing_of_its_forwards(rank, world):
    """As a teacher in a DDP script, without torch.no_grad()."""
    teacher = zero.FSDP(Stack(classes=WIDTH, blocks=2).requires_grad_(False)).eval()
    model, optimizer = zero.setup(Net(), adam, stage=3)
    sizes = []
    for i in range(150):
        (model(data(4, WIDTH, rank=rank, step=i)) - teacher(data(4, WIDTH, rank=rank, step=i))[:, :3]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i == 20:
            tracemalloc.start()
        if i in (60, 149):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] - sizes[0] < 20_000, sizes  # a record a unit and forward would take 70,000


@ranks.on(2)
def test_a_step_that_finds_memory_held_by_numpy_raises_on_every_rank_and_the_next_one_works(rank, world):
    net = Net()
    model, optimizer = zero.setup(net, adam, stage=3)
    reference, other = zero.setup(copy.deepcopy(Net()), adam, stage=0)
    zero.load_full_state_dict(reference, zero.full_state_dict(model, to=None))
    for i in range(3):
        for one, by in ((model, optimizer), (reference, other)):
            one(data(4, WIDTH, rank=rank, step=i)).square().mean().backward()
            if one is model:
                one(data(4, WIDTH, rank=rank, step=i))  # leaves the root unsharded
                kept = net.first.weight.detach().numpy() if rank == 0 else None
                with pytest.raises(RuntimeError, match="NumPy"):
                    by.step()
                del kept
            by.step()
            by.zero_grad()
    same(zero.full_state_dict(model, to=None), zero.full_state_dict(reference, to=None))


@ranks.on(2)
def test_torch_export_of_a_sharded_model_is_refused_and_leaves_it_whole(rank, world):
    model, optimizer = zero.setup(Net(), adam, stage=3)
    for what in (model, model.module):
        with pytest.raises(RuntimeError, match=r"zero\.unwrap"):
            torch.export.export(what, (torch.ones(2, WIDTH),), strict=False)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    assert len(zero.full_state_dict(model, to=None)) == len(Net().state_dict())


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
