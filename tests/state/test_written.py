"""Weights that are loaded between a forward and its backward count as written: the backward is refused on every rank,
in torch's words, as under DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD

import ranks
import zero
from ranks import refusal
from runs import take_step


class Net(nn.Module):
    """Has a parameter of one element, of which the second rank owns nothing, and buffers that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("factor", torch.ones(3))

    def forward(self, x: torch.Tensor, by: str = "all") -> torch.Tensor:
        return (x[:, :3] if by == "scale" else self.layers(x)) * self.scale * self.factor


WIDE = zero.MixedPrecision(torch.bfloat16)
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (0, {}),
    "1": (1, {}),
    "2": (2, {}),
    "2 masters": (2, {"master_dtype": torch.float32}),
    "2 offload": (2, {"offload": zero.CPUOffload(pin_memory=False)}),
    "3": (3, {}),
    "3 units": (3, {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential})}),
    "3 kept": (3, {"sharding_strategy": "SHARD_GRAD_OP"}),
    "3 masters": (3, {"mixed_precision": WIDE}),
    "3 offload": (3, {"offload": zero.CPUOffload(pin_memory=False)}),
}


def built(kind: str) -> tuple[nn.Module, Any]:
    stage, options = KINDS[kind]
    torch.manual_seed(0)
    inner = Net().bfloat16() if kind == "2 masters" else Net()
    if stage == 3:
        model = zero.FSDP(inner, **options)
        return model, SGD(model.parameters(), lr=0.1)
    return zero.setup(inner, SGD, lr=0.1, stage=stage, **options)


def by_checkpoint(model: nn.Module, optimizer: Any, rank: int, path: Path) -> None:
    zero.checkpoint.load(path, model, optimizer)


def by_checkpoint_of_weights(model: nn.Module, optimizer: Any, rank: int, path: Path) -> None:
    zero.checkpoint.load(path, model)


def on_every_rank(model: nn.Module, optimizer: Any, rank: int, path: Path) -> None:
    zero.load_full_state_dict(model, torch.load(path / "weights.pt", weights_only=True))


def from_rank_0(model: nn.Module, optimizer: Any, rank: int, path: Path) -> None:
    zero.load_full_state_dict(model, torch.load(path / "weights.pt", weights_only=True) if rank == 0 else None)


def by_torch(model: nn.Module, optimizer: Any, rank: int, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    weights = torch.load(path / "weights.pt", weights_only=True) if rank == 0 else {}
    set_model_state_dict(model, weights, options=options)


LOADS: list[Callable[..., None]] = [by_checkpoint, by_checkpoint_of_weights, on_every_rank, from_rank_0, by_torch]


@pytest.mark.parametrize("kind", KINDS)
@ranks.on(2, timeout=60)
def test_a_backward_of_what_was_computed_before_is_refused(rank, world, tmp_path, kind):
    model, optimizer = built(kind)
    inputs = torch.full((2, 6), rank + 1.0, dtype=next(model.parameters()).dtype)
    take_step(optimizer, model(inputs).float().square().mean())
    zero.checkpoint.save(tmp_path, model, optimizer)
    weights = zero.full_state_dict(model)
    if rank == 0:
        torch.save(weights, tmp_path / "weights.pt")
    torch.distributed.barrier()
    for load in LOADS:
        for by in ("all", "scale"):
            model, optimizer = built(kind)
            loss = model(inputs.clone().requires_grad_(), by).float().square().mean()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(model, optimizer, rank, tmp_path)
            told = refusal(loss.backward)
            assert told.startswith("RuntimeError") and "modified by an inplace operation" in told, (load, by, told)
