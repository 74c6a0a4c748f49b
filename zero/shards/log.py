"""What is logged by the logger `zero`: a line of each constructor at INFO, on the first rank of the group, and of each
operation on a unit or bucket at DEBUG, on every rank. Operations are profiler ranges, too.

`ZERO_LOG=info` or `debug` in the environment shows the lines where the program does not set up logging.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("zero")


def show_as_asked() -> None:
    """Sets the logger to the level in ZERO_LOG, such as "info". Without ZERO_LOG the program sets it up."""
    level = logging.getLevelName(os.environ.get("ZERO_LOG", "").upper())
    if isinstance(level, int) and level != logging.NOTSET:
        logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
        logger.setLevel(level)
