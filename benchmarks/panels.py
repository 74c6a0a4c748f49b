"""Draws what the variants take and hold: a row of bars a variant, a panel a figure."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from comparison import Result
from picture import GREY, INK
from report import MIB

OURS, THEIRS = "#2f5d8c", "#c4c9ce"
GAP = 0.6
"""Between stages, in bars."""


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
        panels.append((f"{task}: CPU ms a step", results, lambda result: result.cpu_ms))
        panels.append((f"{task}: process, MiB", results, lambda result: result.process_bytes / MIB))
    draw_panels(file, panels, caption=caption)


def draw_panels(file: Path, panels: Sequence[Panel], *, caption: str) -> None:
    """On a white ground of its own, so that it reads on light and dark pages alike."""
    places = _places([bar for _, bars, _ in panels for bar in bars])
    figure = Figure(figsize=(9, 1.0 + 0.23 * (max(places.values()) + 1)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, bars, length) in zip(row, panels, strict=True):
        _draw_panel(axes, title, bars, length, places)
    row[0].set_yticks([*places.values()], [*places], fontsize=9)
    row[0].invert_yaxis()
    for label in row[0].get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("zero") else "normal")
    figure.supxlabel(textwrap.fill(caption, 120), color=GREY, fontsize=8)
    figure.savefig(file, dpi=160)


def _places(results: Sequence[Bar]) -> dict[str, float]:
    """Where the bar of each title goes, from the top down, with gaps between stages."""
    places: dict[str, float] = {}
    place, stage = -1.0, None
    for result in {result.title: result for result in results}.values():
        place += 1 + (GAP if stage is not None and result.stage != stage else 0)
        places[result.title], stage = place, result.stage
    return places


def _draw_panel(
    axes: Axes, title: str, bars: Sequence[Bar], length: Callable[[Any], float], places: Mapping[str, float]
) -> None:
    values = [length(bar) for bar in bars]
    colours = [OURS if bar.ours else THEIRS for bar in bars]
    drawn = axes.barh([places[bar.title] for bar in bars], values, 0.82, color=colours)
    axes.bar_label(drawn, fmt="%.0f", padding=2, color=INK, fontsize=9)
    axes.set_xlim(0, 1.22 * max(values, default=1.0))
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.tick_params(length=0, colors=INK)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.set_xticks([])
