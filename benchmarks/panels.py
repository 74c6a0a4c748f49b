"""Draws what the variants take and hold: a row of bars a variant, a panel a figure."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from choices import STAGES
from comparison import Result
from picture import GREY, INK
from report import MIB

OURS, THEIRS = "#2f5d8c", "#c4c9ce"
GAP = 0.6
"""Between stages, in bars."""

MODELS = {"gpt": "GPT of 27M parameters", "tiny": "64 small layers"}

Figures = Callable[[Result], float]


def draw_peers(file: Path, found: Mapping[str, Sequence[Result]], *, caption: str) -> None:
    """On a white ground of its own, so that it reads on light and dark pages alike."""
    panels: list[tuple[str, Sequence[Result], Figures]] = []
    for task, results in found.items():
        model = MODELS.get(task, task)
        panels.append((f"{model}:\nCPU ms a step", results, lambda result: result.cpu_ms))
        panels.append((f"{model}:\nmemory of the process, MiB", results, lambda result: result.process_bytes / MIB))
    places = _places([result for results in found.values() for result in results])
    figure = Figure(figsize=(9.6, 1.5 + 0.23 * (max(places.values()) + 1)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    title = "CPU time and memory of a training step, zero beside others of the same stage (lower is better)"
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, results, figures) in zip(row, panels, strict=True):
        _draw_panel(axes, title, results, figures, places)
    row[0].set_yticks([*places.values()], [*places], fontsize=9)
    row[0].invert_yaxis()
    for label in row[0].get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("zero") else "normal")
    figure.supxlabel(textwrap.fill(caption, 120), color=GREY, fontsize=8)
    figure.savefig(file, dpi=160)


def _label(result: Result) -> str:
    """With the stage and the name that the README gives it."""
    if result.variant == "ddp":
        return "stage 0, DDP"
    number, _, kept = result.stage.partition(" ")
    name = next(stage.name for stage in STAGES.values() if str(stage.number) == number)
    return f"zero stage {number}, {name} {kept}".strip() if result.ours else result.title


def _places(results: Sequence[Result]) -> dict[str, float]:
    """Where the bar of each title goes, from the top down, with gaps between stages."""
    places: dict[str, float] = {}
    place, stage = -1.0, None
    for result in {_label(result): result for result in results}.values():
        place += 1 + (GAP if stage is not None and result.stage != stage else 0)
        places[_label(result)], stage = place, result.stage
    return places


def _draw_panel(
    axes: Axes, title: str, results: Sequence[Result], figures: Figures, places: Mapping[str, float]
) -> None:
    values = [figures(result) for result in results]
    colours = [OURS if result.ours else THEIRS for result in results]
    drawn = axes.barh([places[_label(result)] for result in results], values, 0.82, color=colours)
    axes.bar_label(drawn, fmt="%.0f", padding=2, color=INK, fontsize=9)
    axes.set_xlim(0, 1.22 * max(values, default=1.0))
    axes.set_title(title, loc="left", color=INK, fontsize=9)
    axes.tick_params(length=0, colors=INK)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.set_xticks([])
