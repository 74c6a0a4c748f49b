"""All ranks of a model, and what is raised on every one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zero.checkpoint.format import CheckpointError
from zero.comm import Comm
from zero.comm.together import alike


class Ranks:
    """The ranks of the shard group and, where there are any, those that have other parts of the tensors (tensor
    parallelism), and the replicate group.

    rank, world: in the shard group, and among the ranks that have other parts. writes: whether this rank is in the
    first replica, which writes what all replicas hold. all: how many ranks there are. number: this rank's place among
    all, as `gather` orders them; the first's is 0.
    """

    def __init__(self, comms: Sequence[Comm], parts: Comm | None) -> None:
        shards, *replicas = comms
        self.comms = [shards, *([] if parts is None else [parts]), *replicas]
        self.writes = all(comm.rank == 0 for comm in replicas)
        self.all, self.number = 1, 0
        for comm in self.comms:
            if comm not in replicas:
                self.rank, self.world = self.number + self.all * comm.rank, self.all * comm.world
            self.all, self.number = self.all * comm.world, self.number + self.all * comm.rank
        self.first = self.number == 0

    def gather(self, value: Any) -> list[Any]:
        """Collective. The JSON values of all ranks, in order."""
        gathered = [value]
        for comm in self.comms:
            gathered = [one for text in comm.all_gather_text(json.dumps(gathered)) for one in json.loads(text)]
        return gathered

    @contextmanager
    def together(
        self, what: str = "", *, writing: object = None, before: str = "", after: str = ""
    ) -> Iterator[list[str]]:
        """Collective. What is raised in this context is raised on every rank, as CheckpointError. So it is if the lines
        that are put into the list differ.

        what: the lines. writing: see `described`. before, after: added to the message."""
        try:
            with alike(self.comms, what) as lines:
                try:
                    yield lines
                except Exception as error:  # also from the user's optimizer, modules or values
                    raise ValueError(f"{before}{described(error, writing)}{after}") from None
        except ValueError as error:
            raise CheckpointError(str(error)) from None


def described(error: Exception, writing: object = None) -> str:
    """An error as a message for the user. writing: where it was written to; None if it was read."""
    if isinstance(error, ValueError):
        return f"{str(error).removesuffix('.')}."
    if writing is None:
        return f"{type(error).__name__}: {error}."
    file, reason = writing, f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        file, reason = error.filename or writing, str(error.strerror or error)
    return f"{file} could not be written ({reason}). Nothing was changed."
