"""Draws the pictures of measurements again, from their JSON; nothing is measured.

python benchmarks/redraw.py docs/measured/*.json
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from comparison import Result
from panels import draw_peers
from picture import draw
from report import Row


def redraw(file: Path) -> None:
    """Draws what stages.py or peers.py has written, into a file beside it."""
    content = json.loads(file.read_text())
    picture, subject = file.with_suffix(".png"), content["subject"]
    if "stages" in content:
        title = "Peak memory of a training step at each stage (lower is better)"
        draw(picture, [_read(Row, row) for row in content["stages"]], title=title, caption=subject)
        return
    found = {task: [_read(Result, result) for result in results] for task, results in content["tasks"].items()}
    draw_peers(picture, found, caption=subject)


def _read(kind: type[Any], content: dict[str, Any]) -> Any:
    """The properties of a result are in its JSON, too."""
    return kind(**{one.name: content[one.name] for one in fields(kind)})


if __name__ == "__main__":
    for given in sys.argv[1:]:
        redraw(Path(given))
