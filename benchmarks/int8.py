"""Trains the GPT of `make stages` with parameters and gradients as float32, bfloat16 and zero.Int8 on the wire.

Prints the loss of the last steps, that of batches which were not trained on, and the bytes sent a step, of each and as
a fraction of float32's. The stages train to the same bits as float32, so one of them stands for all.
"""

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam, Optimizer
from tqdm import tqdm

import zero
from gpt import Block, draw_batch, read_text
from launch import Rank, run_ranks
from measure import SEED, Settings, average_over_ranks, build_model

LAST, UNSEEN = 20, 50
"""Steps whose mean loss is shown, and batches of each rank that were not trained on."""

FLOAT32 = "stage 2, float32"
Wire = zero.Int8 | torch.dtype | None
WIRES: dict[str, tuple[int, Wire]] = {
    FLOAT32: (2, None),
    "stage 2, bfloat16": (2, torch.bfloat16),
    "stage 2, Int8": (2, zero.Int8()),
    "stage 3, Int8": (3, zero.Int8()),
}


def build(model: nn.Module, stage: int, wire: Wire) -> tuple[nn.Module, Optimizer]:
    if stage == 3:
        assert isinstance(wire, zero.Int8)
        precision = zero.MixedPrecision(param_wire=wire, reduce_dtype=wire)
        sharded = zero.FSDP(model, mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({Block}))
        return sharded, Adam(sharded.parameters(), lr=1e-3)
    optimizer = zero.OSS(model.parameters(), Adam, broadcast_fp16=wire or False, lr=1e-3)
    return zero.ShardedDDP(model, optimizer, reduce_fp16=wire or False), optimizer


def train(settings: Settings, name: str, rank: Rank) -> dict[str, Any]:
    def loss_of(step: int) -> torch.Tensor:
        tokens, targets = draw_batch(settings.text, seed=SEED, step=step, rank=rank.rank)
        loss: torch.Tensor = model(tokens.to(rank.device), targets.to(rank.device))
        return loss

    model, optimizer = build(build_model(settings, rank.device), *WIRES[name])
    losses, before = [], zero.traffic().total
    for step in range(settings.steps):
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        rank.tick()
    sent = (zero.traffic().total - before) // settings.steps
    with torch.no_grad():
        unseen = [loss_of(settings.steps + number) for number in range(UNSEEN)]
    return {
        "last": statistics.mean(average_over_ranks(losses[-LAST:], rank.world)),
        "unseen": statistics.mean(average_over_ranks(unseen, rank.world)),
        "sent": sent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each (default: %(default)s)")
    parser.add_argument("--world", type=int, default=2, help="ranks (default: %(default)s)")
    given = parser.parse_args()
    settings = Settings(given.steps, layers=6, width=384, optim="adam", text=read_text())
    with tqdm(total=len(WIRES) * given.steps, unit="step") as bar:
        found = {name: run_ranks(partial(train, settings, name), given.world, bar.update)[0] for name in WIRES}
    for name, figures in found.items():
        shares = "".join(f"{key} {value:>12.6g} {value / found[FLOAT32][key]:.4f}   " for key, value in figures.items())
        print(f"{name:20}{shares}")


if __name__ == "__main__":
    main()
