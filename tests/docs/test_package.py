"""The package as a whole: its version, its names, and other distributions that have its name."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

import zero
from zero._torch.namesakes import refuse_mixtures

ROOT = Path(__file__).parents[2]


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
