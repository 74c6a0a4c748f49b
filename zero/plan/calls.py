"""Whether a function that the user passed can be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def misfit(function: Callable[..., Any], *arguments: Any) -> str | None:
    """Why a function cannot be called with these arguments; None if it can, or if its signature is not known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return None
