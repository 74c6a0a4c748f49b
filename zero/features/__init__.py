"""What is optional: one folder a feature. A feature plugs into seams of the core, which knows none of them; a folder
that is deleted is missed by nothing but what it brings."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules


def plug_in() -> None:
    """Imports every feature that is there; each registers itself at the seams that it needs."""
    for found in iter_modules(__path__):
        import_module(f"{__name__}.{found.name}")
