"""Profiler ranges and, with ZERO_LOG=debug, log lines for each operation on a unit or bucket, on every rank."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from zero._torch import profiler_range

logger = logging.getLogger("zero")


def shown(act: str, label: str, rank: int) -> AbstractContextManager[Any]:
    """A context for an operation. act: such as "unshard". label: of the unit or bucket."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("rank %d: %s %s", rank, act, label)
    return profiler_range(f"zero::{act} {label}")
