"""All ranks of a model, and what they send one another: values, and problems that every rank must raise."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from zero.checkpoint.format import CheckpointError
from zero.comm import Comm


class Ranks:
    """The ranks of the shard group and, where there is one, of the replicate group.

    rank, world: in the shard group. first: whether this is the first of all ranks. writes: whether this rank is in the
    first replica, which writes what all replicas hold.
    """

    def __init__(self, comms: Sequence[Comm]) -> None:
        self.comms = list(comms)
        self.rank, self.world = comms[0].rank, comms[0].world
        self.writes = all(comm.rank == 0 for comm in comms[1:])
        self.first = self.rank == 0 and self.writes

    @property
    def all(self) -> int:
        """How many ranks there are."""
        return math.prod(comm.world for comm in self.comms)

    @property
    def number(self) -> int:
        """This rank's place among all, as `exchange` orders them."""
        number = 0
        for comm in reversed(self.comms):
            number = number * comm.world + comm.rank
        return number

    def exchange(self, value: Any = None, problem: str | None = None) -> list[Any]:
        """Collective. The JSON values of all ranks, the first rank's first.

        Raises CheckpointError on every rank where any has a problem.
        """
        gathered: list[dict[str, Any]] = [{"value": value, "problem": problem}]
        for comm in self.comms:
            gathered = [one for text in comm.all_gather_text(json.dumps(gathered)) for one in json.loads(text)]
        problems = [(rank, one["problem"]) for rank, one in enumerate(gathered) if one["problem"] is not None]
        if problems:
            where = f" (on rank {', '.join(str(rank) for rank, _ in problems)})" if len(gathered) > 1 else ""
            raise CheckpointError(f"{problems[0][1]}{where}")
        return [one["value"] for one in gathered]

    def compare(self, what: str, lines: Sequence[str], problem: str | None = None, value: Any = None) -> list[Any]:
        """Collective. The JSON values of all ranks, the first rank's first.

        Raises CheckpointError on every rank where any has a problem, or where lines differ from the first rank's.
        """
        digest = hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()
        gathered = self.exchange([digest, value], problem)
        if any(other != gathered[0][0] for other, _ in gathered):
            all_lines = self.exchange(list(lines))
            for rank, lines_of_rank in enumerate(all_lines):
                for expected, line in zip_longest(all_lines[0], lines_of_rank, fillvalue="nothing"):
                    if line != expected:
                        raise CheckpointError(
                            f"{what} differ between ranks: the first has {expected}, rank {rank} has {line}. "
                            "Save and load the same on every rank."
                        )
        return [value for _, value in gathered]
