"""When each task of a trace begins and ends on some hardware.

Streams run beside one another and beside the host. Transfers that are under way at the same time share the links:
each of two takes twice as long. Computing is not slowed down by them. Where the hardware does not overlap anything, one
task takes place after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero.plan.hardware import Hardware
from zero.plan.trace import COMPUTE, HOST, QUEUES, Task

_NEVER = float("inf")
_SAME = 1e-12
"""Seconds that two moments are apart at most."""


@dataclass(frozen=True)
class Span:
    """In seconds since the step began. queue: a stream or the host."""

    name: str
    queue: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """exposed: seconds in which the computing did nothing but wait for a transfer. used: the share of the hardware's
    FLOP/s."""

    spans: Sequence[Span]
    seconds: float
    exposed: float
    used: float


def play(tasks: Sequence[Task], hardware: Hardware) -> Timeline:
    """From a moment at which host and streams have nothing to do, until they have done all."""
    if hardware.overlaps:
        player = _Player(tasks, hardware)
        player.run()
        spans, exposed = player.spans, player.exposed
    else:
        spans, exposed = _in_turn(tasks, hardware)
    seconds = max((span.end for span in spans), default=0.0)
    ideal = sum(task.times * task.flops / hardware.peak(task.dtype) for task in tasks)
    return Timeline(spans, seconds, exposed, ideal / seconds if seconds else 0.0)


def seconds_of(task: Task, hardware: Hardware) -> float:
    """Of an operator on its stream, without its launch."""
    rate = hardware.cached if task.nbytes <= hardware.cache else hardware.memory
    computing = task.flops / (hardware.peak(task.dtype) * hardware.efficiency)
    return task.times * max(computing, task.nbytes / rate, task.elements / hardware.elements)


def _in_turn(tasks: Sequence[Task], hardware: Hardware) -> tuple[list[Span], float]:
    spans, now, exposed = [], 0.0, 0.0
    for task in tasks:
        if task.kind is not None and task.group is not None:
            taken = hardware.launch + sum(hardware.transfer(task.kind, task.nbytes, task.group))
            exposed += taken
        elif task.nbytes:
            taken = task.times * hardware.launch + seconds_of(task, hardware)
        else:
            continue
        spans.append(Span(task.name, task.queue if task.kind else COMPUTE, now, now + taken))
        now += taken
    return spans, exposed


class _Player:
    """Goes from one moment at which something ends to the next."""

    def __init__(self, tasks: Sequence[Task], hardware: Hardware) -> None:
        self.spans: list[Span] = []
        self.exposed = 0.0
        self._tasks, self._hardware = tasks, hardware
        self._now = 0.0
        self._ended = [_NEVER] * len(tasks)
        self._launched = [_NEVER] * len(tasks)
        places = range(len(tasks))
        self._queues = [*dict.fromkeys([*QUEUES, *(task.queue for task in tasks)])]
        self._waiting: dict[str, list[int]] = {queue: [] for queue in self._queues}
        for place in places:
            self._waiting[tasks[place].queue].append(place)
        self._waiting[HOST] = [*places]  # which launches all that it does not do itself
        self._next = dict.fromkeys(self._queues, 0)
        self._free = dict.fromkeys(self._queues, 0.0)
        self._fixed: dict[str, float] = {}
        """By queue, when what runs there has done what takes as long whatever else runs."""
        self._sending: dict[str, float] = {}
        """By queue, the seconds of its transfer that are left, were it alone on the links."""
        self._begun = dict.fromkeys(self._queues, 0.0)

    def run(self) -> None:
        while True:
            while sum(self._start(queue) for queue in self._queues):
                pass
            if not self._fixed and not self._sending:
                return
            shared = len(self._sending)
            moment = min([*self._fixed.values(), *(self._now + left * shared for left in self._sending.values())])
            passed, self._now = moment - self._now, moment
            for queue in [*self._sending]:
                self._sending[queue] -= passed / shared
                if self._sending[queue] <= _SAME:
                    del self._sending[queue]
                    self._end(queue)
            for queue in [queue for queue, end in self._fixed.items() if end <= moment + _SAME]:
                del self._fixed[queue]
                self._go_on(queue)

    def _start(self, queue: str) -> bool:
        """What comes next there, if it can; returns whether it ended at once."""
        if queue in self._fixed or queue in self._sending or self._next[queue] == len(self._waiting[queue]):
            return False
        place = self._waiting[queue][self._next[queue]]
        task = self._tasks[place]
        at_host = queue == HOST
        if at_host and task.queue != HOST:
            taken = self._hardware.launch * task.times if task.nbytes else 0.0
        else:
            before = max((self._ended[other] for other in task.after), default=0.0)
            if before == _NEVER or (not at_host and self._launched[place] == _NEVER):
                return False
            taken = self._own_seconds(task)
            if queue == COMPUTE:
                self._note_exposed(place)
        self._begun[queue] = self._now
        self._fixed[queue] = self._now + taken
        if taken:
            return False
        del self._fixed[queue]
        self._go_on(queue)
        return True

    def _own_seconds(self, task: Task) -> float:
        if task.kind is None or task.group is None:
            return seconds_of(task, self._hardware)
        return self._hardware.transfer(task.kind, task.nbytes, task.group)[0]

    def _note_exposed(self, place: int) -> None:
        """Computing begins now: what it has waited for transfers since it could have."""
        others = [other for other in self._tasks[place].after if self._tasks[other].queue not in (HOST, COMPUTE)]
        arrived = [self._ended[other] for other in others]
        self.exposed += max(0.0, max(arrived, default=0.0) - max(self._free[COMPUTE], self._launched[place]))

    def _go_on(self, queue: str) -> None:
        """What took a fixed time there has ended: a transfer goes on to send."""
        task = self._tasks[self._waiting[queue][self._next[queue]]]
        if queue != HOST and task.kind is not None and task.group is not None:
            self._sending[queue] = self._hardware.transfer(task.kind, task.nbytes, task.group)[1]
            if self._sending[queue] > 0:
                return
            del self._sending[queue]
        self._end(queue)

    def _end(self, queue: str) -> None:
        place = self._waiting[queue][self._next[queue]]
        task = self._tasks[place]
        self._next[queue] += 1
        self._free[queue] = self._now
        if queue == HOST and task.queue != HOST:
            self._launched[place] = self._now
        else:
            self._ended[place] = self._now
        if self._now > self._begun[queue]:
            self.spans.append(Span(task.name, queue, self._begun[queue], self._now))
