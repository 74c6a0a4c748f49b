"""Muon beside AdamW at stage 3: how much a rank steps and holds beside the mean of all ranks, with matrices given to
ranks by what their steps cost and the rest cut to make memory equal, and with all parameters whole.

    python benchmarks/muon.py            # draws docs/measured/muon.svg
"""

import os
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.optim import AdamW, Muon

import zero

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from llama import Llama, matrices

HOW = {"all parameters whole": {"partition": "whole"}, "matrices whole, the rest cut": {}}
WORLDS, STEPS = (2, 4), 5


def measured(rank: int, world: int, port: int, how: str, answers: object) -> None:
    """Puts (rank, CPU seconds of a step, bytes of weights, gradients and state) into the queue."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = Llama(256, blocks=8, words=32_000)
    whole = matrices(model)
    rest = [param for name, param in model.named_parameters() if name not in whole]
    built = [Muon([*whole.values()], lr=1e-3), AdamW(rest, lr=1e-3)]
    model, optimizers = zero.setup(model, built, stage=3, **HOW[how])
    times = []
    for _ in range(STEPS):
        model(torch.randint(32_000, (1, 16))).square().mean().backward()
        dist.barrier()
        before = time.process_time()
        for optimizer in optimizers:
            optimizer.step()
        times.append(time.process_time() - before)
    held = zero.report(model, optimizers)
    answers.put((rank, sorted(times)[STEPS // 2], held.parameters + held.gradients + held.optimizer))
    dist.barrier()
    os._exit(0)


def run(world: int, how: str, port: int) -> tuple[list[float], list[int]]:
    context = get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=measured, args=(rank, world, port, how, answers)) for rank in range(world)]
    for one in ranks:
        one.start()
    found = sorted(answers.get() for _ in ranks)
    for one in ranks:
        one.join()
    return [seconds for _, seconds, _ in found], [held for _, _, held in found]


def draw(found: dict[tuple[int, str], tuple[list[float], list[int]]], file: Path) -> None:
    figure = Figure(figsize=(8.4, 3.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2)
    for axes, what, of_one in zip(panels, ("CPU ms of a step", "MiB held"), (0, 1), strict=True):
        for place, ((world, how), values) in enumerate(found.items()):
            scaled = [value * (1e3 if of_one == 0 else 2**-20) for value in values[of_one]]
            colour = "#7fb2d9" if how == "matrices whole, the rest cut" else "#d9d9d9"
            left = [place + 0.8 * (rank + 0.5) / world - 0.4 for rank in range(world)]
            axes.bar(left, scaled, 0.7 / world, color=colour, label=how if place < len(HOW) else None)
        axes.set_xticks([0.5, 2.5], [f"{world} ranks" for world in WORLDS])
        axes.set_title(what, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(file)


if __name__ == "__main__":
    found = {}
    for world in WORLDS:
        for number, how in enumerate(HOW):
            times, held = found[world, how] = run(world, how, 29700 + 10 * world + number)
            longest, largest = max(times) * world / sum(times), max(held) * world / sum(held)
            print(f"{world} ranks, {how}: longest step {longest:.3f} of the mean, most bytes {largest:.3f} of the mean")
    draw(found, Path(__file__).parents[1] / "docs" / "measured" / "muon.svg")
