"""What is logged by the logger `zero`: a line of each constructor at INFO, on the first rank of the group, and of each
operation on a unit or bucket at DEBUG, on every rank. Operations are profiler ranges, too.

Where the program does not set up logging, lines at INFO go to stderr. `ZERO_LOG=off` or `debug` in the environment says
otherwise.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("zero")


def show_as_asked() -> None:
    """Sets the logger to the level in ZERO_LOG, such as "debug", by default "info"; "off" leaves warnings."""
    asked = os.environ.get("ZERO_LOG", "").upper()
    level = logging.getLevelName({"": "INFO", "OFF": "WARNING"}.get(asked, asked))
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
    for before in [one for one in logger.handlers if one.name == "zero"]:  # of this module, imported again
        logger.removeHandler(before)
    handler = logging.StreamHandler()
    # A program that has handlers of its own gets each line by those.
    handler.addFilter(lambda _: not logging.root.handlers)
    handler.name = "zero"
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
