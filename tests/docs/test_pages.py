"""What the pages name is there. `make docs` looks after links."""

from __future__ import annotations

import re

from pages import PAGES, ROOT

import zero


def test_named_files_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:tests|benchmarks|docs|zero)/[\w/]*\w\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_all_rooms_are_named() -> None:
    rooms = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zero").iterdir() if path.suffix in ("", ".py")}
    rows = re.findall(r"^\| (`zero/[^|]+) \|", (ROOT / "docs" / "how_it_is_built.md").read_text(), re.MULTILINE)
    assert rooms - {"zero/__init__.py", "zero/__pycache__"} <= {*re.findall(r"`([\w/.]+)`", " ".join(rows))}


def test_the_reference_has_every_public_name() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").iterdir())
    for name in {*zero.__all__} - {"checkpoint"}:
        assert re.search(rf"^\.\. auto\w+:: (zero\.)?{name}$", text, re.MULTILINE), name
