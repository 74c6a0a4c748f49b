"""Versions of other libraries that are too old for the integrations."""

import configparser
import importlib
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import pytest

from zero.integrations.oldest import OLDEST

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("library", OLDEST)
@pytest.mark.parametrize(("found", "told"), [("0.9.1", "0.9.1"), (PackageNotFoundError, "none")])
def test_importing_an_integration_says_which_version_it_needs(library, found, told):
    name = f"zero.integrations.{library}"
    with mock.patch.dict(sys.modules), mock.patch("zero.integrations.oldest.version", side_effect=[found]):
        for module in [module for module in sys.modules if module.startswith(name)]:
            del sys.modules[module]
        with pytest.raises(ImportError, match=f"needs {library} {OLDEST[library]} or newer, and {told} is installed"):
            importlib.import_module(name)


def test_the_extras_ask_for_the_same_versions():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    asked = {line for name in OLDEST for line in extras[name].split() if line != "safetensors"}
    assert asked == {f"{library}>={version}" for library, version in OLDEST.items()}
    page = " ".join((ROOT / "docs" / "integrations.md").read_text().lower().split())
    assert all(f"{library} {version}" in page for library, version in OLDEST.items())
