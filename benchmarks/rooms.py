"""Draws the pictures of docs/how_it_is_built.md: the folders of zero and what they import from one another, read from
the code, and the walks in the tables of that page.

    python benchmarks/rooms.py
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from picture import GREY, INK

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how_it_is_built.md"
PICTURES = ROOT / "docs" / "pictures"

LAYERS = ["fsdp", "sdp", "oss", "comm"]
ROOMS = ["integrations", "report", "plan", "checkpoint", "uneven", "setup", "scripts", *LAYERS, "measure", "_torch"]
"""From the top down. `zero/__init__.py` is left out: it names what users see."""
LAYER, OTHER = "#2f5d8c", "#8a97a5"
WALKS = {
    "A gradient at stage 2": "#c8553d",
    "A gradient at stage 3": "#c8553d",
    "A parameter from shard to full": "#3d8361",
}

Edges = Counter[tuple[str, str]]


def room(path: str) -> str:
    """Of a file below zero/, or of a dotted name below it."""
    return re.split(r"[./]", path)[1]


def imports() -> Edges:
    """How many import statements of one room name another."""
    edges: Edges = Counter()
    for path in sorted((ROOT / "zero").rglob("*.py")):
        here = room(path.relative_to(ROOT).as_posix())
        for name in imported(ast.parse(path.read_text())):
            there = room(name)
            if here != there and {here, there} <= {*ROOMS}:
                edges[here, there] += 1
    return edges


def imported(tree: ast.AST) -> Iterator[str]:
    """The names below zero that statements import from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "zero":
            yield from (f"zero.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero."):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("zero."))


def walk(title: str) -> list[tuple[str, str]]:
    """Function and file of each row of a walk's table."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)` \|", section, re.MULTILINE)


def draw_rooms(file: Path, edges: Edges) -> None:
    """Rooms on the diagonal. Right of a room is what it imports, above it who imports it."""
    figure = Figure(figsize=(9, 6.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots()
    for (here, there), count in edges.items():
        row, column = ROOMS.index(here), ROOMS.index(there)
        colour = LAYER if here in LAYERS else OTHER
        axes.plot([row, column], [row, row], color=colour, alpha=0.35, linewidth=1, zorder=1)
        arrow = {"arrowstyle": "-|>", "color": colour, "alpha": 0.35, "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (column, column - 0.32), (column, row), arrowprops=arrow, zorder=1)
        axes.scatter(column, row, s=90 + 12 * count, color="white", edgecolor=colour, linewidth=1, zorder=2)
        axes.text(column, row, str(count), ha="center", va="center", color=INK, fontsize=8, zorder=3)
    for place, name in enumerate(ROOMS):
        box = {"boxstyle": "round,pad=0.45", "facecolor": LAYER if name in LAYERS else OTHER, "edgecolor": "none"}
        axes.text(place, place, name, ha="center", va="center", color="white", fontsize=9.5, bbox=box, zorder=4)
    said = (
        "Imports go down only. A line leads right from a room and down to what it imports;\n"
        "the circle says by how many import statements. Blue: the three stages and what they send by."
    )
    axes.text(-0.6, len(ROOMS) - 0.6, said, color=GREY, fontsize=9, va="bottom")
    axes.set_xlim(-0.8, len(ROOMS) - 0.3)
    axes.set_ylim(len(ROOMS) - 0.4, -0.6)
    axes.axis("off")
    figure.savefig(file, dpi=120)


def draw_walks(file: Path) -> None:
    """A strip a walk: the steps from left to right, the rooms from the top down."""
    walks = {title: walk(title) for title in WALKS}
    figure = Figure(figsize=(9, 9.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    longest = max(map(len, walks.values()))
    for axes, (title, steps) in zip(figure.subplots(len(walks), 1), walks.items(), strict=True):
        draw_walk(axes, title, steps, longest)
    figure.savefig(file, dpi=100)


def draw_walk(axes: Axes, title: str, steps: Sequence[tuple[str, str]], longest: int) -> None:
    heights = [LAYERS.index(room(path)) for _, path in steps]
    for height in range(len(LAYERS)):
        axes.axhspan(height - 0.42, height + 0.42, color=LAYER, alpha=0.09, linewidth=0)
    axes.plot(heights, color=WALKS[title], linewidth=1.8, marker="o", markersize=6, clip_on=False)
    axes.set_yticks(range(len(LAYERS)), LAYERS, fontsize=10, color=INK)
    axes.set_xticks(range(len(steps)), [name for name, _ in steps], fontsize=8, color=INK, rotation=38, ha="right")
    axes.set_xlim(-0.7, longest - 0.3)
    axes.set_ylim(len(LAYERS) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{title}: {len(steps)} functions", loc="left", color=INK, fontsize=11)


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    draw_rooms(PICTURES / "rooms.png", imports())
    draw_walks(PICTURES / "walks.png")
