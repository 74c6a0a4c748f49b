"""A default device that is not the model's, and that lets no value survive: everything works as without one.

The model and its inputs are on the CPU; what zero makes by itself must follow them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import gpus
import matrix
import ranks
import zero
import zero.checkpoint.export
from assertions import same
from optimizers import TrainedLion
from processes import python
from runs import take_step, train_step
from transports import between_hosts
from zoo import CASES, Batch

CASE = CASES["mlp"]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01, fused=True),  # others of torch's count their steps on the default device
    "own": TrainedLion,
}


@contextmanager
def default(device: str | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def unchanged(work: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Asserts that `work` comes to the same whatever the default device is. It is given a name for its files."""
    with default(None):
        expected = work("cpu", *args, **options)
    with default("meta"):
        found = work("meta", *args, **options)
    same(found, expected)


def built(stage: int, optim: Callable[..., Optimizer], seed: int = 0, **options: Any) -> tuple[nn.Module, Optimizer]:
    with torch.device("cpu"):
        model = CASE.model(seed)
    if stage in (0, 1):
        optimizer = zero.OSS(model.parameters(), optim, **options) if stage else optim(model.parameters())
        return DistributedDataParallel(model, **CASE.ddp), optimizer
    return zero.setup(model, optim, stage=stage, **options)


def batch(rank: int, step: int) -> Batch:
    with torch.device("cpu"):
        return CASE.batch(rank, step)


def trained(model: nn.Module, optimizer: Optimizer, rank: int, count: int = 2, first: int = 0) -> list[Any]:
    """The losses, with accumulation in every step, and the weights that they lead to."""
    losses: list[Any] = []
    for step in range(first, first + count):
        losses += train_step(model, optimizer, [batch(rank, 2 * step), batch(rank, 2 * step + 1)])
    return [*losses, zero.full_state_dict(model, to=None)]


def clipped_and_scaled(model: nn.Module, optimizer: Optimizer, rank: int, stage: int) -> list[Any]:
    """One rank's gradient is infinite in the second step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    norms, scales = [], []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch(rank, step).inputs).square().mean() * (torch.inf if (step, rank) == (1, 1) else 1)
        scaler.scale(loss).backward()
        if stage:
            scaler.unscale_(optimizer)
            norms.append(model.clip_grad_norm_(0.1) if stage == 3 else optimizer.clip_grad_norm(0.1))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [norms[::2], scales, zero.full_state_dict(model, to=None)]  # the norm of the second step is not a number


def joined(model: nn.Module, optimizer: Optimizer, rank: int) -> list[Any]:
    losses = []
    for given, weight in zero.join([batch(rank, step) for step in range(2 + rank)], model):
        losses.append(take_step(optimizer, weight * model(*given.inputs).square().mean()))
    return losses


def trains(name: str, rank: int, stage: int, optim: str, *, offload: Any = None) -> list[Any]:
    options = {} if offload is None else {"offload": offload(name)}
    model, optimizer = built(stage, OPTIMIZERS[optim], **options)
    told = trained(model, optimizer, rank)
    if optim == "sgd":
        told += [clipped_and_scaled(model, optimizer, rank, stage), joined(model, optimizer, rank)]
    return [*told, zero.full_optimizer_state_dict(model, optimizer, to=None)]


@pytest.mark.slow
@matrix.combined("stage, optim", range(4), OPTIMIZERS)
@ranks.on(2)
def test_training_does_not_depend_on_the_default_device(rank, world, stage, optim):
    with between_hosts() if stage % 2 else nullcontext():
        unchanged(trains, rank, stage, optim)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3] if matrix.WHOLE else [3])
@ranks.on(2)
def test_offload_does_not_depend_on_the_default_device(rank, world, tmp_path, stage):
    on_disk = lambda name: zero.DiskOffload(tmp_path / name)  # noqa: E731
    unchanged(trains, rank, stage, "sgd", offload=on_disk if stage % 2 else lambda name: zero.CPUOffload())


def halves(name: str, rank: int, stage: int) -> Any:
    """Parameters of 16 bits and what is stepped in 32, with buffers; gradients travel in 16 bits."""
    with torch.device("cpu"):
        model, given = CASES["convnet"].model(), [CASES["convnet"].batch(rank, step) for step in range(3)]
    sgd = partial(SGD, lr=0.1, momentum=0.9)
    policy = zero.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model, optimizer = zero.setup(model, sgd, stage=stage, precision=policy)
    squares = (model(one.inputs[0].bfloat16()).float().square().mean() for one in given)
    losses = [take_step(optimizer, loss) for loss in squares]
    return losses, zero.full_state_dict(model, to=None), zero.full_optimizer_state_dict(model, optimizer, to=None)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_mixed_precision_does_not_depend_on_the_default_device(rank, world, stage):
    unchanged(halves, rank, stage)


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


@gpus.cpu_only("the batch is made on the default device")
@ranks.on(2)
def test_a_model_built_and_sharded_where_new_tensors_have_no_values_gets_its_own(rank, world):
    with torch.device("meta"):
        model = zero.FSDP(nn.Sequential(Waves(), Waves()))
        optimizer = SGD(model.parameters(), lr=0.1)
        model(batch(rank, 0).inputs[0]).sum().backward()
        found = zero.full_state_dict(model, to=None)
        optimizer.step()
    same(found, nn.Sequential(Waves(), Waves()).state_dict())


def looked_at(name: str, rank: int) -> Any:
    model, optimizer = built(3, OPTIMIZERS["sgd"])
    told = trained(model, optimizer, rank)
    with model.summon_full_params(with_grads=True):
        told.append({name: [param.clone(), param.grad] for name, param in model.module.named_parameters()})
    state, weights = zero.full_optimizer_state_dict(model, optimizer, to=None), model.state_dict()
    other, its = built(3, OPTIMIZERS["sgd"], seed=1)
    other.load_state_dict(weights)
    zero.load_full_optimizer_state_dict(other, its, state)
    told += trained(other, its, rank, 1, first=3)
    other.load_state_dict(told[4])
    return told, other.state_dict(), dict(zero.unwrap(other).named_parameters()), zero.report(other, its).stage


@pytest.mark.slow
@ranks.on(2)
def test_full_and_local_state_at_stage_3_do_not_depend_on_the_default_device(rank, world):
    unchanged(looked_at, rank)


def saves(name: str, rank: int, path: Path, stage: int, optim: str) -> Any:
    """Trains, saves, and goes on at this stage and at another."""
    run, extra = path / name, {"step": torch.tensor(3, device="cpu"), "none": torch.empty(0, device="cpu")}
    model, optimizer = built(stage, OPTIMIZERS[optim])
    trained(model, optimizer, rank)
    zero.checkpoint.save(run, model, optimizer, extra=extra, wait=False).wait()
    told: list[Any] = []
    for at in {stage, 3 - stage}:
        other, its = built(at, OPTIMIZERS[optim], seed=1)
        told += [zero.checkpoint.load(run, other, its), trained(other, its, rank, 1, first=3)]
    return told


@pytest.mark.slow
@matrix.combined("stage, optim", range(4) if matrix.WHOLE else [1, 3], ["sgd", "adamw"])
@ranks.on(2)
def test_checkpoints_do_not_depend_on_the_default_device(rank, world, tmp_path, stage, optim):
    unchanged(saves, rank, tmp_path, stage, optim)


@matrix.only
def test_exports_and_plans_do_not_depend_on_the_default_device(tmp_path):
    model = CASE.model()
    zero.checkpoint.save(tmp_path / "run", model)
    with default("meta"):
        zero.checkpoint.export.export(tmp_path / "run", tmp_path / "exported")
    same(load_file(tmp_path / "exported" / "model.safetensors"), dict(model.state_dict()))
    unchanged(lambda name: zero.plan(model, world_size=2, batch=batch(0, 0).inputs, stages=[1, 2, 3]).table())


@pytest.mark.slow
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
