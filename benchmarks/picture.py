"""Draws what the stages keep in memory: a stacked bar a stage, and a mark where the formula puts its top."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from choices import STAGES
from report import MIB, Row

INK, GREY = "#333333", "#777777"
BAR_WIDTH = 0.56
SEGMENTS = {
    "parameters": ("#2f5d8c", "white"),
    "gradients": ("#7fb2d9", INK),
    "optimizer state": ("#e3ab5f", INK),
    "transient: activations, buffers": ("#d9d9d9", INK),
}  # their colours and those of the numbers in them, from the bottom up


def draw(file: Path, rows: Sequence[Row], *, title: str, caption: str) -> None:
    figure = Figure(figsize=(8.4, 5.4), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots()
    axes.set_ylim(0, 1.1 * max(max(row.peak_bytes, row.predicted_peak_bytes) for row in rows) / MIB)
    draw_bars(axes, rows)
    draw_predictions(axes, rows)
    names = [f"stage {STAGES[row.stage].number}\n{STAGES[row.stage].name}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=11)
    axes.set_ylabel("MiB on the rank that needs most", color=INK)
    axes.tick_params(length=0, colors=INK)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, loc="left", color=INK, fontsize=13, pad=24)
    axes.text(0, 1.025, caption, transform=axes.transAxes, color=GREY, fontsize=9)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, labelcolor=INK, fontsize=9)
    figure.savefig(file, dpi=160)


def draw_bars(axes: Axes, rows: Sequence[Row]) -> None:
    floors = [0.0] * len(rows)
    columns = zip(*(split_peak(row) for row in rows), strict=True)
    for (label, (colour, ink)), heights in zip(SEGMENTS.items(), columns, strict=True):
        axes.bar(range(len(rows)), heights, BAR_WIDTH, bottom=floors, color=colour, label=label)
        for place, (floor, height) in enumerate(zip(floors, heights, strict=True)):
            if height > 0.04 * axes.get_ylim()[1]:  # else the number is taller than the segment
                axes.text(place, floor + height / 2, f"{height:.0f}", ha="center", va="center", color=ink, fontsize=9)
        floors = [floor + height for floor, height in zip(floors, heights, strict=True)]


def draw_predictions(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        peak, predicted = row.peak_bytes / MIB, row.predicted_peak_bytes / MIB
        edge = 0.6 * BAR_WIDTH
        line = axes.hlines(predicted, place - edge, place + edge, color=INK, linestyle=(0, (4, 2)))
        if place == 0:  # one entry in the legend for all
            line.set_label("predicted peak")
        above = max(peak, predicted) + 0.01 * axes.get_ylim()[1]
        axes.text(place, above, f"peak {peak:.0f}", ha="center", va="bottom", color=INK, fontweight="bold")


def split_peak(row: Row) -> tuple[float, float, float, float]:
    """MiB at rest of the three kinds, and what the peak of the step adds to them."""
    resident = (row.parameters_bytes, row.gradients_bytes, row.optimizer_bytes)
    parameters, gradients, optimizer = (size / MIB for size in resident)
    return parameters, gradients, optimizer, (row.peak_bytes - sum(resident)) / MIB
