"""Training under torch.autocast, all of it or its forwards only: as DistributedDataParallel trains under the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gpus
import matrix
import ranks
import zero
from sidebyside import close

LOWER = torch.bfloat16


class Net(nn.Module):
    """Three units at stage 3, and a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.register_buffer("steps", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        self.steps.add_(1)
        return self.last(hidden)


def built(stage: int, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = Net().to(dtype)
    if stage == 0:  # which itself cannot broadcast under an autocast to another dtype of 16 bits
        model = DistributedDataParallel(net, init_sync=False, forward_sync_buffers=False)
        return model, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return zero.setup(net, torch.optim.SGD, stage=stage, lr=0.1, momentum=0.9)


def clip(model: nn.Module, optimizer: Any) -> None:
    if isinstance(optimizer, zero.OSS):
        optimizer.clip_grad_norm(1e3)
    elif isinstance(model, zero.FSDP):
        model.clip_grad_norm_(1e3)


def backwards(model: nn.Module, rank: int, step: int, order: str) -> None:
    generator = gpus.generator(10 * step + rank)
    dtype = next(model.parameters()).dtype
    batches = [torch.randn(4, 6, generator=generator).to(dtype) for _ in range(2)]
    with torch.no_grad():
        model(batches[0])
    if order == "in turn":
        for inputs in batches:
            model(inputs).float().square().mean().backward()
        return
    losses = [model(inputs).float().square().mean() for inputs in batches]
    if order == "together":
        losses = [losses[0] + losses[1]]
    for loss in losses:
        loss.backward()


def trained(rank: int, stage: int, dtype: torch.dtype, order: str) -> dict[str, Tensor]:
    with torch.autocast(gpus.DEVICE, LOWER):
        model, optimizer = built(stage, dtype)
    for step in range(3):
        with torch.autocast(gpus.DEVICE, LOWER):
            optimizer.zero_grad()
            backwards(model, rank, step, order)
            clip(model, optimizer)
            optimizer.step()
    with torch.autocast(gpus.DEVICE, LOWER):
        if isinstance(optimizer, zero.OSS):
            optimizer.consolidate_state_dict(to=None)
        return zero.full_state_dict(model)


@matrix.combined(
    "stage, order, dtype", [2, 3], ["in turn", "together", "after one another"], [torch.float32, torch.float16]
)
@ranks.on(2)
def test_training_is_that_of_ddp_under_the_same_autocast(rank, world, stage, dtype, order):
    # DistributedDataParallel itself reduces the first only of backwards after several forwards.
    expected = trained(rank, 0, dtype, "in turn" if order == "after one another" else order)
    found = trained(rank, stage, dtype, order)
    # In float16 it rounds sums of an averaged and a local gradient, where others add up averages.
    tolerance = 2e-3 if dtype == torch.float16 and order != "together" else 0.0
    assert [name for name in expected if not close(found[name], expected[name], tolerance)] == []
