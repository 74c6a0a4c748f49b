"""torch's averages of weights at every stage: those of DistributedDataParallel, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import ranks
import zero
from assertions import same
from runs import take_step
from zoo import data

KINDS: dict[str, dict[str, Any]] = {
    "EMA": {"avg_fn": get_ema_avg_fn(0.9)},
    "EMA of many, with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "SWA": {},
}


def averaged(rank: int, stage: int, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """The averaged weights, and what they compute."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))
    average = AveragedModel(net, **KINDS[kind])
    model, optimizer = zero.setup(net, torch.optim.Adam, stage=stage, lr=0.1)
    if stage == 3:
        average.module = zero.FSDP(average.module)
    for step in range(3):
        take_step(optimizer, model(data(4, 5, rank=rank, step=step)).square().mean())
        average.update_parameters(net)
    with torch.no_grad():
        return zero.full_state_dict(average.module, to=None), average.eval()(torch.ones(2, 5))


@pytest.mark.parametrize("kind", KINDS)
@ranks.on(2)
def test_averages_are_those_of_ddp(rank, world, kind):
    expected, computed = averaged(rank, 0, kind)
    for stage in (1, 2, 3):
        found, output = averaged(rank, stage, kind)
        same(found, expected)
        assert rank or torch.equal(output, computed)  # a forward of FSDP has the buffers of rank 0
