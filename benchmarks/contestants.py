"""What benchmarks/wires.py compares: a GPT computed in bfloat16 with float32 master weights, sharded by each or not."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW

import zero
from gpt import CONTEXT, GPT, Block
from launch import Rank


@dataclass(frozen=True)
class Settings:
    """world: ranks, of which one runs. bandwidth: GB/s that a rank receives. tokens: of this rank's batch.

    reduce_dtype: float32 or bfloat16, in which gradients are sent; at stage 2 they always have the model's 16 bits.
    """

    world: int
    bandwidth: float
    tokens: int
    layers: int
    width: int
    compile: bool
    reduce_dtype: str
    steps: int

    @property
    def words(self) -> int:
        return 16 * self.width

    def build(self, device: torch.device) -> GPT:
        torch.manual_seed(0)
        with torch.device(device):
            model = GPT(self.layers, self.width, tokens=self.words, tied=False)
        if self.compile:
            for number, block in enumerate(model.blocks):
                model.blocks[number] = torch.compile(block)
        return model

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(self.words, (self.tokens // CONTEXT, CONTEXT + 1), device=device)
        return drawn[:, :-1], drawn[:, 1:]


Trained = tuple[Callable[..., Tensor], torch.optim.Optimizer]


def adam(params: Any, device: torch.device) -> AdamW:
    """At a rate of 0, since what the fake group brings are not the ranks' gradients, and the weights would diverge."""
    return AdamW(params, lr=0.0, fused=device.type == "cuda")


def unsharded(settings: Settings, rank: Rank) -> Trained:
    model = settings.build(rank.device)

    def loss(*batch: Tensor) -> Tensor:
        with torch.autocast(rank.device.type, torch.bfloat16):
            return model(*batch)

    return loss, adam(model.parameters(), rank.device)


def fsdp1(settings: Settings, rank: Rank) -> Trained:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    model = settings.build(rank.device)
    precision = MixedPrecision(torch.bfloat16, getattr(torch, settings.reduce_dtype))
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        mixed_precision=precision,
        use_orig_params=True,
        device_id=rank.device,
    )
    return sharded, adam(sharded.parameters(), rank.device)


def fsdp2(settings: Settings, rank: Rank) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = settings.build(rank.device)
    mesh = init_device_mesh(rank.device.type, (rank.world,))
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, settings.reduce_dtype))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, adam(model.parameters(), rank.device)


def stage_3(settings: Settings, rank: Rank) -> Trained:
    precision = zero.MixedPrecision(torch.bfloat16, getattr(torch, settings.reduce_dtype))
    policy = ModuleWrapPolicy({Block})
    model = zero.FSDP(settings.build(rank.device), auto_wrap_policy=policy, mixed_precision=precision)
    return model, adam(model.parameters(), rank.device)


def stage_2(settings: Settings, rank: Rank) -> Trained:
    # Not `adam`, which zero would measure: by the CPU, where fused steps of torch 2.11 depend on the length.
    model, optim = settings.build(rank.device).bfloat16(), partial(AdamW, lr=0.0, fused=rank.device.type == "cuda")
    return zero.setup(model, optim, stage=2, partition="even", master_dtype=torch.float32)


CONTESTANTS = {
    "nothing sharded": unsharded,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "zero stage 3": stage_3,
    "zero stage 2": stage_2,
}
