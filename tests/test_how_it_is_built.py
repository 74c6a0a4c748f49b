"""docs/how_it_is_built.md is true: all rooms are named, and what its example adds works."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import ranks
import test_docs

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how_it_is_built.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_all_rooms_are_named() -> None:
    rooms = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zero").iterdir() if path.suffix in ("", ".py")}
    first_column = re.findall(r"^\| (`[^|]+) \|", section("The rooms"), re.MULTILINE)
    named = {name for cell in first_column for name in re.findall(r"`([\w/.]+)`", cell)}
    assert rooms - {"zero/__init__.py", "zero/__pycache__"} <= named


def counted(rank: int, world: int) -> Counter[str]:
    """What the feature of the page counts."""
    (source,) = re.findall(r"```python\n(.*?)```", section("To add a feature"), re.DOTALL)
    names = test_docs.model()
    exec(source.replace("print(unshards)", ""), names)
    counts: Counter[str] = names["unshards"]
    return counts


def test_the_feature_of_the_page_counts_unshards() -> None:
    expected = {"embedding.weight": 1, "blocks.0.norm.weight": 2, "blocks.1.norm.weight": 2}
    assert ranks.run(counted) == [expected, expected]
