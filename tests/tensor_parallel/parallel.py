"""A model that torch's tensor parallelism parallelises over one dimension of a mesh, and its training over another
beside one process with the whole batch."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import zero

OPTIMIZERS: dict[str, Any] = {
    "Adam": partial(torch.optim.Adam, lr=0.05),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """recomputes: activations of the blocks."""

    def __init__(self, *, tied: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 10, bias=False)
        self.recomputes = recomputes
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.out(self.norm(x))


def mesh_of(dp: int = 2, tp: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def parallel(model: Model, mesh: DeviceMesh, *, sequence: bool = False, loss: bool = False) -> Model:
    """Parallelises a model over the mesh. sequence: activations between the linear layers are cut along the tokens.
    loss: logits stay cut."""
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


def train(model: nn.Module, optim: torch.optim.Optimizer, rank: int | None) -> None:
    for tokens, targets in batches(rank, 2):
        loss_of(model(tokens), targets).backward()
        optim.step()
        optim.zero_grad()


def full(weights: dict[str, Any]) -> dict[str, Tensor]:
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights.items()}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)


class Beside:
    """`model` at a stage over the dimension "dp" of the mesh, and `plain`, which one process trains."""

    def __init__(self, stage: int, mesh: DeviceMesh, optim: str = "SGD", *, tied: bool = False, **how: bool) -> None:
        self.dp = mesh["dp"].get_local_rank()
        self.plain = Model(tied=tied)
        self.plain_optimizer = OPTIMIZERS[optim](self.plain.parameters())
        made = parallel(Model(tied=tied, recomputes=how.pop("recomputes", False)), mesh["tp"], **how)
        self.model, self.optimizer = zero.setup(made, OPTIMIZERS[optim], stage=stage, device_mesh=mesh["dp"])

    def backwards(self, number: int, *, sync: bool = True) -> None:
        """Of the batch with this number."""
        (tokens, targets), (x, y) = batches(self.dp)[number], batches(None)[number]
        with nullcontext() if sync else zero.no_sync(self.model):
            loss_of(self.model(tokens), targets).backward()
        loss_of(self.plain(x), y).backward()

    def clip(self, most: float, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
        """The norms."""
        found = clip_grad_norm_(self.model.parameters(), most, norm_type)
        return found, nn.utils.clip_grad_norm_(self.plain.parameters(), most, norm_type)

    def step(self) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def compare(self) -> dict[str, Tensor]:
        """The weights, whole."""
        weights: dict[str, Tensor] = zero.full_state_dict(self.model, to=None)
        close(weights, self.plain.state_dict())
        return weights
