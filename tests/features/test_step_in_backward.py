"""Steps that are taken in backward, beside those that are taken after it."""

from __future__ import annotations

import copy
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adafactor, Adam, AdamW
from torch.utils.checkpoint import checkpoint

import gpus
import matrix
import ranks
import zero
from sidebyside import data
from transports import overlapping
from zero.features.offload import Disk
from zero.oss.gradients import full_gradient
from zero.plan.meter import Meter

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": partial(AdamW, lr=1e-2),
    "fused": partial(Adam, lr=1e-2, fused=True),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Net(nn.Module):
    """Tied at both ends, with a parameter that not all ranks use, and one that nobody does."""

    def __init__(self, width: int = 12, layers: int = 4, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.sometimes, self.never = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(3))
        self.recomputes = recomputes

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.last(x * self.sometimes if use else x)


STAGES: dict[str, dict[str, Any]] = {
    "2": {},
    "2 in small buckets": {"reduce_buffer_size": 100},
    "3": {},
    "3 whole": {"partition": "whole"},
    "3 memory first": {"prefetch": zero.MEMORY_FIRST},
    "3 speed first": {"prefetch": zero.SPEED_FIRST},
}


def made(stage: str, optim: Any, *, net: nn.Module, oss: dict[str, Any] | None = None, **more: Any) -> tuple[Any, Any]:
    options = {**STAGES[stage], **more}
    if stage.startswith("2"):
        optimizer = zero.OSS(net.parameters(), optim, **(oss or {}))
        return zero.ShardedDDP(net, optimizer, **options), optimizer
    model = zero.FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    return model, optim(model.parameters())


def built(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def backward(model: Any, rank: int, step: int) -> Tensor:
    loss = model(data(5, 12, rank=rank, step=step), use=step != 1 or rank == 1).square().mean()
    loss.backward()
    return loss.detach()


def compared(rank: int, world: int, stage: str, optim: Any, more: dict[str, Any], nets: dict[str, Any]) -> None:
    """Five steps beside those of the same stage after backward, with a scheduler, and a state that moves over."""
    pairs = [made(stage, optim, net=built(**nets), **more) for _ in range(2)]
    zero.step_in_backward(*pairs[0])
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for _, optimizer in pairs]
    before = zero.full_state_dict(pairs[0][0])
    for step in range(5):
        losses = []
        for (model, optimizer), scheduler in zip(pairs, schedulers, strict=True):
            optimizer.zero_grad()
            losses.append(backward(model, rank, step))
            if (model, optimizer) == pairs[0]:
                freed = all(full_gradient(param) is None for param in model.parameters())
                assert freed, "gradients are to be freed"
            optimizer.step()
            scheduler.step()
        assert losses[0] == losses[1]
        found, expected = (zero.full_state_dict(model) for model, _ in pairs)
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different, f"step {step}: {different}"
        if step == 2:
            pairs[0][1].load_state_dict(copy.deepcopy(pairs[1][1].state_dict()))
    assert not torch.equal(found["first.weight"], before["first.weight"])
    assert torch.equal(found["never"], before["never"])


@matrix.combined("stage, name", STAGES, OPTIMIZERS)
def test_steps_are_those_after_backward_bit_for_bit(stage, name):
    ranks.run(compared, args=(stage, OPTIMIZERS[name], {}, {}))


@pytest.mark.parametrize("stage", ["2", "3"])
def test_with_activations_that_are_computed_again(stage):
    ranks.run(compared, args=(stage, OPTIMIZERS["sgd"], {}, {"recomputes": True}))


@pytest.mark.parametrize("stage", ["2 in small buckets", "3 speed first"])
@ranks.on(2)
def test_where_transfers_overlap(rank, world, stage):
    with overlapping():
        compared(rank, world, stage, OPTIMIZERS["adamw"], {}, {})


@pytest.mark.parametrize("stage", ["2", "3"])
@ranks.on(2)
def test_with_shards_in_files(rank, world, tmp_path, stage):
    offload = {"offload": zero.DiskOffload(tmp_path)}
    compared(rank, world, stage, OPTIMIZERS["adamw"], {"oss": offload} if stage == "2" else offload, {})


class Slow(Disk):
    """Its steps take some time, now more, now less."""

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path)
        self._random, self.threads = random.Random(seed), set[threading.Thread]()

    def step_part(self, part: Any) -> None:
        self.threads.add(threading.current_thread())
        time.sleep(self._random.choice([0, 0.001, 0.02]))
        super().step_part(part)


@pytest.mark.parametrize("stage", ["2 in small buckets", "3", "3 memory first"])
@ranks.on(2)
def test_beside_backward_steps_are_the_same_whatever_time_they_take(rank, world, tmp_path, stage):
    """Also where one rank's take another time than the other's."""
    slow = Slow(tmp_path, seed=rank)
    offload = {"offload": slow}
    compared(rank, world, stage, OPTIMIZERS["adamw"], {"oss": offload} if stage[0] == "2" else offload, {})
    assert any(thread.name.startswith("zero-steps") for thread in slow.threads)


@pytest.mark.parametrize("stage", ["2 in small buckets", "3"])
@ranks.on(2, timeout=20)
def test_an_error_beside_backward_ends_it(rank, world, tmp_path, stage):
    offload = {"offload": zero.DiskOffload(tmp_path)}
    more = {"oss": offload} if stage[0] == "2" else offload
    model, optimizer = made(stage, OPTIMIZERS["sgd"], net=built(), **more)
    zero.step_in_backward(model, optimizer)
    with mock.patch.object(Disk, "step_part", side_effect=OSError("the disk is full")):
        assert "the disk is full" in ranks.refusal(lambda: backward(model, rank, 0))
    assert "Load a checkpoint" in ranks.refusal(lambda: backward(model, rank, 0))


@ranks.on(2)
def test_a_closure_computes_the_gradients(rank, world):
    """As torch's optimizers take one."""
    told = []
    for in_backward in (True, False):
        model, optimizer = made("2", OPTIMIZERS["sgd"], net=built())
        if in_backward:
            zero.step_in_backward(model, optimizer)
        for step in range(2):
            optimizer.zero_grad()
            told.append(optimizer.step(lambda: backward(model, rank, step)).item())  # noqa: B023
    assert told[:2] == told[2:]


def held(rank: int, world: int, stage: str, in_backward: bool) -> tuple[float, float]:
    """Bytes a parameter at rest after backward and at the peak of a settled step, but for activations and buckets."""
    with Meter() as meter:
        net = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))
        if stage == "2":
            optimizer: Any = zero.OSS(net.parameters(), Adam, lr=1e-3)
            model: Any = zero.ShardedDDP(net, optimizer, reduce_buffer_size=128 * 128)
        else:
            model = zero.FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
            optimizer = Adam(model.parameters(), lr=1e-3)
        if in_backward:
            zero.step_in_backward(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            meter.reset_peak()
            model(torch.ones(1, 128)).sum().backward()
            after_backward = meter.live()
            optimizer.step()
    numel = 16 * 128 * 128
    return after_backward / numel, meter.peak() / numel


FORMULAS = {"2": (4 + 8 / 2, 4 / 2), "3": (12 / 2, 4 / 2)}
"""Bytes a parameter on 2 ranks with Adam: what is kept, and what gradients of shards take without."""


@pytest.mark.parametrize("stage", FORMULAS)
def test_gradients_of_shards_are_not_kept(stage):
    kept, gradients = FORMULAS[stage]
    bucket = 4 / 16
    for rest, peak in ranks.run(held, args=(stage, True), fresh=True):
        assert rest == pytest.approx(kept, rel=0.02)
        assert peak < kept + (4 + 2 / 2) * bucket
    for rest, _ in ranks.run(held, args=(stage, False), fresh=True):
        assert rest == pytest.approx(kept + gradients, rel=0.02)


@pytest.mark.parametrize("stage", ["2", "3"])
@ranks.on(2, timeout=20)
def test_what_needs_all_gradients_is_refused(rank, world, stage):
    model, optimizer = made(stage, OPTIMIZERS["adamw"], net=built())
    zero.step_in_backward(model, optimizer)
    told = {}

    def second_backward() -> None:
        backward(model, rank, 0)
        backward(model, rank, 1)

    def under_no_sync() -> None:
        with model.no_sync():
            backward(model, rank, 0)

    clip = model.clip_grad_norm_ if stage == "3" else optimizer.clip_grad_norm
    told["clip"] = ranks.refusal(lambda: clip(1.0))
    scaler = zero.GradScaler(gpus.DEVICE)
    scaler.scale(torch.ones(()))
    told["scaler"] = ranks.refusal(lambda: scaler.unscale_(optimizer))
    told["no_sync"] = ranks.refusal(under_no_sync)
    told["again"] = ranks.refusal(lambda: zero.step_in_backward(model, optimizer))
    if stage == "2":
        told["hook"] = ranks.refusal(lambda: optimizer.register_step_pre_hook(print))
    told["second"] = ranks.refusal(second_backward)
    again = told.pop("again")
    assert again.startswith("ValueError") and "was called before" in again
    for what, text in told.items():
        assert text.startswith("RuntimeError"), (what, text)
        assert "zero.step_in_backward" in text, (what, text)


@ranks.on(2)
def test_what_it_cannot_step_is_refused(rank, world):
    net = built()
    at_1 = zero.OSS(net.parameters(), SGD, lr=0.1)
    sharded = zero.FSDP(built(), partition="whole")
    other = zero.ShardedDDP(net, at_1)
    another = zero.OSS(built().parameters(), SGD, lr=0.1)
    pairs = [
        (net, at_1),
        (sharded, Adafactor(sharded.parameters())),
        (sharded, SGD([next(sharded.parameters())], lr=0.1)),
        (sharded, at_1),
        (other, another),
    ]
    expected = ["given a Net", "Adafactor cannot step in backward", "lacks some trained", "and a OSS", "of another"]
    told = [ranks.refusal(partial(zero.step_in_backward, *pair)) for pair in pairs]
    for text, wanted in zip(told, expected, strict=True):
        assert text.startswith("ValueError") and wanted in text


@pytest.mark.parametrize("stage", ["2 in small buckets", "3"])
@ranks.on(2, timeout=20)
def test_after_a_backward_that_was_interrupted_training_does_not_go_on(rank, world, stage):
    """An error in the last block's backward, when others were stepped."""
    model, optimizer = made(stage, OPTIMIZERS["sgd"], net=built())
    zero.step_in_backward(model, optimizer)

    def failing(*_: Any) -> None:
        raise ValueError("on purpose")

    handle = model.module.blocks[0].wide.register_full_backward_hook(failing)
    assert "on purpose" in ranks.refusal(lambda: backward(model, rank, 0))
    handle.remove()
    assert "Load a checkpoint" in ranks.refusal(lambda: backward(model, rank, 0))


@ranks.on(2, timeout=20)
def test_a_backward_of_an_older_graph_is_refused(rank, world):
    """Two forwards, and then their backwards."""
    model, optimizer = made("3", OPTIMIZERS["sgd"], net=built())
    zero.step_in_backward(model, optimizer)
    losses = [model(data(5, 12, rank=rank, step=step), use=True).square().mean() for step in range(2)]
    told = ranks.refusal(lambda: [loss.backward() for loss in losses])
    assert "a second backward before step()" in told


@ranks.on(2, timeout=20)
def test_autograd_does_not_compute_with_what_was_stepped(rank, world):
    """A parameter that was saved without gradient and is read when it has been stepped."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer = zero.OSS(net.parameters(), SGD, lr=0.1)
    model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=0)
    zero.step_in_backward(model, optimizer)

    def both_ways() -> None:
        x = net[0](torch.ones(2, 4)) @ net[2].weight.detach()  # needed in backward once net[2] was stepped
        (model(torch.ones(2, 4)).sum() + x.sum()).backward()

    told = ranks.refusal(both_ways)
    assert "modified by an inplace operation" in told
