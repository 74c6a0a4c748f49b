"""One way to raise: what one rank raises in a collective section is raised on every rank.

    step = Together(comms, "the step of an optimizer")

    with step:                       # whatever is raised in here, by zero, by torch or by a hook of the user's,
        ...
        step.agree()                 # is raised here on the ranks that have reached this line

A rank that raises says so before it does. Ranks that have come to `agree` by then raise its text, too, and all of them
are in step afterwards: the group can be used. Ranks that wait for it in another operation find there that they are out
of step; they read its text in the group's store (`RaisedText`), and the group is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from zero.comm.comm import Comm

_entered: list[Together] = []
"""The sections that are running: what one has told, those around it need not tell."""

MOST_FLAGS, _PROBLEM = 1, 2
"""Flags that `agree` passes on; the other bit says that a rank has raised."""


class Together:
    """A context around what ranks do together. comms: the groups by which a rank reaches all others, one after another.
    name: of the section, in errors; or a channel that every group has, of a section that is entered again and again."""

    def __init__(self, comms: Sequence[Comm], name: str | int, remedy: str = "") -> None:
        self._groups = [(comm, name if isinstance(name, int) else comm.channel(name, remedy)) for comm in comms]

    def __enter__(self) -> Together:
        _entered.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _entered.pop()
        if error is not None:
            self.tell(error)
            if not _entered:  # the same object may be raised again, in a later section
                vars(error).pop("raised_on_every_rank", None)

    def tell(self, error: BaseException) -> None:
        """Collective. Called before this rank raises the error, unless all ranks were told of it."""
        # Ctrl-C and SystemExit are not for the other ranks, which would have to be waited for.
        told = getattr(error, "raised_on_every_rank", False) or any(comm.log.failure.broken for comm, _ in self._groups)
        if isinstance(error, Exception) and not told:
            vars(error)["raised_on_every_rank"] = True
            rank = ", ".join(str(comm.rank) for comm, _ in self._groups)
            text = f"rank {rank} has raised {type(error).__name__}: {error}"
            for comm, _ in self._groups:
                comm.log.failure.raised.publish(text)
            with suppress(RuntimeError):  # the others are in another operation, and raise there
                self._agree(_PROBLEM, text)

    def agree(self, flags: int = 0) -> int:
        """Collective. Raises RuntimeError if any rank has raised in the section, or is in another operation. Returns
        the flags, MOST_FLAGS at most, that any rank has."""
        return self._agree(flags, "")

    def _agree(self, flags: int, text: str) -> int:
        for comm, channel in self._groups:
            flags = comm.agree(channel, flags=flags)
        if not flags & _PROBLEM:
            return flags
        for comm, _ in self._groups:
            texts = comm.all_gather_text(text)
            text = next(filter(None, texts))
            comm.log.failure.raised.withdraw()  # all have it, and are in step
        raise _raised_on_every_rank(text)


def _raised_on_every_rank(text: str) -> RuntimeError:
    """Not in a variable of who raises it, whose frame its traceback keeps: that would keep the user's model alive."""
    error = RuntimeError(text)
    vars(error)["raised_on_every_rank"] = True
    return error


def compare(comms: Sequence[Comm], what: str, lines: Sequence[str], problem: str | None) -> None:
    """Collective. Comm.compare over all ranks: where it raises on one, it does on all. comms: as of `Together`."""
    for comm in comms:
        try:
            comm.compare(what, lines, problem)
        except ValueError as error:
            problem = str(error)
    if problem is not None:
        raise ValueError(problem)


@contextmanager
def told_by_comparing(compare: Callable[[str], object]) -> Iterator[None]:
    """Around what a rank does before ranks compare what they were given: what it raises here is the others' problem
    there. compare: takes part in that comparison, with a problem."""
    try:
        yield
    except ValueError as error:
        compare(str(error))  # raises a ValueError, which says which ranks have the problem
        raise
    except Exception as error:
        with suppress(ValueError):
            compare(f"{type(error).__name__}: {error}")
        raise
