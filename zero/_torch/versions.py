"""Which versions of torch zero was tested with."""

from __future__ import annotations

import warnings
from functools import cache

import torch

NEWEST_TESTED = (2, 15)


@cache
def warn_if_untested() -> None:
    """Warns, once a process, where the running torch is of a newer minor version than any that was tested."""
    minor = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if minor > NEWEST_TESTED:
        tested = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(
            f"torch {torch.__version__} is newer than {tested}, the newest that this version of zero was tested with. "
            "Compare a few steps with DistributedDataParallel, and look for a newer zero.",
            stacklevel=2,
        )
