"""The order of operations on one process group: whether all ranks do the same, and whether the group can still be used.

Every rank appends each operation to a log: which one it is, and how many bytes it moves. Over host memory each is
compared between ranks, because that costs nothing there. Elsewhere ranks compare

    one operation    before it is launched, where it follows the operations before it for the first time: in the first
                     steps, and after anything has changed. ZERO_CHECK=each in the environment compares every one.
    the whole log    wherever the stages agree: at the end of a backward, and before parameters that were stepped are
                     gathered. What ranks disagree on is never applied.

A rank that waits long meanwhile says what for, and reads what the others wait for (watch.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero.comm.handle import Handle
from zero.comm.settings import compares_each

COMPARISON, SUM, BROADCAST, COLLECTION, GATHER, REDUCTION = range(6)
"""Operations that every process group knows."""

TAIL = 256
"""Operations of the log that ranks show one another where their logs differ."""

_SETTLED = 1 << 17
"""Places in schedules that are remembered. A model whose schedule changes all the time begins anew then."""


class Order:
    """One a process group and process.

    queue: the transfers in flight that are to be completed in the order in which they were launched.
    digest: of the operations since the ranks last compared their logs.
    comparisons: how often they did.
    broken: why nothing more can be sent. A transfer that failed breaks the order: nothing that was in flight counts as
        arrived, and whatever is asked for afterwards raises with the first cause.
    at_failure: called with what is to be said of a transfer that has failed.
    absent: called after a failure. Returns which ranks did not come, in words for the user, if that is known.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self.queue: list[Handle] = []
        self.digest, self.comparisons = 0, 0
        self.broken: str | None = None
        self.at_failure: list[Callable[[str], object]] = []
        self.absent: Callable[[], str] = lambda: ""
        self._each = compares_each()
        self._place = 0
        """In the schedule: a digest of the operations since it began."""
        self._settled: set[int] = set()
        """Places at which all ranks were seen together."""
        self._log: deque[int] = deque(maxlen=TAIL)
        self._length = 0
        self._stranded: list[Any] = []
        """Buffers of transfers that failed, or were in flight then, into which messages may still be written."""
        self._names = [
            "a comparison of what the ranks were given",
            "a sum over the ranks",
            "a broadcast",
            "a collection",
            "a gather",
            "a reduction",
        ]

    def channel(self, name: str) -> int:
        """A number for one stream of operations, given out in the same order on every rank; `name` is for errors."""
        self._names.append(name)
        return len(self._names) - 1

    def name(self, channel: int) -> str:
        """What an operation is called."""
        return self._names[channel] if channel < len(self._names) else f"operation number {channel}"

    # ------------------------------------------------------------------------------------------- the log

    def begin(self) -> None:
        """A schedule begins that may have run before, such as a forward."""
        self._place = 0

    def note(self, channel: int) -> None:
        """For those who look where this rank waits: it has come to the operation."""
        self._log.append(channel)
        self._length += 1

    def append(self, channel: int, nbytes: int) -> bool:
        """Notes an operation. Returns whether ranks must compare it before it is launched; `settle` follows then."""
        self.note(channel)
        self.digest = hash((self.digest, channel, nbytes))
        self._place = hash((self._place, channel, nbytes))
        return self._each or self._place not in self._settled

    def settle(self) -> None:
        """All ranks have come to the operation that was appended last, by the same log."""
        if len(self._settled) == _SETTLED:
            self._settled.clear()
        self._settled.add(self._place)

    def compared(self) -> None:
        """The logs of all ranks are the same, and begin anew."""
        self.digest, self._length = 0, 0
        self.comparisons += 1
        self._log.clear()

    @property
    def history(self) -> tuple[int, list[int]]:
        """How many operations there were since the last comparison, and the channels of the last of them."""
        return self._length, [*self._log]

    def difference(self, histories: Mapping[int, tuple[int, Sequence[int]]]) -> str | None:
        """Where logs first differ, in words for the user; None where they do not, as far as they go. By rank."""
        logs = {rank: dict(zip(range(n - len(log), n), log, strict=True)) for rank, (n, log) in histories.items()}
        first, *others = sorted(logs)
        places = [at for rank in others for at in logs[first].keys() & logs[rank] if logs[first][at] != logs[rank][at]]
        if not places:
            return None
        at = min(places)
        elsewhere = [f"rank {rank} in {self.name(logs[rank][at])}" for rank in others if at in logs[rank]]
        return f"rank {first} is in {self.name(logs[first][at])}, but {', '.join(elsewhere)}"

    # ------------------------------------------------------------------------------------------- failures

    def refuse_if_broken(self) -> None:
        if self.broken:
            raise RuntimeError(f"{self.broken} Start the process group anew before going on.")

    def refuse_others(self, channel: int, channels: Mapping[int, int]) -> None:
        """channels: by rank, the operation that each other rank has come to; `channel` is this rank's."""
        different = [peer for peer, theirs in channels.items() if theirs != channel]
        if different:
            peers = ", ".join(f"rank {peer} in {self.name(channels[peer])}" for peer in different)
            self.out_of_step(f"rank {self._rank} is in {self.name(channel)}, but {peers}")

    def out_of_step(self, difference: str) -> None:
        """Raises RuntimeError. difference: which rank is where."""
        said = (
            f"ranks are out of step: {difference}. All ranks must run the same modules in the same order and take the "
            "same steps. Modules that ranks choose between must be gathered together: FSDP(as_one_unit=...)."
        )
        self.end(said)
        raise RuntimeError(said)

    def end(self, said: str) -> None:
        """Nothing more can be sent. said: why."""
        if self.broken is None:
            self.broken = said
            for act in self.at_failure:
                act(said)

    def strand(self, buffers: object) -> None:
        """Keeps the buffers of a transfer that did not arrive, and may still."""
        self._stranded.append(buffers)

    def transfer(self, channel: int | None, buffers: object) -> Transfer:
        """A context for the part of a transfer that can fail. It keeps the buffers of one that does alive: they may
        still be written into, or read."""
        return Transfer(self, channel, buffers)

    def fail(self, channel: int | None, buffers: object, error: BaseException) -> str:
        """After the error of a transfer. Returns what to say of it."""
        self.strand(buffers)
        if self.broken:
            return self.broken  # ranks are out of step, or an earlier transfer failed
        where = "a transfer" if channel is None else self.name(channel)
        said = (
            f"rank {self._rank} waited in vain in {where}: another rank of the group of {self._world} has stopped, "
            f"or never came here{self.absent()}. Look for the first error of any rank. ({error})"
        )
        self.end(said)
        return said


class Transfer:
    """A context. Not a generator, which takes three times as long: every transfer enters a few."""

    __slots__ = ("_buffers", "_channel", "_order")

    def __init__(self, order: Order, channel: int | None, buffers: object) -> None:
        self._order, self._channel, self._buffers = order, channel, buffers

    def __enter__(self) -> None:
        if self._order.broken:
            self._order.strand(self._buffers)
            self._order.refuse_if_broken()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            said = self._order.fail(self._channel, self._buffers, error)
            if isinstance(error, (RuntimeError, OSError)):  # not Ctrl-C
                raise RuntimeError(said) from error
