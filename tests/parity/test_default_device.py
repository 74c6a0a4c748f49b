"""A default device that is not the model's, and that lets no value survive, where the rows of test_axes.py do not look:
mixed precision, models that are built there, exports, plans, and imports."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

import gpus
import matrix
import ranks
import zero
import zero.checkpoint.export
from assertions import same
from processes import python
from runs import take_step
from zoo import CASES

CASE = CASES["mlp"]


@contextmanager
def default(device: str | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def unchanged(work: Callable[..., Any], *args: Any) -> None:
    """Asserts that `work` comes to the same whatever the default device is."""
    found = []
    for device in (None, "meta"):
        with default(device):
            found.append(work(*args))
    same(found[1], found[0])


def halves(rank: int, stage: int) -> Any:
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
        model(torch.ones(5, 13, device=gpus.DEVICE)).sum().backward()
        found = zero.full_state_dict(model, to=None)
        optimizer.step()
    same(found, nn.Sequential(Waves(), Waves()).state_dict())


@matrix.only
def test_exports_and_plans_do_not_depend_on_the_default_device(tmp_path):
    model = CASE.model()
    zero.checkpoint.save(tmp_path / "run", model)
    with default("meta"):
        zero.checkpoint.export.export(tmp_path / "run", tmp_path / "exported")
    same(load_file(tmp_path / "exported" / "model.safetensors"), dict(model.state_dict()))
    inputs = CASE.batch(0, 0).inputs
    unchanged(lambda: zero.plan(model, world_size=2, batch=inputs, stages=[1, 2, 3]).table())


@pytest.mark.slow
def test_importing_zero_makes_no_tensor_on_the_default_device():
    """Tensors that are made with a module stay for the life of the process."""
    script = """import gc, torch
torch.set_default_device("meta")
import zero, zero.plan, zero.checkpoint
assert not [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.is_meta]"""
    python("-W", "ignore", "-c", script)
