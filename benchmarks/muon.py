"""Muon beside AdamW at stage 3: what each rank steps and holds, with all parameters whole, and with matrices whole by
what their steps cost and the rest cut to make memory equal. Draws docs/measured/muon.svg."""

import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.optim import AdamW, Muon

import zero
from launch import Launch, Rank

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from llama import Llama, matrices

HOW = {"all parameters whole": "whole", "matrices whole, the rest cut": "auto"}
WORLDS, STEPS = (2, 4), 9


def measured(partition: str, rank: Rank) -> tuple[float, float]:
    """CPU ms of a step, and MiB of weights, gradients and state."""
    model = Llama(256, blocks=8, words=32_000)
    whole = matrices(model)
    rest = [param for name, param in model.named_parameters() if name not in whole]
    built = [Muon([*whole.values()], lr=1e-3), AdamW(rest, lr=1e-3)]
    model, optimizers = zero.setup(model, built, stage=3, partition=partition)
    times = []
    for _ in range(STEPS):
        model(torch.randint(32_000, (1, 16))).square().mean().backward()
        dist.barrier()
        before = time.process_time()
        for optimizer in optimizers:
            optimizer.step()
        times.append(1e3 * (time.process_time() - before))
    return sorted(times)[STEPS // 2], zero.report(model, optimizers).resident / 2**20


if __name__ == "__main__":
    figure = Figure(figsize=(8.4, 3.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2)
    for place, (world, (how, partition)) in enumerate(product(WORLDS, HOW.items())):
        found = [*zip(*Launch(world)(partial(measured, partition)), strict=True)]
        steps, held = (max(values) * world / sum(values) for values in found)
        print(f"{world} ranks, {how}: longest step {steps:.3f} of the mean, most bytes {held:.3f} of the mean")
        left = [place + 0.8 * (rank + 0.5) / world - 0.4 for rank in range(world)]
        for axes, values in zip(panels, found, strict=True):
            axes.bar(
                left, values, 0.7 / world, color=("#d9d9d9", "#7fb2d9")[place % 2], label=how if place < 2 else None
            )
    for axes, what in zip(panels, ("CPU ms of a step", "MiB held"), strict=True):
        axes.set_xticks([0.5, 2.5], [f"{world} ranks" for world in WORLDS])
        axes.set_title(what, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(Path(__file__).parents[1] / "docs" / "measured" / "muon.svg")
