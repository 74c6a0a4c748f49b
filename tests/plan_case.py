"""One planned and measured training step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

import zero
from zero.plan import Cost, Options
from zero.plan.meter import Meter


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 192, layers: int = 4, words: int = 300) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten())


BATCH = (torch.zeros(4, 32, dtype=torch.int64),)
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9)}
MIXED = zero.MixedPrecision(param_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    stage: str
    world: int
    partition: Any = "auto"
    granularity: int | None = None
    precision: str = "float32"
    optim: str = "adam"


def expected(case: Case) -> Cost:
    with torch.device("meta"):
        model = Model()
    options = Options(
        partition=case.partition,
        granularity=case.granularity,
        precision=MIXED if case.precision == "mixed" else zero.MixedPrecision(),
    )
    plan = zero.plan(
        model,
        world_size=case.world,
        optimizer=OPTIMIZERS[case.optim],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        batch=BATCH,
        options=options,
    )
    return plan.cost(case.stage)


def measured(rank: int, world: int, case: Case) -> dict[str, int]:
    model, optim, mixed = Model(), OPTIMIZERS[case.optim], case.precision == "mixed"
    with Meter() as meter:
        trained: nn.Module
        optimizer: torch.optim.Optimizer
        if case.stage in ("0", "1", "2") and mixed:
            model = model.bfloat16()
        if case.stage.startswith("3"):
            trained = zero.FSDP(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                partition=case.partition,
                reshard_after_forward=case.stage == "3",
                mixed_precision=MIXED if mixed else None,
            )
            optimizer = optim(trained.parameters())
        else:
            sharding = {"partition": case.partition, "granularity": case.granularity}
            master = torch.float32 if mixed else None
            optimizer = optim(model.parameters())
            if case.stage != "0":
                optimizer = zero.OSS(model.named_parameters(), optim, master_dtype=master, **sharding)
            if case.stage == "2":
                trained = zero.ShardedDDP(model, optimizer)
            else:
                trained = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=case.stage == "1")
        del model
        for _ in range(2):
            trained(*BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
        meter.reset_peak()
        before = zero.traffic().total
        trained(*BATCH).backward()
        inner = optimizer.optim if isinstance(optimizer, zero.OSS) else optimizer
        params = [*trained.parameters()]
        stepped = [param for group in inner.param_groups for param in group["params"]]
        state = [value for kept in inner.state.values() for value in kept.values() if isinstance(value, Tensor)]
        standing = nbytes(params)
        masters = nbytes([*params, *stepped]) - standing
        gradients = nbytes(param.grad for param in [*params, *stepped] if param.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        return {
            "parameters": standing,
            "gradients": gradients,
            "optimizer": nbytes(state) + masters,
            "peak": meter.peak(),
            "sent": zero.traffic().total - before,
        }


def nbytes(tensors: Any) -> int:
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})
