"""What is said of the package outside it: its version, and the README on a package index."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest

import zero
from processes import ROOT

SOURCE = "https://host.example/zero"


def test_there_is_one_version() -> None:
    told = subprocess.run([sys.executable, "setup.py", "-q", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.strip() == zero.__version__
    assert f"\nversion: {zero.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("source", [None, SOURCE])
def test_no_link_of_the_readme_is_relative_on_a_package_index(source: str | None) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = runpy.run_path(str(ROOT / "setup.py"))["long_description"](readme, source)
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert [link for link in links if "://" not in link] == []
    assert (f"{SOURCE}/blob/HEAD/docs/fsdp.md" in links) == (source is not None)
    assert "](" in readme and "Stage 3" in shown
