"""Warnings that point to the user's line."""

from __future__ import annotations

import sys
import warnings

# Packages whose frames may lie between a warning and the line of the user that brought it about.
_BETWEEN = {
    *("zero", "torch", "accelerate", "transformers", "lightning", "pytorch_lightning"),
    *("contextlib", "functools", "importlib"),
}


def warn_user(message: str) -> None:
    """Warns at the innermost line of the stack that is in none of the libraries in between.

    How many frames these have differs with the way in which they were called, so no `stacklevel` is right for all.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
