"""The log of operations on one process group: it shows whether all ranks do the same, and whether a transfer failed.

Every rank appends each operation to a log: its channel, and the number of bytes that it moves. Some transports
compare every operation, where that costs nothing. Over the others ranks compare

    one operation    before its launch, if it follows the operations before it for the first time: in the first steps,
                     and after any change of the schedule; and the first of a forward that follows another forward
                     without a backward. ZERO_CHECK=each in the environment of any rank compares every operation.
    the log          at the end of a backward, and before stepped parameters are gathered (`Comm.agree`). No result that
                     the ranks disagree on is applied.

A rank that waits between comparisons may be told that another one is missing (`mark_broken`, by a watcher of link.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Thread
from typing import Any, NoReturn
from weakref import WeakSet

from zero.comm import settings
from zero.comm.store import RaisedText
from zero.comm.waiting import running_call, say_waiting

COMPARISON, SUM, BROADCAST, SCATTER, COLLECTION, GATHER, REDUCTION, NORM = range(8)
"""Channels that every process group has."""

TAIL = 256
"""Number of operations at the end of the log that ranks exchange if their logs differ."""

_REMEDY = (
    "Look for the first error on any rank. If there is none, the call is collective: call it on every rank, also to "
    "evaluate and to save; with fewer batches on one rank than on others take them from zero.join."
)

# Number of settled positions that are remembered. All are forgotten then: the schedule of the model keeps changing.
_MOST_SETTLED = 1 << 17


class Log:
    """The log of one process group in one process.

    digest: a digest of the operations since the ranks last compared their logs.
    comparisons: the number of times that they compared them.
    each: whether every operation is compared, and every forward is searched for writes (ZERO_CHECK=each): on all ranks
        if one says so, from their first operation on.
    raised: the text of an error that a rank has raised.
    broken: why nothing more can be sent, or None. After a failed transfer, no transfer that was in flight counts as
        complete, and every later operation raises with the first cause.
    at_failure: functions to call with the error message after a transfer has failed.
    inquire: called after a transfer has failed. It may wait a moment for the word on which rank is missing, and call
        mark_broken with it.
    """

    def __init__(self, rank: int, world: int, raised: RaisedText | None = None) -> None:
        self._rank, self._world, self.raised = rank, world, raised or RaisedText(None)
        self.digest, self.comparisons = 0, 0
        self.broken: str | None = None
        self.at_failure: list[Callable[[str], object]] = []
        self.inquire: Callable[[], object] = lambda: None
        # Of groups whose operations the device may wait for before those of this one.
        self._coupled: WeakSet[Log] = WeakSet()
        self.each = settings.check_each()
        # The position in the schedule: a digest of the operations since it began.
        self._position = 0
        # Whether ranks have agreed since the schedule began; whether they must compare the next operation.
        self._agreed, self._unsettled = True, False
        # Positions at which all ranks have compared their operations.
        self._settled: set[int] = set()
        self._channels: deque[int] = deque(maxlen=TAIL)
        self._length = 0
        # Buffers of transfers that failed or were in flight at a failure: these may still write into them.
        self._kept_alive: list[Any] = []
        self._names = [
            "a comparison of what the ranks were given",
            "a sum over the ranks",
            "a broadcast",
            "a scatter",
            "the collection of full tensors or state",
            "a gather",
            "a reduction",
            "the norm of all gradients",
        ]
        self._remedies: dict[int, str] = {}

    def channel(self, name: str, remedy: str = "") -> int:
        """Returns a new number for a kind of operation, `name` in errors. All ranks must call it in the same order.

        remedy: a sentence for the user, if ranks are out of step in operations that all have this remedy.
        """
        self._names.append(name)
        channel = len(self._names) - 1
        self._remedies[channel] = remedy
        return channel

    def name(self, channel: int) -> str:
        """Returns the name of a channel, for errors."""
        return self._names[channel] if channel < len(self._names) else f"operation number {channel}"

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
        """Appends an operation to the log that other ranks read while they wait, without its bytes."""
        self._channels.append(channel)
        self._length += 1

    def append(self, channel: int, nbytes: int, compare: Callable[[int], object]) -> None:
        """Appends an operation, before its launch. Collective if it is new here: then ranks compare it.

        compare: of the transport, compares this operation and the logs before it between ranks.
        Raises RuntimeError if an earlier transfer has failed.
        """
        if self.broken:
            self.refuse_if_broken()
        self._channels.append(channel)
        self._length += 1
        # Of integers: hash() is the same in all processes, unlike that of texts.
        self.digest = hash((self.digest, channel, nbytes))
        self._position = hash((self._position, channel, nbytes))
        if self.each or self._unsettled or self._position not in self._settled:
            self._unsettled = False
            compare(channel)
            if len(self._settled) == _MOST_SETTLED:
                self._settled.clear()
            self._settled.add(self._position)

    def clear(self) -> None:
        """Empties the log, after a comparison that found all logs to be the same."""
        self.digest, self._length = 0, 0
        self.comparisons += 1
        self._channels.clear()

    @property
    def history(self) -> tuple[int, list[int]]:
        """The number of operations since the last comparison, and the channels of the last TAIL of them."""
        return self._length, [*self._channels]

    @property
    def position(self) -> tuple[int, int]:
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

    def refuse_if_broken(self, buffers: object = None) -> None:
        """Raises RuntimeError if a transfer has failed. Then no transfer that was in flight counts as complete, and
        `buffers` are kept alive: such a transfer may still read them or write into them."""
        if self.broken:
            self._kept_alive.append(buffers)
            raise RuntimeError(f"{self._why_broken()} Initialise the process group again before going on.")

    def _why_broken(self) -> str:
        """With the call that runs here: another rank may have said why, which does not know it."""
        reason, call = self.raised.explained(self.broken or ""), running_call()
        return reason if call is None or call in reason else f"{reason} Rank {self._rank} has called {call}."

    def refuse_differing(self, channel: int, channels: Mapping[int, int]) -> None:
        """Raises RuntimeError if another rank's channel, in `channels` by rank, differs from this rank's `channel`."""
        differing = {rank: other for rank, other in channels.items() if other != channel}
        if differing:
            self.out_of_step({self._rank: channel, **differing})

    def out_of_step(self, channels: Mapping[int, int]) -> NoReturn:
        """Raises RuntimeError. channels: as in `differing`."""
        reason = self.raised.explained(self.differing(channels))
        self.mark_broken(reason)
        raise RuntimeError(reason)

    def differing(self, channels: Mapping[int, int]) -> str:
        """Returns an error for ranks that are out of step. channels: by rank, where they differ; empty if only the
        bytes of operations do."""
        difference = "their last operations moved different numbers of bytes"
        if channels:
            first, *others = channels
            operations = ", ".join(f"rank {rank} in {self.name(channels[rank])}" for rank in others)
            difference = f"rank {first} is in {self.name(channels[first])}, but {operations}"
        remedies = {self._remedies.get(channel, "") for channel in channels.values()}
        alike = remedies.pop() if len(remedies) == 1 else ""
        call = running_call()
        return (
            f"ranks are out of step: {difference}. Each of these is collective: call it on every rank, in the same "
            f"order, also to evaluate and to save. {f'Rank {self._rank} has called {call}. ' if call else ''}"
            f"{alike or 'With fewer batches on one rank than on others take them from zero.join.'}"
        )

    def missing(self, rank: int, how: str) -> str:
        """Returns an error for a rank without which this one cannot go on. how: such as "has stopped"."""
        operation = running_call() or (self.name(self._channels[-1]) if self._channels else "no operation")
        return f"rank {self._rank} failed in {operation}: rank {rank} of the group of {self._world} {how}. {_REMEDY}"

    def waits_for(self, missing: Collection[int], channel: int | None = None) -> None:
        """Says that this rank waits for others. channel: of its operation; by default the last one in the log."""
        last = self._channels[-1] if channel is None and self._channels else channel
        say_waiting(self._rank, missing, "an operation" if last is None else self.name(last))

    def mark_broken(self, reason: str) -> None:
        """Has every later operation raise with this reason, unless an earlier one is known."""
        if self.broken is None:
            self.broken = reason
            # All at once: an abort waits for all that the device runs, and that may wait for another group's ranks.
            coupled = [Thread(target=log.mark_broken, args=(reason,), daemon=True) for log in self._coupled]
            for thread in coupled:
                thread.start()
            for act in self.at_failure:
                act(reason)
            for thread in coupled:
                thread.join()

    def fail_with(self, other: Log) -> None:
        """Has a failure of either group be one of both."""
        if other is not self:
            self._coupled.add(other)
            other._coupled.add(self)

    def fail(self, channel: int | None, buffers: object, error: BaseException) -> None:
        """Records the failure of a transfer. Raises RuntimeError with a message for the user for an error of a backend
        or the system, and nothing for others, such as Ctrl-C."""
        self._kept_alive.append(buffers)
        if not self.broken:
            self.inquire()
        if not self.broken:  # else ranks are out of step, one is missing, or an earlier transfer failed
            operation = running_call() or ("a transfer" if channel is None else self.name(channel))
            self.mark_broken(
                f"rank {self._rank} failed in {operation}: another rank of the group of {self._world} has stopped, or "
                f"did not reach this operation. {_REMEDY} ({error})"
            )
        if isinstance(error, (RuntimeError, OSError)):
            raise RuntimeError(self._why_broken()) from error
