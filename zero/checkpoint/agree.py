"""All ranks of a model, and what they send one another: values, and problems that every rank must raise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from zero.checkpoint.files import FileProblem
from zero.checkpoint.format import CheckpointError
from zero.comm import Comm

T = TypeVar("T")


class Ranks:
    """The ranks of the shard group and, where there are any, those that have other parts of the tensors (tensor
    parallelism), and the replicate group.

    rank, world: in the shard group, and among the ranks that have other parts. writes: whether this rank is in the
    first replica, which writes what all replicas hold. all: how many ranks there are. number: this rank's place among
    all, as `exchange` orders them; the first's is 0.
    """

    def __init__(self, shards: Comm, parts: Comm | None, replicas: Comm | None) -> None:
        self.comms = [comm for comm in (shards, parts, replicas) if comm is not None]
        self.writes = replicas is None or replicas.rank == 0
        self.all, self.number = 1, 0
        for comm in self.comms:
            if comm is not replicas:
                self.rank, self.world = self.number + self.all * comm.rank, self.all * comm.world
            self.all, self.number = self.all * comm.world, self.number + self.all * comm.rank
        self.first = self.number == 0

    def exchange(self, value: Any = None, problem: str | None = None) -> list[Any]:
        """Collective. The JSON values of all ranks, in order. Raises CheckpointError on all where any has a problem."""
        gathered: list[dict[str, Any]] = [{"value": value, "problem": problem}]
        for comm in self.comms:
            gathered = [one for text in comm.all_gather_text(json.dumps(gathered)) for one in json.loads(text)]
        problems = [(rank, one["problem"]) for rank, one in enumerate(gathered) if one["problem"] is not None]
        if problems:
            where = f" (on rank {', '.join(str(rank) for rank, _ in problems)})" if len(gathered) > 1 else ""
            raise CheckpointError(f"{problems[0][1]}{where}")
        return [one["value"] for one in gathered]

    def together(self, work: Callable[[], T], *, before: str = "", after: str = "") -> T:
        """Collective. What the work returned, once it has succeeded everywhere. before, after: added to the message."""
        result, problem = attempt(work)
        self.exchange(None, problem and f"{before}{problem}{after}")
        return result  # type: ignore[return-value]  # an error would have been raised

    def compare(self, what: str, lines: Sequence[str], problem: str | None = None, value: Any = None) -> list[Any]:
        """Collective. As `exchange`, but lines that differ from the first rank's are a problem, too."""
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


def attempt(work: Callable[[], T], *, writing: object = None) -> tuple[T | None, str | None]:
    """What the work returned, or an error message for the user. writing: where it writes; None if it reads."""
    try:
        return work(), None
    except (FileProblem, ValueError) as error:
        return None, f"{str(error).removesuffix('.')}."
    except OSError as error:
        reason = error.strerror or error
        if writing is None:
            return None, f"{error.filename or 'the checkpoint'} cannot be read ({reason})."
        return None, f"{error.filename or writing} could not be written ({reason}). Nothing was changed."
    except Exception as error:  # from the user's optimizer, modules or values: every rank must raise it
        what = "" if writing is None else f"{writing} could not be written: "
        return None, f"{what}{type(error).__name__}: {error}."
