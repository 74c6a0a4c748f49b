"""Draws what contestants take and hold: a row of bars for each, a panel a figure."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GREY, OURS, THEIRS = "#333333", "#777777", "#2f5d8c", "#c4c9ce"
COLOURS = ("#2f5d8c", "#7fb2d9", "#e3ab5f", "#d9d9d9")
GAP = 0.6
"""Between stages, in bars."""


@dataclass(frozen=True)
class Panel:
    """bars: the lengths of a bar's segments by its title. segments: their names. marks: where to put a dashed line."""

    heading: str
    bars: Mapping[str, Sequence[float]]
    segments: Sequence[str] = ()
    marks: Mapping[str, float] = field(default_factory=dict)


def draw_panels(file: Path, panels: Sequence[Panel], stages: Mapping[str, str], *, title: str, caption: str) -> None:
    """On a white ground, so that it reads on light and dark pages alike. stages: by the title of a bar; those of one
    stand together."""
    places = _places(stages)
    height = 1.7 + 0.23 * (max(places.values()) + 1)
    figure = Figure(figsize=(9.6, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        _draw(axes, panel, places)
    row[0].set_yticks([*places.values()], [*places], fontsize=9)
    row[0].invert_yaxis()
    for tick in row[0].get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text().startswith("zero") else "normal")
    if panels[0].segments:
        figure.legend(loc="outside right upper", frameon=False, labelcolor=INK, fontsize=9)
    figure.supxlabel(textwrap.fill(caption, 120), color=GREY, fontsize=8)
    figure.savefig(file, dpi=160)


def _draw(axes: Axes, panel: Panel, places: Mapping[str, float]) -> None:
    at = [places[title] for title in panel.bars]
    ends = [[0.0, *accumulate(bar)] for bar in panel.bars.values()]
    for number, lengths in enumerate(zip(*panel.bars.values(), strict=True)):
        colours = [OURS if title.startswith("zero") else THEIRS for title in panel.bars]
        look = {"color": COLOURS[number], "label": panel.segments[number]} if panel.segments else {"color": colours}
        drawn = axes.barh(at, lengths, 0.82, left=[of[number] for of in ends], **look)
        if panel.segments:
            axes.bar_label(drawn, fmt="%.0f", label_type="center", color=INK if number else "white", fontsize=8)
    axes.bar_label(drawn, [f"{of[-1]:.0f}" for of in ends], padding=4, color=INK, fontsize=9, fontweight="bold")
    for title, mark in panel.marks.items():
        axes.vlines(mark, places[title] - 0.5, places[title] + 0.5, color=INK, linestyle=(0, (4, 2)))
    longest = max([of[-1] for of in ends] + [*panel.marks.values()], default=0.0)
    axes.set_xlim(0, 1.22 * longest or 1.0)
    axes.set_title(panel.heading, loc="left", color=INK, fontsize=9)
    axes.tick_params(length=0, colors=INK)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.set_xticks([])


def _places(stages: Mapping[str, str]) -> dict[str, float]:
    """Where the bar of each title goes, from the top down, with gaps between stages."""
    places: dict[str, float] = {}
    place, before = -1.0, None
    for name, stage in stages.items():
        place += 1 + (GAP if before not in (None, stage) else 0)
        places[name], before = place, stage
    return places
