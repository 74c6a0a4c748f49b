"""What is said of a torch that nobody has tried yet."""

import importlib
import warnings

import pytest
import torch

import zero
from zero._torch import NEWEST_TESTED, warn_if_untested


@pytest.fixture
def imported_under(monkeypatch):
    """Imports zero twice under another version of torch; the warnings of that."""

    def imported(version):
        monkeypatch.setattr(torch, "__version__", version)
        warn_if_untested.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            importlib.reload(zero)
            importlib.reload(zero)
        return [str(one.message) for one in caught]

    yield imported
    monkeypatch.undo()
    importlib.reload(zero)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20261120+cpu", "2.100.1", "3.0.0a0+git1234567"])
def test_a_newer_torch_than_any_tested_is_warned_of_once(imported_under, version):
    [message] = imported_under(version)
    assert f"torch {version} is newer than 2.15" in message


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0", "2.15.3+cu132"])
def test_of_others_nothing_is_said(imported_under, version):
    assert not imported_under(version)


def test_the_running_torch_is_supported():
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    assert NEWEST_TESTED == (2, 15), "README.md and setup.cfg name it, too"
