"""What is optional: one folder a feature. A feature plugs into seams of the core, which knows none of them; a folder
that is deleted is missed by nothing but what it brings. Whoever asks for that is told which folder is missing."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from zero.comm import link
from zero.shards import home
from zero.shards.placement import Placement, optimizer_shardings

NAMES = {
    "CPUOffload": "offload",
    "DiskOffload": "offload",
    "Int8": "int8",
    "join": "uneven",
    "step_in_backward": "step_in_backward",
}
"""The names in `zero` that features bring, each with its folder."""


def plug_in() -> dict[str, Any]:
    """Imports every feature that is there; each registers itself at the seams that it needs. Returns what `zero` is to
    have by name."""
    features = {name: import_module(f"{__name__}.{name}") for name in present()}
    for feature, refuse in _REFUSALS.items():
        if feature not in features:
            refuse()
    return {name: vars(features[feature])[name] for name, feature in NAMES.items() if feature in features}


def present() -> list[str]:
    """The features whose folders are there."""
    return [found.name for found in iter_modules(__path__)]


def absent_names() -> list[str]:
    """Those of `NAMES` whose folders are missing."""
    there = {*present()}
    return [name for name, feature in NAMES.items() if feature not in there]


def missing(feature: str, what: str) -> str | None:
    """Returns the error message for what a feature brings if its folder is missing; else None."""
    return None if feature in present() else f"{what} is part of the feature zero/features/{feature}, which is missing."


# ------------------------------------------------------------------------------- options of features that are missing


def _refuse_homes() -> None:
    def refuse(given: Any) -> home.Home:
        if given in (None, False):
            return home.DEVICE
        raise ValueError(missing("offload", f"offload={given!r}"))

    home.homes.update(dict.fromkeys(["offload", "cpu_offload"], refuse))


def _refuse_placement() -> None:
    def refuse(given: Placement, strategy: str) -> Placement:
        raise ValueError(missing("two_levels", "optimizer_sharding='all'"))

    optimizer_shardings["all"] = refuse


def _refuse_setting() -> None:
    def refuse(given: Any) -> None:
        if given not in (None, "off"):
            raise ValueError(missing("host_memory", f"host_memory={given!r}"))

    link.settings["host_memory"] = refuse


_REFUSALS = {"offload": _refuse_homes, "two_levels": _refuse_placement, "host_memory": _refuse_setting}
"""By feature: has its options refused, with the name of the folder."""
