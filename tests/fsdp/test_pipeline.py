"""Pipeline parallelism by torch.distributed.pipelining over one dimension of a mesh, whose stages are sharded over the
other."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ranks
import zero
from matrix import WHOLE

MICRO_BATCHES = 4


class Syncs(PipelineStage):
    """Reduces gradients in the backward of the last micro-batch only."""

    def _unsynced(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else zero.no_sync(self.submod)

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        with self._unsynced(last=chunk == MICRO_BATCHES - 1):
            return super().forward_one_chunk(chunk, *args, **kwargs)

    def backward_maybe_with_nosync(self, kind: Any, arguments: Any, last_backward: bool = False) -> Any:
        with self._unsynced(last_backward):
            return super().backward_maybe_with_nosync(kind, arguments, last_backward)


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2)]


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("stage", [3, *([2] if WHOLE else [])])
@ranks.on(4, fresh=True)
def test_a_pipeline_of_sharded_stages_trains_as_one_process_does(rank, world, stage):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, pp = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    share = slice(4 * mesh["dp"].get_local_rank(), 4 * mesh["dp"].get_local_rank() + 4)
    plain = nn.Sequential(*layers())
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, targets in batches():
        nn.functional.mse_loss(plain(inputs), targets).backward()
        sgd.step()
        sgd.zero_grad()
    sent = []
    for kind in (PipelineStage, Syncs):
        part, optimizer = zero.setup(layers()[place], torch.optim.SGD, stage=stage, device_mesh=mesh["dp"], lr=0.1)
        before = zero.traffic()
        own = kind(part, place, 2, torch.device("cpu"), group=pp)
        loss = lambda x, y: nn.functional.mse_loss(x, y) / MICRO_BATCHES  # noqa: E731
        schedule = Schedule1F1B(own, MICRO_BATCHES, loss_fn=loss, scale_grads=False)
        for inputs, targets in batches():
            schedule.step(*([inputs[share]] if place == 0 else []), target=targets[share] if place else None)
            optimizer.step()
            optimizer.zero_grad()
        sent.append((zero.traffic() - before).total)
        for name, value in zero.full_state_dict(part, to=None).items():
            torch.testing.assert_close(value, plain[place].state_dict()[name], rtol=0, atol=2e-6)
    assert sent[1] < 0.8 * sent[0]
