"""What is said of the package: its version, the README on a package index, and what help() shows."""

from __future__ import annotations

import pydoc
import re
import runpy
import subprocess
import sys

import pytest
from torch import nn
from torch.optim import Optimizer

import zero
from processes import ROOT

SOURCE = "https://host.example/zero"


@pytest.mark.slow
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


@pytest.mark.parametrize("cls", [zero.OSS, zero.ShardedDDP, zero.FSDP])
def test_help_shows_only_what_the_page_of_the_api_has(cls: type) -> None:
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    _, *parts = re.split(r"^ \|  .+ (?:defined here|inherited from ([\w.]+)):$", text, flags=re.MULTILINE)
    own = [body for base, body in zip(parts[::2], parts[1::2], strict=True) if not str(base).startswith("torch.")]
    shown = {*re.findall(r"^ \|  ([a-zA-Z]\w*)", "".join(own), re.MULTILINE)}
    page = (ROOT / "docs" / "api.md").read_text()
    documented = {*re.findall(rf"^#### {cls.__name__}\.(\w+)$", page, re.MULTILINE)}
    assert documented <= shown
    assert shown - documented <= {*dir(Optimizer if cls is zero.OSS else nn.Module)}
