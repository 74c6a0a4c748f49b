"""Pipeline parallelism by torch.distributed.pipelining over one dimension of a mesh, whose stages are sharded over the
other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ranks
import zero


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2)]


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(3)]


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(4, fresh=True)
def test_a_pipeline_of_sharded_stages_trains_as_one_process_does(rank: int, world: int, stage: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, group = mesh["pp"].get_local_rank(), mesh["dp"].get_group()
    part, optimizer = zero.setup(layers()[place], torch.optim.SGD, stage=stage, process_group=group, lr=0.1)
    own = PipelineStage(part, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(own, 2, loss_fn=lambda x, y: nn.functional.mse_loss(x, y) / 2, scale_grads=False)
    plain = nn.Sequential(*layers())
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, targets in batches():
        share = slice(4 * mesh["dp"].get_local_rank(), 4 * mesh["dp"].get_local_rank() + 4)
        schedule.step(*([inputs[share]] if place == 0 else []), target=targets[share] if place else None)
        nn.functional.mse_loss(plain(inputs), targets).backward()
        for one in (optimizer, sgd):
            one.step()
            one.zero_grad()
    for name, value in zero.full_state_dict(part).items():
        torch.testing.assert_close(value, plain[place].state_dict()[name], rtol=0, atol=2e-6)
