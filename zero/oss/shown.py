"""What a step does to each unit and bucket, as it does it: to torch's profiler, and (ZERO_LOG=debug) in the log.

The log has it from every rank, so that where ranks differ can be read in their last lines.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from zero._torch import profiler_range

logger = logging.getLogger("zero")


def shown(act: str, label: str, rank: int) -> AbstractContextManager[Any]:
    """A context for what is done. act: such as "unshard". label: of the unit or bucket that it is done to."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("rank %d: %s %s", rank, act, label)
    return profiler_range(f"zero::{act} {label}")
