"""What is optional: one folder a feature. A feature plugs into seams of the core, which knows none of them; a folder
that is deleted is missed by nothing but what it brings. Whoever asks for that is told which folder is missing."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from zero.comm import link
from zero.shards import home

NAMES = {
    "CPUOffload": "offload",
    "DiskOffload": "offload",
    "Int8": "int8",
    "fault_tolerant": "replicas",
    "join": "uneven",
    "step_in_backward": "step_in_backward",
}
"""The names in `zero` that features bring, each with its folder."""


def plug_in() -> dict[str, Any]:
    """Imports every feature that is there; each registers itself at the seams that it needs. Returns what `zero` is to
    have by name."""
    features = {name: import_module(f"{__name__}.{name}") for name in present()}
    for feature, (registry, refusals) in _REFUSALS.items():
        if feature not in features:
            registry.update(refusals)
    return {name: vars(features[feature])[name] for name, feature in NAMES.items() if feature in features}


def present() -> list[str]:
    """The features whose folders are there."""
    return [found.name for found in iter_modules(__path__)]


def missing(feature: str, what: str) -> str | None:
    """Returns the error message for what a feature brings if its folder is missing; else None."""
    return None if feature in present() else f"{what} is part of the feature zero/features/{feature}, which is missing."


def _refusal(feature: str, option: str, *nothing: Any, otherwise: Any = None) -> Callable[..., Any]:
    """A function that returns `otherwise` for values which ask for nothing, and raises ValueError for others."""

    def refuse(given: Any) -> Any:
        if given not in nothing:
            raise ValueError(missing(feature, f"{option}={given!r}"))
        return otherwise

    return refuse


_NO_HOME = _refusal("offload", "offload", None, False, otherwise=home.DEVICE)
_REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Callable[..., Any]]]] = {
    "offload": (home.homes, {"offload": _NO_HOME, "cpu_offload": _NO_HOME}),
    "host_memory": (link.settings, {"host_memory": _refusal("host_memory", "host_memory", None, "off")}),
}
"""By feature: a registry, and what stands there for its options if the folder is missing."""
