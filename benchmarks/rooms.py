"""Draws the pictures of docs/how_it_is_built.md from the tables of that page, which its test compares with the code.

rooms   the rooms of zero: features and what else plugs into the core, with an arrow to the room of each seam
walks   the walks of a gradient and a parameter through the rooms of the core

    python benchmarks/rooms.py
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from picture import GREY, INK

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how_it_is_built.md"
PICTURES = ROOT / "docs" / "pictures"

CORE = {
    "fsdp": "stage 3",
    "sdp": "stage 2",
    "oss": "stage 1",
    "shards": "layout and shard groups",
    "comm": "transfers",
    "measure": "what optimizers need",
    "_torch": "private names of torch",
}
"""From the top down: each imports only what is below it."""
AROUND = ["checks", "state", "interop"]
USERS = ["integrations", "report", "plan", "checkpoint", "setup", "scripts", "wrappers"]
LAYER, BAR, OTHER, FEATURE = "#2f5d8c", "#e4e9f0", "#8a97a5", "#b0722f"
WALKS = {
    "A gradient at stage 2": "#c8553d",
    "A gradient at stage 3": "#c8553d",
    "A parameter from shard to full": "#3d8361",
}


def room(path: str) -> str:
    """Of a file below zero/."""
    return path.split("/")[1]


def section(title: str) -> str:
    return PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def walk(title: str) -> list[tuple[str, str]]:
    """Function and file of each row of a walk's table."""
    return re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)` \|", section(title), re.MULTILINE)


def plugs() -> Iterator[tuple[str, str, str]]:
    """Who plugs in, the room of the seam, and the seam."""
    for row in section("The seams").splitlines():
        cells = [cell.strip().strip("`") for cell in row.split("|")]
        if len(cells) == 8 and cells[2].endswith(".py"):
            for one in cells[6].split(", "):
                yield one, room(cells[2]), cells[1].removeprefix("a ")


def draw_rooms(file: Path) -> None:
    """Who plugs in stands above the core, in the order of the highest room that it plugs into."""
    found = [*plugs()]
    rooms = [*CORE]
    features = [path.parent.name for path in (ROOT / "zero" / "features").glob("*/__init__.py")]
    highest = {
        name: min([rooms.index(there) for one, there, _ in found if one == name], default=9) for name in features
    }
    columns = [*sorted(features, key=lambda name: (highest[name], name)), *AROUND]
    width = len(columns)
    figure = Figure(figsize=(14, 7.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots()
    top, step = 0.0, 1.0
    for number, (name, what) in enumerate(CORE.items()):
        y = top + number * step
        axes.add_patch(_box(-0.5, y - 0.4, width, 0.8, BAR))
        axes.text(-0.62, y - 0.1, name, ha="right", va="center", color=LAYER, fontsize=12, weight="bold")
        axes.text(-0.62, y + 0.2, what, ha="right", va="center", color=GREY, fontsize=8.5)
    for column, name in enumerate(columns):
        colour = OTHER if name in AROUND else FEATURE
        axes.add_patch(_box(column - 0.45, -2.0, 0.9, 0.62, colour))
        axes.text(column, -1.69, _in_lines(name), ha="center", va="center", color="white", fontsize=8)
        seams: dict[str, list[str]] = {}
        for one, there, seam in found:
            if one == name:
                seams.setdefault(there, []).append(seam)
        for there, names in seams.items():
            y = top + rooms.index(there) * step
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (column, y - 0.2), (column, -1.36), arrowprops=arrow, zorder=1)
            label = {"boxstyle": "square,pad=0.15", "facecolor": BAR, "edgecolor": "none"}
            text = ",\n".join(map(_in_lines, names))
            axes.text(column, y + 0.06, text, ha="center", va="center", color=INK, fontsize=7, bbox=label, zorder=3)
    axes.text(-0.62, -1.69, "zero/features", ha="right", va="center", color=FEATURE, fontsize=11, weight="bold")
    each = width / len(USERS)
    for number, name in enumerate(USERS):
        left = -0.5 + number * each
        axes.add_patch(_box(left + 0.06, -3.1, each - 0.12, 0.55, OTHER, alpha=0.3))
        axes.text(left + each / 2, -2.83, name, ha="center", va="center", color=INK, fontsize=10)
    axes.text(-0.62, -2.83, "use what is below", ha="right", va="center", color=GREY, fontsize=9)
    said = (
        "Blue: the core. A room imports only rooms below it. Grey: outside of the core, but not optional.\n"
        "An arrow leads from what plugs in to the room of the seam."
    )
    axes.text(-0.5, top + len(CORE) * step - 0.48, said, color=GREY, fontsize=9.5, va="top")
    axes.set_xlim(-2.6, width - 0.45)
    axes.set_ylim(top + len(CORE) * step + 0.1, -3.25)
    axes.axis("off")
    axes.set_title("zero/: the core, and what plugs into it", loc="left", color=INK, fontsize=14)
    figure.savefig(file, dpi=110)


def _in_lines(name: str) -> str:
    """A long name is broken before a capital or at the last underscore."""
    if len(name) < 10 and "_" not in name:
        return name
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "\n", "\n".join(name.rsplit("_", 1))).replace("_", " ")


def _box(left: float, top: float, width: float, height: float, colour: str, alpha: float = 1.0) -> FancyBboxPatch:
    style = "round,pad=0,rounding_size=0.08"
    return FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor=colour, edgecolor="none", alpha=alpha)


def draw_walks(file: Path) -> None:
    """A strip a walk: the steps from left to right, the rooms from the top down."""
    walks = {title: walk(title) for title in WALKS}
    figure = Figure(figsize=(9.4, 9.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle("The functions of the core that a gradient and a parameter go through", color=INK, fontsize=13)
    longest = max(map(len, walks.values()))
    for axes, (title, steps) in zip(figure.subplots(len(walks), 1), walks.items(), strict=True):
        draw_walk(axes, title, steps, longest)
    figure.savefig(file, dpi=100)


def _with_stage(name: str) -> str:
    return f"{CORE[name]}: {name}" if CORE[name].startswith("stage") else name


def draw_walk(axes: Axes, title: str, steps: Sequence[tuple[str, str]], longest: int) -> None:
    rows = [name for name in CORE if name not in ("measure", "_torch")]
    heights = [rows.index(room(path)) for _, path in steps]
    for height in range(len(rows)):
        axes.axhspan(height - 0.42, height + 0.42, color=LAYER, alpha=0.09, linewidth=0)
    axes.plot(heights, color=WALKS[title], linewidth=1.8, marker="o", markersize=6, clip_on=False)
    axes.set_yticks(range(len(rows)), [_with_stage(name) for name in rows], fontsize=10, color=INK)
    axes.set_xticks(range(len(steps)), [name for name, _ in steps], fontsize=8, color=INK, rotation=38, ha="right")
    axes.set_xlim(-0.7, longest - 0.3)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{title}: {len(steps)} functions", loc="left", color=INK, fontsize=11)


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    draw_rooms(PICTURES / "rooms.png")
    draw_walks(PICTURES / "walks.png")
