"""Draws what the variants take and hold: a row of bars a variant, a panel a figure."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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


class Bar(Protocol):
    """What has a bar in each panel. stage: bars of different stages stand apart."""

    @property
    def title(self) -> str: ...

    @property
    def stage(self) -> str: ...

    @property
    def ours(self) -> bool: ...


Panel = tuple[str, Sequence[Any], Callable[[Any], float]]
"""The title, what has a bar, and the bar's length."""


def draw_peers(file: Path, found: Mapping[str, Sequence[Result]], *, caption: str) -> None:
    panels: list[Panel] = []
    for task, results in found.items():
        model = MODELS.get(task, task)
        panels.append((f"{model}:\nCPU ms a step", results, lambda result: result.cpu_ms))
        panels.append((f"{model}:\nmemory of the process, MiB", results, lambda result: result.process_bytes / MIB))
    title = "CPU time and memory of a training step, zero beside others of the same stage (lower is better)"
    draw_panels(file, panels, title=title, caption=caption, label=_label)


def draw_panels(
    file: Path,
    panels: Sequence[Panel],
    *,
    title: str,
    caption: str,
    label: Callable[[Any], str] = lambda bar: bar.title,
) -> None:
    """On a white ground of its own, so that it reads on light and dark pages alike. label: of what has a bar."""
    places = _places([bar for _, bars, _ in panels for bar in bars], label)
    figure = Figure(figsize=(9.6, 1.5 + 0.23 * (max(places.values()) + 1)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (heading, bars, length) in zip(row, panels, strict=True):
        _draw_panel(axes, heading, bars, length, [places[label(bar)] for bar in bars])
    row[0].set_yticks([*places.values()], [*places], fontsize=9)
    row[0].invert_yaxis()
    for tick in row[0].get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text().startswith("zero") else "normal")
    figure.supxlabel(textwrap.fill(caption, 120), color=GREY, fontsize=8)
    figure.savefig(file, dpi=160)


def _label(result: Result) -> str:
    """With the stage and the name that the README gives it."""
    if result.variant == "ddp":
        return "stage 0, DDP"
    number, _, kept = result.stage.partition(" ")
    name = next(stage.name for stage in STAGES.values() if str(stage.number) == number)
    return f"zero stage {number}, {name} {kept}".strip() if result.ours else result.title


def _places(results: Sequence[Bar], label: Callable[[Any], str]) -> dict[str, float]:
    """Where the bar of each title goes, from the top down, with gaps between stages."""
    places: dict[str, float] = {}
    place, stage = -1.0, None
    for name, result in {label(result): result for result in results}.items():
        place += 1 + (GAP if stage is not None and result.stage != stage else 0)
        places[name], stage = place, result.stage
    return places


def _draw_panel(
    axes: Axes, title: str, bars: Sequence[Bar], length: Callable[[Any], float], places: Sequence[float]
) -> None:
    values = [length(bar) for bar in bars]
    colours = [OURS if bar.ours else THEIRS for bar in bars]
    drawn = axes.barh(places, values, 0.82, color=colours)
    axes.bar_label(drawn, fmt="%.0f", padding=2, color=INK, fontsize=9)
    axes.set_xlim(0, 1.22 * max(values, default=1.0))
    axes.set_title(title, loc="left", color=INK, fontsize=9)
    axes.tick_params(length=0, colors=INK)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.set_xticks([])
