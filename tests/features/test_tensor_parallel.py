"""Models that torch's tensor parallelism has parallelised over one dimension of a mesh, sharded over another, beside
FSDP2 on the same mesh and one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zero
from tests import ranks

OPTIMIZERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 10, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parallel(model: Model, mesh: DeviceMesh, *, sequence: bool = False, loss: bool = False) -> Model:
    """Parallelises a model over the mesh. sequence: activations between the linear layers are cut along the tokens."""
    cut = [Shard(1)] if sequence else [Replicate()]
    tied = model.out.weight is model.embed.weight
    plan: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut[0])}
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=cut[0])
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=cut[0])
        if sequence:
            plan[f"blocks.{number}.norm"] = SequenceParallel(use_local_output=True)
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
    out = Shard(-1) if loss else Replicate()
    plan["out"] = ColwiseParallel(input_layouts=cut[0], output_layouts=out, use_local_output=not loss)
    parallelize_module(model, mesh, plan)
    if tied:
        model.out.weight = model.embed.weight
    return model


def batches(rank: int | None, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """The batches of one data parallel rank of two; of all with None."""
    torch.manual_seed(3)
    given = [(torch.randint(10, (4, 6)), torch.randint(10, (4, 6))) for _ in range(steps)]
    return given if rank is None else [(x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]) for x, y in given]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def full(weights: dict[str, Any]) -> dict[str, Tensor]:
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights.items()}


def alone(optimizer: str, *, clip: float | None = None, **how: Any) -> dict[str, Tensor]:
    model = Model(**how)
    optim = OPTIMIZERS[optimizer](model.parameters())
    for tokens, targets in batches(None):
        loss_of(model(tokens), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
        optim.zero_grad()
    return model.state_dict()


def wrapped(stage: int, model: nn.Module, mesh: DeviceMesh, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if stage == 3:
        fsdp = zero.FSDP(model, device_mesh=mesh["dp"])
        return fsdp, OPTIMIZERS[optimizer](fsdp.parameters())
    made: dict[str, Any] = {"Adam": {"optim": torch.optim.Adam, "lr": 0.05}}
    made["SGD"] = {"optim": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    oss = zero.OSS(model.parameters(), group=mesh["dp"].get_group(), **made[optimizer])
    return zero.ShardedDDP(model, oss), oss


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@ranks.on(4)
def test_trains_as_one_process_does(rank: int, world: int, stage: int, sequence: bool, optimizer: str) -> None:
    mesh = mesh_of()
    model, optim = wrapped(stage, parallel(Model(), mesh["tp"], sequence=sequence), mesh, optimizer)
    for tokens, targets in batches(mesh["dp"].get_local_rank()):
        loss_of(model(tokens), targets).backward()
        optim.step()
        optim.zero_grad()
    close(full(model.state_dict()), alone(optimizer))


def with_fsdp2(rank: int, optimizer: str, *, clip: float | None = None, **how: Any) -> dict[str, Tensor]:
    """The same by FSDP2 over tensor parallelism."""
    mesh = mesh_of()
    model = parallel(Model(), mesh["tp"], **how)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optim = OPTIMIZERS[optimizer](model.parameters())
    for tokens, targets in batches(mesh["dp"].get_local_rank()):
        train_one(model, tokens, targets, loss=how.get("loss", False)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
        optim.zero_grad()
    return full(model.state_dict())


def train_one(model: nn.Module, tokens: Tensor, targets: Tensor, *, loss: bool = False) -> Tensor:
    return loss_of(model(tokens), targets)
