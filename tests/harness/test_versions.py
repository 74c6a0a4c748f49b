"""The versions of the package, and of torch; README.md and setup.cfg name the newest that was tried."""

import subprocess
import sys

import pytest
import torch

import zero
from processes import ROOT, python


def test_there_is_one_version():
    assert "\nversion = attr: zero.__version__\n" in (ROOT / "setup.cfg").read_text()
    assert f"\nversion: {zero.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(("version", "expected"), [("2.16.0.dev20261120+cpu", 1), ("2.100.1", 1), ("2.15.3+cu132", 0)])
def test_a_newer_torch_than_any_tested_is_warned_of_once(version, expected):
    code = f"import importlib, torch; torch.__version__ = {version!r}; import zero; importlib.reload(zero)"
    assert python("-W", "always", "-c", code).stderr.count(f"torch {version} is newer than 2.15") == expected


def test_the_running_torch_is_supported():
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def test_import_zero_imports_no_compiler():
    """It takes as long as torch itself, and whoever builds an optimizer of torch imports it anyway, later."""
    code = "import sys, zero; sys.exit({'torch._dynamo', 'torch.distributed.fsdp'} & {*sys.modules} or None)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # not forked where torch is imported already
