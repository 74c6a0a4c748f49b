"""How an FSDP raises on every rank what one rank alone has found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from zero.comm import Comm
from zero.shards.shard_group import MOVED, ShardGroup


class Refusal:
    """comm: the ranks that own shards."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._channel = comm.channel(
            "a refusal of FSDP, of parameters that were given other data or read outside of forward"
        )

    def raise_everywhere(self, problem: str) -> NoReturn:
        """Collective. Raises RuntimeError. Ranks that do not call it raise in their next operation."""
        try:
            self._comm.agree(self._channel)
        except RuntimeError as error:  # the other ranks were in another operation, and have now raised, too
            raise RuntimeError(problem) from error
        raise RuntimeError(problem)


def moved_problem(groups: Iterable[ShardGroup]) -> str | None:
    """Returns an error message if a parameter of these groups was moved, cast or given other data, else None. Takes
    0.1 ms for 258 parameters."""
    for group in groups:
        name = group.reclaim()
        if name is not None:
            return MOVED.format(name)
    return None
