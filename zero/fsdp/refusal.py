"""How an FSDP raises on every rank what one rank alone has found."""

from __future__ import annotations

from typing import NoReturn

from zero.comm import Comm


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
