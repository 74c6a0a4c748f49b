"""README.md and the pages under docs/, and their blocks of Python.

Where the line above a block is `<!-- after: NAME -->`, NAME of `documented.PREAMBLES` comes first, and the block sees
what it defines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "index.md"})]


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, marker and source of each block."""
    text = page.read_text()
    for found in re.finditer(r"(?:^<!-- ([^\n]*) -->\n)?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, found.start(2)) + 1, found[1] or "", found[2]
