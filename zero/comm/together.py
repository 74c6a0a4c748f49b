"""One way to raise: what one rank raises in a collective section is raised on every rank.

    step = Together(comms, "the step of an optimizer")

    with step:                       # whatever is raised in here, by zero, by torch or by a hook of the user's,
        ...
        step.agree()                 # is raised here on the ranks that have reached this line

A rank that raises says so before it does. Ranks that have come to `agree` by then raise an error of its class with its
text, and all of them are in step afterwards: the group can be used. Ranks that wait for it in another operation find
there that they are out of step; they read its text in the group's store (`RaisedText`), and the group is broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from zero._torch.tensors import with_values
from zero.comm.comm import Comm
from zero.comm.oplog import AGREEMENT, COMPARISON, dumped, is_told, loaded, mark_told

MOST_FLAGS, _PROBLEM = 1, 2
"""Flags that `agree` passes on; the other bit says that a rank has raised."""


class Together:
    """A context around what ranks do together. comms: the groups by which a rank reaches all others, one after another.
    name: of the section, in errors; or a channel that every group has, of a section that is entered again and again."""

    def __init__(self, comms: Sequence[Comm], name: str | int, remedy: str = "") -> None:
        self._groups = [(comm, name if isinstance(name, int) else comm.channel(name, remedy)) for comm in comms]
        self._logs = [comm.log for comm in comms]

    def __enter__(self) -> Together:
        for log in self._logs:
            if not log.sections:
                log.sections_entered += 1
            log.sections += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.tell(error)
        finally:
            for log in self._logs:
                log.sections -= 1

    def tell(self, error: BaseException) -> None:
        """Collective. Called before this rank raises the error, unless all ranks were told of it."""
        # Ctrl-C and SystemExit are not for the other ranks, which would have to be waited for.
        known = is_told(error, self._logs) or any(log.failure.broken for log in self._logs)
        if isinstance(error, Exception) and not known:
            log = max(self._logs, key=lambda log: len(log.ranks))  # one of this rank alone does not know its number
            raised = dumped(error, log.own)
            # Also where the error has ended a tracing, in which tensors have no values: the text is sent by some. Where
            # others are in another operation, they raise there.
            with with_values(), suppress(RuntimeError):
                for comm, _ in self._groups:
                    comm.connect()
                    comm.log.failure.raised.publish(str(loaded(raised)))
                self._exchange(_PROBLEM, raised)
            mark_told(error, self._logs)

    def agree(self, flags: int = 0) -> int:
        """Collective. Raises an error of the same class if any rank has raised one in the section, and RuntimeError if
        any is in another operation. Returns the flags, MOST_FLAGS at most, that any rank has."""
        flags, raised = self._exchange(flags, "")
        if not flags & _PROBLEM:
            return flags
        raise self._told(raised)

    def _told(self, raised: str) -> Exception:
        """Not in a variable of who raises it: its traceback keeps that frame, which would keep the user's model."""
        error = loaded(raised)
        mark_told(error, self._logs)
        for log in self._logs:
            log.failure.learn()
        return error

    def _exchange(self, flags: int, raised: str) -> tuple[int, str]:
        """raised: what this rank has raised, as it is sent. Returns the first that any rank has, with the flags."""
        for comm, channel in self._groups:
            flags = comm.agree(channel, flags=flags)
        if flags & _PROBLEM:
            for comm, _ in self._groups:
                raised = next(filter(None, comm.all_gather_text(raised)), "")  # another group may have the rank
        return flags, raised


@contextmanager
def together() -> Iterator[Together]:
    """Collective at its end, in the default group. What a rank raises in here, all raise: there, or where they call
    `agree` of what this yields, or come to the end of another one within."""
    with Together([Comm.default()], AGREEMENT) as step:
        yield step
        step.agree()


@contextmanager
def alike(comms: Sequence[Comm], what: str, channel: int = COMPARISON) -> Iterator[list[str]]:
    """Collective at its end: around what each rank does before anything is changed. What any rank raises in it all
    raise, an error of its class; and ValueError if the lines that ranks put into the list differ, `what` in its text.

    comms: as of `Together`."""
    lines, own = list[str](), None
    try:
        yield lines
    except Exception as error:
        own = error
    told = own
    try:
        for comm in comms:
            try:
                comm.compare(what, lines, told, channel)
            except Exception as error:
                if not is_told(error, [comm.log]):  # the comparison itself has failed
                    raise own or error from None
                told = error
        if told is not None:
            raise told if own is None or isinstance(own, ValueError) else own  # the first says which ranks have it
    finally:
        del own, told  # else this frame, which the traceback keeps, would keep them, and so the user's model
