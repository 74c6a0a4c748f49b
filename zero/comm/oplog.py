"""The log of operations on one process group: it shows whether all ranks do the same.

Every rank appends each operation to a log: its channel, and the number of bytes that it moves. Some transports
compare every operation, where that costs nothing. Over the others ranks compare

    one operation    before its launch, if it follows the operations before it for the first time: in the first steps,
                     and after any change of the schedule; and the first of a forward that follows another forward
                     without a backward. ZERO_CHECK=each in the environment of any rank compares every operation.
    the log          at the end of a backward, and before a step (`Comm.agree`). No result that the ranks disagree on is
                     stepped.

A rank that waits between comparisons may be told that another one is missing (`Failure`, by the watchdog).
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, NoReturn
from weakref import WeakSet, ref

from zero.comm import forked
from zero.comm.store import RaisedText
from zero.comm.waiting import running_call, say_waiting

# ------------------------------------------------------------------------------------------------------------- channels
#
# The kinds of operations of a process group, each with a number, the channel, and a name for errors.


COMPARISON, SUM, BROADCAST, SCATTER, COLLECTION, GATHER, REDUCTION, AGREEMENT, READ, COUNT = range(10)
"""Channels that every process group has."""


READ_BY_ALL = (
    "Between steps ranks have a sharded tensor together: compute its number on every rank, and print it on one, as "
    "norm = float(param.grad.norm()); if rank == 0: print(norm)."
)
"""What to do for operations by which a sharded tensor is read."""

_PARTS = 1 << 24


def part_of(channel: int, position: int) -> int:
    """The number of an operation of one of several things of a channel, which is another for each."""
    return channel + (position + 1) * _PARTS


class Channels:
    """The channels of one process group, by number. own: this rank, of `ranks`: those of the job that the ranks of the
    group are, by which errors name them."""

    def __init__(self, own: int, ranks: Sequence[int]) -> None:
        self._own, self._ranks = own, ranks
        self._names = [
            "a comparison of what the ranks were given",
            "a sum over the ranks",
            "a broadcast",
            "a scatter",
            "the collection of full tensors or state",
            "a gather",
            "a reduction",
            "the collection of full tensors or state",  # of Together, within which tensors are collected
            "the reading of a sharded tensor, whose elements all ranks have together",
            "the count of ranks that have a batch, in zero.join",
        ]
        self._remedies = {READ: READ_BY_ALL}

    def add(self, name: str, remedy: str = "") -> int:
        """Returns a new number for a kind of operation, `name` in errors. All ranks must call it in the same order.

        remedy: a sentence for the user, if ranks are out of step in operations that all have this remedy.
        """
        self._names.append(name)
        channel = len(self._names) - 1
        self._remedies[channel] = remedy
        return channel

    def name(self, channel: int) -> str:
        """Returns the name of a channel, for errors."""
        channel = max(channel, ~channel)
        channel, part = channel % _PARTS, channel // _PARTS
        name = self._names[channel] if channel < len(self._names) else f"operation number {channel}"
        return f"{name}, its parameter {part - 1}" if part else name

    def differing(self, channels: Mapping[int, int]) -> str:
        """Returns this rank's error for ranks that are out of step. channels: by rank, where they differ; empty if only
        the bytes of operations do."""
        difference = "their last operations moved different numbers of bytes"
        if channels:
            new = {rank: ", before which it called other things" * (channel < 0) for rank, channel in channels.items()}
            first, *others = [(self._ranks[rank], f"in {self.name(channels[rank])}{new[rank]}") for rank in channels]
            operations = ", ".join(f"rank {rank} {where}" for rank, where in others)
            difference = f"rank {first[0]} is {first[1]}, but {operations}"
        remedies = {self._remedies.get(max(channel, ~channel) % _PARTS, "") for channel in channels.values()}
        # What one rank reads alone the others do not have: their operation has another remedy, or none.
        alike = READ_BY_ALL if READ_BY_ALL in remedies else remedies.pop() if len(remedies) == 1 else ""
        call = running_call()
        return (
            f"ranks are out of step: {difference}. Each of these is collective: call it on every rank, in the same "
            f"order, also to evaluate and to save. {f'Rank {self._own} has called {call}. ' if call else ''}"
            f"{alike or 'With fewer batches on one rank than on others take them from zero.join.'}"
        )


# ------------------------------------------------------------------------------------------------------------- failures
#
# Why nothing more can be sent in a process group, and who is told.


REMEDY = (
    "Look for the first error on any rank. If there is none, the call is collective: call it on every rank, also to "
    "evaluate and to save; with fewer batches on one rank than on others take them from zero.join."
)


OF_BACKENDS: tuple[type[BaseException], ...] = (RuntimeError, OSError)
"""Errors by which a backend of torch tells of other ranks."""


class Failure:
    """The failure of one process group, in one process, which is rank `own` of the job. After a failed transfer, no
    transfer that was in flight counts as complete, and every later operation raises with the first cause.

    broken: why nothing more can be sent, or None.
    raised: the text of an error that a rank has raised.
    others: the processes of the other ranks on this host.
    at_failure: functions to call with the error message after a transfer has failed.
    inquire: called after a transfer has failed. It may wait a moment for the word on which rank is missing, and call
        mark_broken with it.
    """

    def __init__(self, own: int, world: int, channels: Channels) -> None:
        self._own, self._world, self._channels, self.raised = own, world, channels, RaisedText()
        self.broken: str | None = None
        self.others: list[int] = []
        self._learned, self._is_fork = False, False
        self.at_failure: list[Callable[[str], object]] = []
        self.inquire: Callable[[], object] = lambda: None
        # Of groups whose operations the device may wait for before those of this one.
        self._coupled: WeakSet[Failure] = WeakSet()
        # Buffers of transfers that failed or were in flight at a failure: these may still write into them.
        self._kept_alive: list[Any] = []
        if world > 1:
            forked.failures.add(self)

    def refuse_if_broken(self, buffers: object = None) -> None:
        """Raises RuntimeError if a transfer has failed. Then no transfer that was in flight counts as complete, and
        `buffers` are kept alive: such a transfer may still read them or write into them."""
        if self.broken:
            self._kept_alive.append(buffers)
            again = "" if self._is_fork else " Initialise the process group again before going on."
            raise RuntimeError(f"{self._why()}{again}")

    def _why(self) -> str:
        """With the call that runs here: another rank may have said why, which does not know it."""
        reason, call = self.raised.explained(self.broken or ""), running_call()
        return reason if call is None or call in reason else f"{reason} Rank {self._own} has called {call}."

    def mark_broken(self, reason: str, *, by_another: bool = False) -> None:
        """Has every later operation raise with this reason, unless an earlier one is known. by_another: what another
        rank has done, which this one has learned."""
        if self.broken is None:
            # Before the threads: coupled groups mark one another, and would without end while neither is broken.
            self.broken = reason
            if by_another:
                self.learn()
            # All at once: an abort waits for all that the device runs, and that may wait for another group's ranks.
            coupled = [Thread(target=one.mark_broken, args=(reason,), daemon=True) for one in self._coupled]
            for thread in coupled:
                thread.start()
            for act in self.at_failure:
                act(reason)
            for thread in coupled:
                thread.join()

    def learn(self) -> None:
        """Notes that this rank raises what another has raised: its process ends after that one's, if it ends by it."""
        self._learned = True
        forked.after_any(self.others)

    def recover(self) -> None:
        """Ranks have found one another in step."""
        if self._learned:
            self._learned = False
            forked.as_it_comes()

    def end_in_fork(self) -> None:
        """Called in a process that was forked from a rank: what it sent would be taken for that rank's."""
        self._is_fork, self.raised.store = True, None
        self.at_failure.clear()
        self.broken = (
            f"process {os.getpid()} was forked from rank {self._own}, as workers of a DataLoader are, and cannot take "
            "part in operations between ranks. Compute by the model in the rank's own process, or give the worker a "
            "copy of the module that was made before it was wrapped."
        )

    def couple(self, other: Failure) -> None:
        """Has a failure of either group be one of both."""
        if other is not self:
            self._coupled.add(other)
            other._coupled.add(self)

    def of_transfer(
        self,
        channel: int | None,
        buffers: object,
        error: BaseException,
        of_others: tuple[type[BaseException], ...] = OF_BACKENDS,
    ) -> None:
        """Records the failure of a transfer. Raises RuntimeError with a message for the user for errors of the classes
        by which a backend, or the system, tells of other ranks; nothing for this rank's own, such as Ctrl-C."""
        self._kept_alive.append(buffers)
        if not self.broken:
            self.inquire()
        if not self.broken:  # else ranks are out of step, one is missing, or an earlier transfer failed
            operation = running_call() or ("a transfer" if channel is None else self._channels.name(channel))
            by_another = isinstance(error, of_others)
            why = f"rank {self._own} has raised {type(error).__name__} in {operation}. {text_of(error)}".rstrip()
            if by_another:
                why = (
                    f"rank {self._own} failed in {operation}: another rank of the group of {self._world} has stopped, "
                    f"or did not reach this operation. {REMEDY} ({error})"
                )
            self.mark_broken(why, by_another=by_another)
        if isinstance(error, of_others):
            raise RuntimeError(self._why()) from error


# -------------------------------------------------------------------------------------------------------------- the log


TAIL = 256
"""Number of operations at the end of the log that ranks exchange if their logs differ."""

# Number of settled positions that are remembered. All are forgotten then: the schedule of the model keeps changing.
_MOST_SETTLED = 1 << 17


class Log:
    """The log of one process group in one process.

    ranks: of the job, that those of the group are, and `own`, which this one is: errors name ranks by these.
    digest: a digest of the operations since the ranks last compared their logs.
    comparisons: the number of times that they compared them.
    each: whether every operation is compared (ZERO_CHECK=each): on all ranks if one says so, from their first
        operation on.
    channels: the kinds of its operations. failure: why nothing more can be sent.
    sections: the number of sections (together.py) that run, one within another; sections_entered: of those that ran
        within no other, so far.
    """

    def __init__(self, rank: int, world: int, ranks: Sequence[int] = ()) -> None:
        self._rank, self._world, self.ranks = rank, world, ranks or range(world)
        self.own = self.ranks[rank]
        self.channels = Channels(self.own, self.ranks)
        self.failure = Failure(self.own, world, self.channels)
        self.digest, self.comparisons = 0, 0
        self.sections, self.sections_entered = 0, 0
        self.each = False
        # The position in the schedule: a digest of the operations since it began.
        self._position = 0
        # Whether ranks have agreed since the schedule began; whether they must compare the next operation.
        self._agreed, self._unsettled = True, False
        # Positions at which all ranks have compared their operations.
        self._settled: set[int] = set()
        # The channels of the last operations since the ranks last compared, and the number of all.
        self._last: deque[int] = deque(maxlen=TAIL)
        self._length = 0

    def begin_schedule(self, *, together: bool = False) -> None:
        """Marks the start of a schedule that may have run before, such as a forward.

        together: all ranks begin it at the same point. If they have not agreed since such a schedule before, they
            compare its first operation.
        """
        self._position = 0
        if together:
            # Else a rank that begins a forward alone could send it to other ranks' backward, and Gloo ends a process
            # that receives more than it expects.
            # A forward after a backward is not compared: that backward has compared all. `append` clears _unsettled.
            self._unsettled, self._agreed = not self._agreed, False

    def end_schedule(self) -> None:
        """Marks the end of a schedule, where all ranks have compared their logs."""
        self._position = 0
        self._agreed = True

    def record(self, channel: int) -> None:
        """Appends an operation to the log that other ranks read while they wait, without its bytes. Raises RuntimeError
        if an earlier transfer has failed."""
        if self.failure.broken:
            self.failure.refuse_if_broken()
        self._last.append(channel)
        self._length += 1

    def append(self, channel: int, nbytes: int, compare: Callable[[int], object]) -> None:
        """Appends an operation, before its launch. Collective if it is new here: then ranks compare it.

        compare: of the transport, compares this operation and the logs before it between ranks.
        Raises RuntimeError if an earlier transfer has failed.
        """
        # Asked here, too: a call in each operation would take 0.3 microseconds in place of 0.05.
        if self.failure.broken:
            self.failure.refuse_if_broken()
        # Of integers: hash() is the same in all processes, unlike that of texts.
        self.digest = hash((self.digest, channel, nbytes))
        self._position = hash((self._position, channel, nbytes))
        compares = self.each or self._unsettled or self._position not in self._settled
        # Another number: ranks wait in vain where one compares what another has launched.
        self._last.append(~channel if compares else channel)
        self._length += 1
        if compares:
            self._unsettled = False
            compare(channel)
            if len(self._settled) == _MOST_SETTLED:
                self._settled.clear()
            self._settled.add(self._position)

    def clear(self) -> None:
        """Empties the log, after a comparison that found all logs to be the same."""
        self.digest, self._length = 0, 0
        self.comparisons += 1
        self.failure.raised.at = self.comparisons
        self.failure.recover()
        self._last.clear()

    @property
    def history(self) -> tuple[int, list[int]]:
        """The number of operations since the last comparison, and the channels of the last TAIL of them, inverted where
        ranks compare the operation."""
        return self._length, [*self._last]

    @property
    def position(self) -> Position:
        """The number of comparisons, and of operations since the last one. All ranks pass the same positions."""
        return self.comparisons, self._length

    def difference(self, histories: Mapping[int, tuple[int, Sequence[int]]]) -> dict[int, int]:
        """Returns the channels, by rank, of the first difference of histories (by rank) where they overlap, if any."""
        logs = {rank: dict(zip(range(n - len(log), n), log, strict=True)) for rank, (n, log) in histories.items()}
        first, *others = sorted(logs)
        differing = [i for rank in others for i in logs[first].keys() & logs[rank] if logs[first][i] != logs[rank][i]]
        if not differing:
            return {}
        i = min(differing)
        return {rank: log[i] for rank, log in sorted(logs.items()) if i in log}

    def refuse_differing(self, channel: int, channels: Mapping[int, int]) -> None:
        """Raises RuntimeError if another rank's channel, in `channels` by rank, differs from this rank's `channel`."""
        differing = {rank: other for rank, other in channels.items() if other != channel}
        if differing:
            self.out_of_step({self._rank: channel, **differing})

    def out_of_step(self, channels: Mapping[int, int]) -> NoReturn:
        """Raises RuntimeError. channels: as in `Channels.differing`."""
        difference = self.channels.differing(channels)
        reason = self.failure.raised.explained(difference)
        self.failure.mark_broken(reason, by_another=reason != difference and not self.failure.raised.is_own)
        raise RuntimeError(reason)

    def missing(self, rank: int, how: str) -> str:
        """Returns an error for a rank without which this one cannot go on. how: such as "has stopped"."""
        operation = running_call() or (self.channels.name(self._last[-1]) if self._last else "no operation")
        other = self.ranks[rank]
        return f"rank {self.own} failed in {operation}: rank {other} of the group of {self._world} {how}. {REMEDY}"

    def waits_for(self, missing: Collection[int], channel: int | None = None) -> None:
        """Says that this rank waits for others. channel: of its operation; by default the last one in the log."""
        last = self._last[-1] if channel is None and self._last else channel
        others = [self.ranks[one] for one in missing]
        say_waiting(self.own, others, "an operation" if last is None else self.channels.name(last))


# ------------------------------------------------------------------------------------------------ errors of other ranks
#
# What one rank raises, as the others raise it: of the same class, so that no `except` of the user's parts them.


_LONGEST = 1 << 16  # characters of a text: each rank gets that of every other

_TOLD = "told_to_ranks"


def text_of(error: BaseException) -> str:
    """The error's own text, as it can be sent: file names may be no UTF-8, compilers write for pages, and a class of
    the user's may fail to say anything."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its text is not known: {type(failure).__name__})"
    return text[:_LONGEST].encode(errors="backslashreplace").decode()


def described(error: BaseException, text: str) -> dict[str, Any]:
    """The error as it is sent: by the names of its classes, and with another text."""
    classes = [one for one in type(error).__mro__ if issubclass(one, Exception)]
    return {"classes": [[one.__module__, one.__qualname__] for one in classes], "text": text}


def rebuilt(error: dict[str, Any]) -> Exception:
    """Returns an error of the first of its classes that this process knows and that takes a text."""
    text = error["text"]
    for module, name in error["classes"][:-1]:  # the last is Exception, which says nothing
        found: Any = sys.modules.get(module)
        for attribute in name.split("."):
            found = getattr(found, attribute, None)
        if isinstance(found, type) and issubclass(found, Exception):
            with suppress(Exception):
                made = found(text)
                if any(text in str(one) for one in (made, *made.args)):
                    return made
        text = text if name in text else f"{name}: {text}"
    return RuntimeError(text)


def dumped(error: Exception, rank: int) -> str:
    """What a rank of the job that raises the error sends to the others."""
    return json.dumps(described(error, f"rank {rank} has raised {type(error).__name__}: {text_of(error)}"))


def loaded(sent: str) -> Exception:
    return rebuilt(json.loads(sent))


Position = tuple[int, int]
"""How far a rank has come: the number of comparisons, and of operations since the last one."""


class _Told(list[tuple["ref[Log]", int, Position]]):
    """Where an error was told. Copies of it, as one that another process gets, were told nowhere."""

    def __reduce__(self) -> Any:
        return _Told, ()


def mark_told(error: BaseException, logs: Sequence[Log]) -> None:
    """Notes that all ranks of these groups raise it, too, now."""
    vars(error)[_TOLD] = _Told((ref(log), log.sections_entered, log.position) for log in logs)


def is_told(error: BaseException, logs: Sequence[Log]) -> bool:
    """Returns whether all ranks of these groups were told of it, as long as it is on its way out of one call: the same
    object may be raised again in a later one."""
    told = {log(): (entered, at) for log, entered, at in vars(error).get(_TOLD, ())}
    for log in logs:
        entered, at = told.get(log, (None, None))
        if entered != log.sections_entered or not (log.sections or at == log.position):
            return False
    return True
