"""Sphinx: README.md and the pages as they lie in the repository, and a reference made from docstrings."""

from __future__ import annotations

import inspect
import os
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from sphinx.pycode.parser import VariableCommentPicker

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # autodoc imports the zero of this folder

project = "zero"
release = re.findall(r'^__version__ = "(.*)"', (ROOT / "zero" / "__init__.py").read_text(), re.MULTILINE)[0]
extensions = ["myst_parser", "sphinx.ext.autodoc"]

# The source is the whole repository, so that a link leads to the same place here and in the repository.
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "benchmarks", "build", "docs/index.md", "tests", "zero"]

nitpicky = True
# Types in signatures. Those of other libraries would have to be downloaded; aliases and inner classes have no entry.
nitpick_ignore_regex = [("py:class", r"(?!zero\.\w+$).*")]

myst_heading_anchors = 4
default_role = "code"
highlight_language = "text"  # of blocks that name none, such as tables that a command prints
pygments_style = "default"  # lines of a diff are red and green, as in the dark one
pygments_dark_style = "github-dark"
autodoc_inherit_docstrings = False  # what overrides torch's without a word of its own is no entry
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"zero {release}"
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")  # search engines lead to one of the versions
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# As wide as the lines that the plan prints.
html_theme_options = {f"{theme}_css_variables": {"code-font-size": "0.75rem"} for theme in ("light", "dark")}
html_copy_source = False
html_show_copyright = False
templates_path = ["_templates"]
html_additional_pages = {"index": "index.html"}  # leads to README.html


def with_contents(app: Any, docname: str, source: list[str]) -> None:
    """README.md is the first page; what the sidebar lists is in index.md, which would be no page to read."""
    if docname == root_doc:
        source[0] += (ROOT / "docs" / "index.md").read_text()


def fields(app: Any, what: str, name: str, described: Any, options: Any, lines: list[str]) -> None:
    """As reStructuredText: `name: text` of parameters becomes a list, an indented paragraph a block of code."""
    try:
        known = {*inspect.signature(described).parameters}
    except (TypeError, ValueError):
        known = set()
    blocks: list[str] = []
    paragraphs = "\n".join(lines).strip("\n").split("\n\n")
    for code, some in groupby(paragraphs, key=lambda paragraph: paragraph.startswith("    ")):
        if code:
            blocks += [".. code-block:: python", *some]
        else:
            blocks += [as_restructured(paragraph, known) for paragraph in some]
    lines[:] = "\n\n".join(blocks).split("\n")


def as_restructured(paragraph: str, known: set[str]) -> str:
    # Outside of backticks a trailing underscore and asterisks mean something else.
    words = re.split(r"(`[^`]*`)", paragraph)
    words[::2] = [re.sub(r"(?<=\w)_(?!\w)|\*", r"\\\g<0>", text) for text in words[::2]]
    text = re.sub(r"docs/(\w+)\.md", r":doc:`/docs/\1`", "".join(words))

    def item(found: re.Match[str]) -> str:
        names = found[1].split(", ")
        return f"\n- {', '.join(f'``{name}``' for name in names)}: " if {*names} <= known else found[0]

    listed = re.sub(r"(?:^|(?<=[.;] )|(?<=\.\n))(\w+(?:, \w+)*): ", item, text, flags=re.MULTILINE)
    if listed == text:
        return text
    head, *items = listed.split("\n- ")
    return "\n\n".join([head.strip(), *("- " + " ".join(one.split()) for one in items)]).strip()


def setup(app: Any) -> None:
    # Overloads serve type checkers; the signature behind them names the options.
    VariableCommentPicker.is_overload = lambda *_: False
    app.connect("source-read", with_contents)
    app.connect("autodoc-process-docstring", fields)
