"""torch's averages of weights at every stage: those of DistributedDataParallel, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import ranks
import zero

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
        torch.manual_seed(2 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        average.update_parameters(net)
    weights = zero.full_state_dict(average.module, to=None)
    with torch.no_grad():
        return weights, average.eval()(torch.ones(2, 5))


@pytest.mark.parametrize("kind", KINDS)
@ranks.on(2)
def test_averages_are_those_of_ddp(rank, world, kind):
    expected, computed = averaged(rank, 0, kind)
    for stage in (1, 2, 3):
        found, output = averaged(rank, stage, kind)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert rank or torch.equal(output, computed)  # a forward of FSDP has the buffers of rank 0
