"""README.md and the pages under docs/, and their blocks of Python.

Where the line above a block is `<!-- after: NAME -->`, NAME of `documented.PREAMBLES` comes first, and the block sees
what it defines. `<!-- of: examples/NAME.py -->` says of which script a block is a part: that script is run.
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "index.md"})]


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, marker and source of each block that is run."""
    return (block for block in all_blocks(page) if not block[1].startswith("of: "))


def all_blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    text = page.read_text()
    for found in re.finditer(r"(?:^<!-- ([^\n]*) -->\n)?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, found.start(2)) + 1, found[1] or "", found[2]
