"""`python -m` in the process of the tests, for packages of zero that are commands."""

import runpy
import sys
from unittest import mock


def command(package: str, *arguments: object) -> object:
    """What the command exits with: 0 or None where all is well, a number, or a text for the terminal."""
    sys.modules.pop(f"{package}.__main__", None)
    with mock.patch.object(sys, "argv", [package, *map(str, arguments)]):
        try:
            runpy.run_module(package, run_name="__main__")
        except SystemExit as done:
            return done.code
    return 0
