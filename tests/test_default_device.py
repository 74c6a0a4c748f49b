"""A default device that is not the model's, and that lets no value survive: everything works as without one.

The model and its inputs are on the CPU; what zero makes by itself must follow them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import matrix
import ranks
import zero
from models import CASES, Batch, take_step, train_step
from optimizers import TrainedLion
from processes import python
from reference import same
from transports import between_hosts
from zero.checkpoint.export import export
from zero.measure.kinds import finding_of
from zero.measure.probe import Kind

CASE = CASES["mlp"]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01, fused=True),  # others of torch's count their steps on the default device
    "own": TrainedLion,
}
OFFLOADS: dict[str, Callable[[Path], Any]] = {"cpu": lambda _: zero.CPUOffload(), "disk": zero.DiskOffload}
STAGES = [0, 1, 2, 3]


@contextmanager
def default(device: str | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def unchanged(work: Callable[..., Any], rank: int, *args: Any) -> None:
    """Asserts that `work` comes to the same whatever the default device is. It is given a name for its files."""
    with default(None):
        expected = work(rank, "cpu", *args)
    with default("meta"):
        found = work(rank, "meta", *args)
    same(found, expected)


def built(stage: int, optim: Callable[..., Optimizer], seed: int = 0, **options: Any) -> tuple[nn.Module, Optimizer]:
    """options: of OSS, or of FSDP."""
    with torch.device("cpu"):
        model = CASE.model(seed)
    if stage == 3:
        model = zero.FSDP(model, **options)
        return model, optim(model.parameters())
    optimizer = zero.OSS(model.parameters(), optim, **options) if stage else optim(model.parameters())
    if stage == 2:
        return zero.ShardedDDP(model, optimizer), optimizer
    return DistributedDataParallel(model, **CASE.ddp), optimizer


def batch(rank: int, step: int) -> Batch:
    with torch.device("cpu"):
        return CASE.batch(rank, step)


def trained(model: nn.Module, optimizer: Optimizer, rank: int, count: int = 2, first: int = 0) -> list[Any]:
    """The losses, with accumulation in every step, and the weights that they lead to."""
    losses: list[Any] = []
    for step in range(first, first + count):
        losses += train_step(model, optimizer, [batch(rank, 2 * step), batch(rank, 2 * step + 1)])
    return [*losses, zero.full_state_dict(model)]


def state_of(model: nn.Module, optimizer: Optimizer) -> Any:
    if isinstance(model, zero.FSDP):
        return model.optim_state_dict(optimizer, to=None)
    if isinstance(optimizer, zero.OSS):
        optimizer.consolidate_state_dict(to=None)
    return optimizer.state_dict()


# ------------------------------------------------------------------------------------------------------------ training


def trains(rank: int, folder: str, stage: int, name: str, options: dict[str, Any]) -> Any:
    model, optimizer = built(stage, OPTIMIZERS[name], **options)
    return trained(model, optimizer, rank), state_of(model, optimizer)


@matrix.combined("stage, name", STAGES, OPTIMIZERS)
@ranks.on(2)
def test_training_does_not_depend_on_the_default_device(rank, world, stage, name):
    unchanged(trains, rank, stage, name, {})


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_training_between_hosts_does_not_depend_on_the_default_device(rank, world, stage):
    with between_hosts():
        unchanged(trains, rank, stage, "sgd", {})


@matrix.combined("stage, where", [1, 2, 3], OFFLOADS)
@ranks.on(2)
def test_offload_does_not_depend_on_the_default_device(rank, world, tmp_path, stage, where):
    unchanged(trains, rank, stage, "sgd", {"offload": OFFLOADS[where](tmp_path)})


class Elsewhere(nn.Parameter):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def test_shards_of_another_device_are_offloaded_to_the_cpu():
    shard = Elsewhere(torch.arange(3.0))
    with default("meta"), torch.no_grad():
        there = zero.CPUOffload(pin_memory=False).place(shard)
    same(there, torch.arange(3.0))


def test_optimizers_are_measured_whatever_the_default_device():
    class New(TrainedLion):
        """Not measured before."""

    with default("meta"):
        assert finding_of(New, {}).kind is Kind.ELEMENTWISE


def clips_and_scales(rank: int, folder: str, stage: int) -> Any:
    """One rank's gradient is infinite in the second step."""
    model, optimizer = built(stage, OPTIMIZERS["sgd"])
    scaler = zero.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    told: list[Any] = []
    for step in range(4):
        optimizer.zero_grad()
        given = batch(rank, step)
        loss = model(*given.inputs).square().mean() * (torch.inf if (step, rank) == (1, 1) else 1)
        scaler.scale(loss).backward()
        if stage:
            scaler.unscale_(optimizer)
            told.append(model.clip_grad_norm_(0.1) if stage == 3 else optimizer.clip_grad_norm(0.1))
        scaler.step(optimizer)
        scaler.update()
        told.append(scaler.get_scale())
    return told[:2] + told[4:], zero.full_state_dict(model)  # the norm of the second step is not a number


def joins(rank: int, folder: str, stage: int) -> Any:
    model, optimizer = built(stage, OPTIMIZERS["sgd"])
    losses = []
    for given, weight in zero.join([batch(rank, step) for step in range(2 + rank)], model):
        optimizer.zero_grad()
        losses.append(weight * model(*given.inputs).square().mean())
        losses[-1].backward()
        optimizer.step()
    return losses, zero.full_state_dict(model)


def halves(rank: int, folder: str, stage: int) -> Any:
    """Parameters of 16 bits and what is stepped in 32, with buffers; gradients travel in 16 bits."""
    with torch.device("cpu"):
        model, given = CASES["convnet"].model(), [CASES["convnet"].batch(rank, step) for step in range(3)]
    mixed = zero.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if stage == 3:
        model = zero.FSDP(model, mixed_precision=mixed)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = zero.OSS(model.bfloat16().parameters(), SGD, lr=0.1, momentum=0.9, master_dtype=torch.float32)
        model = zero.ShardedDDP(model, optimizer) if stage == 2 else DistributedDataParallel(model)
    losses = []
    for one in given:
        losses.append(take_step(optimizer, model(*(value.bfloat16() for value in one.inputs)).float().square().mean()))
    return losses, zero.full_state_dict(model), state_of(model, optimizer)


WORKS = [*itertools.product([clips_and_scales, joins], STAGES), *itertools.product([halves], [1, 2, 3])]
SOME = [(clips_and_scales, 1), (clips_and_scales, 3), (joins, 2), (joins, 3), (halves, 2), (halves, 3)]


@pytest.mark.matrix
@pytest.mark.parametrize(("work", "stage"), WORKS if matrix.WHOLE else SOME)
@ranks.on(2)
def test_other_ways_of_training_do_not_depend_on_the_default_device(rank, world, work, stage):
    unchanged(work, rank, stage)


class Waves(nn.Module):
    """Computes its first values on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(13))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.data.copy_(torch.linspace(0, 3, 13).sin())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@ranks.on(2)
def test_a_model_built_and_sharded_where_new_tensors_have_no_values_gets_its_own(rank, world):
    with torch.device("meta"):
        model = zero.FSDP(nn.Sequential(Waves(), Waves()))
        optimizer = SGD(model.parameters(), lr=0.1)
        model(batch(rank, 0).inputs[0]).sum().backward()
        found = zero.full_state_dict(model)
        optimizer.step()
    same(found, nn.Sequential(Waves(), Waves()).state_dict())


# -------------------------------------------------------------------------------------------------------- full tensors


def looked_at(rank: int, folder: str) -> Any:
    model, optimizer = built(3, OPTIMIZERS["sgd"])
    told = trained(model, optimizer, rank)
    with model.summon_full_params(with_grads=True):
        told.append({name: [param.clone(), param.grad] for name, param in model.module.named_parameters()})
    state, weights = state_of(model, optimizer), model.state_dict()
    other, its = built(3, OPTIMIZERS["sgd"], seed=1)
    other.load_state_dict(weights)
    other.load_optim_state_dict(its, state)
    told += trained(other, its, rank, 1, first=3)
    other.load_state_dict(told[4])
    report = zero.report(other, its)
    return told, other.state_dict(), dict(zero.unwrap(other).named_parameters()), report.stage


@ranks.on(2)
def test_full_and_local_state_at_stage_3_do_not_depend_on_the_default_device(rank, world):
    unchanged(looked_at, rank)


def planned(rank: int, folder: str) -> Any:
    with torch.device("cpu"):
        model = CASE.model()
    return zero.plan(model, world_size=2, batch=batch(rank, 0).inputs, stages=[1, 2, 3]).table()


def test_plans_do_not_depend_on_the_default_device():
    unchanged(planned, 0)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def saves(rank: int, folder: str, path: Path, stage: int, name: str) -> Any:
    """Trains, saves, goes on at another stage, and reads what others' libraries would."""
    run, extra = path / folder, {"step": torch.tensor(3, device="cpu"), "none": torch.empty(0, device="cpu")}
    model, optimizer = built(stage, OPTIMIZERS[name])
    trained(model, optimizer, rank)
    zero.checkpoint.save(run, model, optimizer, extra=extra, wait=False).wait()
    told: list[Any] = []
    for at in {stage, 3 - stage}:
        other, its = built(at, OPTIMIZERS[name], seed=1)
        told += [zero.checkpoint.load(run, other, its), trained(other, its, rank, 1, first=3), state_of(other, its)]
    return told


@matrix.combined("stage, name", STAGES, ["sgd", "adamw"])
@ranks.on(2)
def test_checkpoints_do_not_depend_on_the_default_device(rank, world, tmp_path, stage, name):
    unchanged(saves, rank, tmp_path, stage, name)


def test_exports_do_not_depend_on_the_default_device(tmp_path):
    model = CASE.model()
    zero.checkpoint.save(tmp_path / "run", model)
    with default("meta"):
        export(tmp_path / "run", tmp_path / "exported")
    same(load_file(tmp_path / "exported" / "model.safetensors"), dict(model.state_dict()))


def test_importing_zero_makes_no_tensor_on_the_default_device():
    """Tensors that are made with a module stay for the life of the process."""
    script = """
import gc, torch
torch.set_default_device("meta")
import zero, zero.plan, zero.checkpoint
found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.is_meta]
assert not found, found
"""
    python("-W", "ignore", "-c", script)
