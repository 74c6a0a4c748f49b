"""What the pages name is there, and they are short. `make docs` looks after links."""

import ast
import os
import re
import sys
from types import ModuleType

import pytest
from pages import PAGES, ROOT, blocks

import zero
from zero._torch.namesakes import refuse_mixtures

WORDS, OF_A_PAGE = 15_000, 2_000
WIDTH = 88  # of code; wider, the site scrolls


def test_pages_are_short():
    words = {page.name: len(page.read_text().split()) for page in PAGES}
    assert max(words.values()) <= OF_A_PAGE and sum(words.values()) <= WORDS, words


def test_code_is_narrow():
    for page in PAGES:
        for line, _, source in blocks(page):
            wide = [text for text in source.splitlines() if len(text) > WIDTH]
            assert not wide, f"{page.name}:{line}: {wide}"


def test_named_files_exist():
    for page in PAGES:
        for name in re.findall(r"`((?:tests|benchmarks|docs|zero)/[\w/]*\w\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_all_rooms_are_named():
    rooms = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zero").iterdir() if path.suffix in ("", ".py")}
    rows = re.findall(r"^\| (`zero/[^|]+) \|", (ROOT / "docs" / "how_it_is_built.md").read_text(), re.MULTILINE)
    assert rooms - {"zero/__init__.py", "zero/__pycache__"} <= {*re.findall(r"`([\w/.]+)`", " ".join(rows))}


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").iterdir())
    for name in {*zero.__all__} - {"checkpoint"}:
        assert re.search(rf"^\.\. auto\w+:: (zero\.)?{name}$", text, re.MULTILINE), name


def texts() -> list[str]:
    found = []
    for path in (ROOT / "zero").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if isinstance(node, ast.JoinedStr | ast.Constant):
                text = "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in parts)
                found.append(re.sub(r"\{[^{}]*\}", "…", text))
    return found


def test_quoted_errors_are_those_of_the_source():
    """Each code span of a first column: the beginning of an error."""
    page = (ROOT / "docs" / "when_it_fails.md").read_text()
    table = page.partition("| error |")[2].partition("\n\n")[0]
    quoted = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)))
    raised = texts()
    assert len(quoted) >= 20
    for beginning in quoted:
        start = beginning.removesuffix(" …").removesuffix("…")
        assert any(text.startswith(start) for text in raised), beginning


# The package as a whole: its version, its names, and other distributions that have its name.


def test_the_citation_has_the_version():
    assert f"\nversion: {zero.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_dir_lists_the_public_names_alone():
    assert sorted(dir(zero)) == sorted([*zero.__all__, "__version__"])


def test_a_foreign_init_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "zero", ModuleType("zero"))
    with pytest.raises(ImportError, match="Run: pip uninstall progressive-zero libzero zero zeroapi;"):
        refuse_mixtures()


def test_a_namesake_beside_is_told(monkeypatch):
    entries = ["progressive_zero-0.1.0.dist-info", "zeroapi-1.0.1.dist-info", "zeroconf-1.0.dist-info", "libzero"]
    monkeypatch.setattr(os, "listdir", lambda folder: entries)
    with pytest.warns(UserWarning, match="^zeroapi is installed in the same folder"):
        refuse_mixtures()
