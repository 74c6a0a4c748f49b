"""Draws what a rank of 8 needs at each stage to train a GPT of 7 billion parameters, as `zero.plan` computes it.

    python docs/measured/memory_7b.py  # writes memory_7b.svg beside it

The command `python -m zero.plan --parameters 7B --world 8 --precision bf16` prints the same figures.
"""

from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

import zero
from zero.plan.gpt import LENGTH, batch_of, gpt_of
from zero.plan.result import Plan

NAMES = {0: "stage 0\nDDP", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
COLOURS = {"parameters": "#2f5d8c", "gradients": "#7fb2d9", "optimizer": "#e3ab5f", "transient": "#bdbdbd"}
LABELS = {"optimizer": "optimizer state, masters", "transient": "activations, buffers, temporaries"}


def draw(plan: Plan, file: Path) -> None:
    figure = Figure(figsize=(5.4, 3.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    costs = [plan.cost(stage) for stage in NAMES]
    left = [0.0] * len(costs)
    for kind, colour in COLOURS.items():
        sizes = [getattr(cost, kind) / 2**30 for cost in costs]
        axes.barh([*NAMES.values()], sizes, 0.62, left=left, color=colour, label=LABELS.get(kind, kind))
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for place, cost in enumerate(costs):
        axes.text(left[place] + 2, place, f"{cost.peak / 2**30:.0f} GiB", va="center", fontweight="bold")
    axes.axvline(80, color="#333333", linestyle=(0, (4, 3)), linewidth=1)
    axes.text(81, -0.62, "a GPU of 80 GiB", fontsize=9, va="center")
    axes.set(xlim=(0, 1.12 * max(left)), ylim=(3.5, -0.8), xlabel="GiB on each of 8 GPUs, at the peak of a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    with rc_context({"svg.hashsalt": "zero"}):  # the same bytes each time
        figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    made = zero.plan(
        gpt_of(7e9, None, torch.float32),
        world_size=8,
        optimizer=torch.optim.AdamW,
        precision=zero.MixedPrecision(param_dtype=torch.bfloat16),
        batch=batch_of(LENGTH),
        stages=[*NAMES],
    )
    draw(made, Path(__file__).with_suffix(".svg"))
    print(made.table())
