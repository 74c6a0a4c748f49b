"""What is logged by the logger `zero`: a line of each constructor at INFO, on the first rank of the group, and of each
operation on a unit or bucket at DEBUG, on every rank. Operations are profiler ranges, too.

`ZERO_LOG=info` or `debug` in the environment shows the lines where the program does not set up logging.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from zero._torch import profiler_range
from zero.comm import Comm

if TYPE_CHECKING:
    from zero.shards.shard_group import ShardGroup

logger = logging.getLogger("zero")


def show_as_asked() -> None:
    """Sets the logger to the level in ZERO_LOG, such as "info". Without ZERO_LOG the program sets it up."""
    level = logging.getLevelName(os.environ.get("ZERO_LOG", "").upper())
    if isinstance(level, int) and level != logging.NOTSET:
        logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
        logger.setLevel(level)


def announce(what: str, comm: Comm, groups: Sequence[ShardGroup], left_out: str = "", *, sharded: str) -> None:
    """Logs what was sharded. Constructors call it after their first collective operation.

    what: such as "OSS(Adam)". sharded: such as "optimizer state". left_out: parameters that are not sharded, and why.
    """
    if comm.rank or not logger.isEnabledFor(logging.INFO) or not groups:
        return  # the transport was chosen when ranks compared what they were given
    params = sum(len(group.params) for group in groups)
    full = sum(group.layout.numel * group.shard.element_size() for group in groups)
    mine = sum(group.shard.nbytes for group in groups)
    logger.info(
        "%s: %s of %d parameters over %d ranks, %s of %s of their bytes on rank %d, sent by %s; left out: %s",
        *(what, sharded, params, comm.world, f"{mine:,}", f"{full:,}", comm.rank),
        *(comm.transport_name(groups[0].full.device), left_out or "nothing"),
    )


def shown(act: str, label: str, rank: int) -> AbstractContextManager[Any]:
    """A context for an operation. act: such as "unshard". label: of the unit or bucket."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("rank %d: %s %s", rank, act, label)
    return profiler_range("zero::", act, " ", label)
