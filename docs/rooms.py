"""Draws docs/rooms.svg: which room of zero imports which, read from the source (`python docs/rooms.py`).

The rooms and their order are those of the table in docs/how_it_is_built.md.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

HERE = Path(__file__).parent
ZERO = HERE.parent / "zero"
INK, GREY, BLUE = "#24292f", "#d8dee4", "#2f5d8c"


def rooms() -> dict[str, str]:
    """The room of each package and module, from the ground up. Several in one row of the table are one room."""
    cells = re.findall(r"^\| (`zero/[^|]+) \|", (HERE / "how_it_is_built.md").read_text(), re.MULTILINE)
    rows = [re.findall(r"`zero/(\w+)", cell) for cell in cells]
    return {name: row[0] if len(row) == 1 else "every stage" for row in rows for name in row}


def imported(path: Path) -> Iterator[str]:
    """The packages and modules of zero that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            full = (f"{package}{name.name}" for name in node.names)
            yield from (name.split(".")[1] for name in full if name.startswith("zero."))


def importing_files(room: dict[str, str]) -> Counter[tuple[str, str]]:
    """How many files of a room import another one: by both."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted(ZERO.rglob("*.py")):
        if path != ZERO / "__init__.py":
            own = room[path.relative_to(ZERO).with_suffix("").parts[0]]
            found.update((own, other) for other in {room[name] for name in imported(path)} - {own})
    return found


def draw(names: list[str], files: Counter[tuple[str, str]]) -> Figure:
    """A row and a column for each room, the ground at the bottom and on the left."""
    figure, top = Figure(figsize=(8, 5.4), layout="constrained", facecolor="white"), len(names) - 0.5
    axes = figure.subplots()
    axes.set(xlim=(-0.6, top + 2.5), ylim=(-0.6, top), xticks=[], frame_on=False)
    axes.set_yticks(range(len(names)), names, fontsize=11, color=INK)
    axes.tick_params(length=0)
    for step, name in enumerate(names):
        axes.plot([-0.5, step - 0.5, None, step, step], [step, step, None, step + 0.4, top], color=GREY, zorder=0)
        axes.text(step - 0.35, step, name, va="center", fontsize=11, fontweight="bold", color=INK)
    dots = sorted((names.index(other), names.index(own), number) for (own, other), number in files.items())
    axes.scatter([x for x, _, _ in dots], [y for _, y, _ in dots], s=240, color=BLUE)
    for x, y, number in dots:
        axes.text(x, y, str(number), ha="center", va="center_baseline", fontsize=9, color="white")
    told = f"Row oss, column shards: {files['oss', 'shards']} files of oss import shards."
    axes.text(top - 7, 1, f"{told}\nNo dot is right of the steps: all imports go down.", fontsize=10, color=INK)
    return figure


if __name__ == "__main__":
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "rooms", "font.sans-serif": ["DejaVu Sans"]}
    drawn = draw([*dict.fromkeys(rooms().values())], importing_files(rooms()))
    drawn.savefig(HERE / "rooms.svg", metadata={"Date": None, "Creator": None})
