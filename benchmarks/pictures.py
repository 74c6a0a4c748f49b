"""Draws what contestants take and hold: a row of bars for each, a panel a figure."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from comparison import Figure, Result

INK, GREY, OURS, THEIRS = "#333333", "#777777", "#2f5d8c", "#c4c9ce"
COLOURS = ("#2f5d8c", "#7fb2d9", "#e3ab5f", "#d9d9d9")
GAP = 0.6
"""Between stages, in bars."""


@dataclass(frozen=True)
class Panel:
    """segments: the lengths of a bar's, by name. mark: where to put a dashed line."""

    heading: str
    segments: Mapping[str, Figure]
    mark: Figure | None = None


def draw(found: Mapping[str, Sequence[Result]], panels: Sequence[Panel], title: str, caption: str, file: Path) -> None:
    """The panels for each of what is found, by its name; the bars of a stage stand together. On a white ground, so that
    it reads on light and dark pages alike."""
    from matplotlib.figure import Figure  # not every machine has it

    stages = {one.title: one.stage for results in found.values() for one in results}
    order = [*dict.fromkeys(stages.values())]
    places = {title: place + GAP * order.index(stage) for place, (title, stage) in enumerate(stages.items())}
    figure = Figure((9.6, 1.7 + 0.23 * (max(places.values()) + 1)), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12)
    row = figure.subplots(1, len(found) * len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, panel) in zip(row, product(found, panels), strict=True):
        axes.set_title(f"{name}:\n{panel.heading}", loc="left", color=INK, fontsize=9)
        _draw(axes, panel, found[name], places)
    row[0].set_yticks([*places.values()], [*places], fontsize=9)
    row[0].invert_yaxis()
    for tick in row[0].get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text().startswith("zero") else "normal")
    figure.supxlabel(textwrap.fill(caption, 120), color=GREY, fontsize=8)
    figure.savefig(file, dpi=160)


def _draw(axes: Any, panel: Panel, results: Sequence[Result], places: Mapping[str, float]) -> None:
    at = [places[one.title] for one in results]
    bars = [[figure(one, {}) for figure in panel.segments.values()] for one in results]
    ends = [[0.0, *accumulate(bar)] for bar in bars]
    several = len(panel.segments) > 1
    for number, (name, lengths) in enumerate(zip(panel.segments, zip(*bars, strict=True), strict=True)):
        colours = [OURS if one.ours else THEIRS for one in results]
        look = {"color": COLOURS[number], "label": name} if several else {"color": colours}
        drawn = axes.barh(at, lengths, 0.82, left=[of[number] for of in ends], **look)
        if several:
            axes.bar_label(drawn, fmt="%.0f", label_type="center", color=INK if number else "white", fontsize=8)
    axes.bar_label(drawn, [f"{of[-1]:.0f}" for of in ends], padding=4, color=INK, fontsize=9, fontweight="bold")
    if several:
        axes.figure.legend(loc="outside right upper", frameon=False, labelcolor=INK, fontsize=9)
    marks = [panel.mark(one, {}) for one in results] if panel.mark else []
    for place, mark in zip(at, marks, strict=False):
        axes.vlines(mark, place - 0.5, place + 0.5, color=INK, linestyle=(0, (4, 2)))
    axes.set_xlim(0, 1.22 * max([of[-1] for of in ends] + marks))
    axes.tick_params(length=0, colors=INK)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.set_xticks([])
