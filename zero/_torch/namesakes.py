"""Three other distributions install a package `zero`, and pip lets the last one overwrite `zero/__init__.py`.

Beside that file they have no file in common with this package.
"""

import os
import sys
from pathlib import Path

from zero._torch.telling import warn_user

NAMESAKES = {"zero", "zeroapi", "libzero"}
_REMEDY = f"Run: pip uninstall progressive-zero {' '.join(sorted(NAMESAKES))}; then install progressive-zero again."


def refuse_mixtures() -> None:
    """Raises ImportError if `zero/__init__.py` is not this package's. Warns if files of another one lie around it."""
    if getattr(sys.modules["zero"], "__title__", None) != "progressive-zero":
        raise ImportError(
            "zero/__init__.py is missing, or that of another distribution: it was overwritten, or removed with it. "
            + _REMEDY
        )
    entries = os.listdir(Path(__file__).parents[2])
    installed = {name.partition("-")[0] for name in entries if name.endswith(".dist-info")}
    if found := sorted(NAMESAKES & installed):
        warn_user(
            f"{', '.join(found)} is installed in the same folder, also as a package named zero, which does not work "
            f"beside this one: removing either takes zero/__init__.py away. {_REMEDY}"
        )
