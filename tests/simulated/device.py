"""Streams and events of a device that is not there.

A stream has a vector clock: of every stream, how many of its operations come before what the stream runs next. The
host is one more stream: what it launches comes after what it has done and waited for. Beside this each stream has a
time, at which it has run all that it was given. The host takes none but for waiting, for operators on its memory, and
for launches if they are given any.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import zero

PACKAGE = str(Path(zero.__file__).parent)


class Call(NamedTuple):
    file: str
    function: str
    line: int


Site = tuple[Call, ...]
"""Where a stream, or the host, waits: the call of the device, and the one that led there."""


class Stall(NamedTuple):
    """That the computing stream had nothing to do. what: it waited for."""

    what: str
    seconds: float


class Transfer(NamedTuple):
    """kind: as in network.py. begin, end: the time between which it is under way. world: of its group."""

    kind: str
    nbytes: int
    begin: float
    end: float
    world: int


class NoGraph(AssertionError):
    """What cannot be part of a CUDA graph."""


class Capture:
    """What torch.cuda.graph records (CUDA's programming guide, "Creating a graph using stream capture"): a stream joins
    it by waiting for an event that was recorded in it, and the one that began it waits for all others at the end."""

    def __init__(self, stream: Stream) -> None:
        self._begun_on, self._streams = stream, {stream}
        # Memory that it made, and what else it reads or writes: a replay does so at the same addresses.
        self._made: set[object] = set()
        self._used: set[object] = set()
        self._freed: list[object] = []

    def has(self, stream: Stream) -> bool:
        return stream in self._streams

    def waits(self, stream: Stream, event: Event) -> None:
        if event.capture is self:
            self._streams.add(stream)
        elif stream in self._streams and event.clock:
            raise NoGraph(f"{stream} waits for an event that was recorded before the graph")

    def runs(self, stream: Stream) -> None:
        if stream not in self._streams and stream is not stream.device.host:
            raise NoGraph(f"{stream} runs beside the graph")

    def makes(self, block: object) -> None:
        self._made.add(block)

    def uses(self, block: object) -> None:
        if block not in self._made:
            self._used.add(block)

    def frees(self, block: object) -> None:
        if block in self._used:
            self._freed.append(block)

    def end(self) -> None:
        if self._freed:
            raise NoGraph(f"the graph reads or writes {self._freed[0]}, which is freed while it is recorded")
        for stream in self._streams:
            if not self._begun_on.knows(stream, stream.clock.get(stream, 0)):
                raise NoGraph(f"{stream} is not waited for at the end of the graph")


class Graph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


class Event:
    def __init__(self, stream: Stream) -> None:
        self.clock, self.time, self.label = dict(stream.clock), stream.time, stream.label
        self._device = stream.device
        capture = self._device.capture
        self.capture = capture if capture is not None and capture.has(stream) else None

    def query(self) -> bool:
        self._device.host_waits()
        return self.time <= self._device.host.time

    def synchronize(self) -> None:
        self._device.host_waits()
        if self._device.waits_here():
            self._device.host.join(self.clock)
            self._device.host.time = max(self._device.host.time, self.time)


class Stream:
    """label: the last transfer that it was given."""

    stream_id = device_index = device_type = 0  # FSDP2 of torch 2.15 hands them to an operator that does nothing here

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name, self.label, self.time = device, name, "", 0.0
        self.clock: dict[Stream, int] = {}
        device.streams.append(self)

    def __repr__(self) -> str:
        return self.name

    def join(self, clock: dict[Stream, int]) -> None:
        for stream, tick in clock.items():
            self.clock[stream] = max(tick, self.clock.get(stream, 0))

    def knows(self, stream: Stream, tick: int) -> bool:
        """Whether what the stream ran at the tick comes before what this one runs next."""
        return stream is self or self.clock.get(stream, 0) >= tick or self.device.host.clock.get(stream, 0) >= tick

    def run(self, seconds: float, label: str = "") -> int:
        """The next operation. Returns its tick."""
        host = self.device.host
        if self.device.capture is not None:
            self.device.capture.runs(self)
        self.join(host.clock)
        if host.time > self.time and self is self.device.computing:
            self.device.stalls.append(Stall("host", host.time - self.time))
        self.time = max(self.time, host.time)
        self.clock[self] = self.clock.get(self, 0) + 1
        self.time += seconds
        self.label = label or self.label
        return self.clock[self]

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        if self.device.waits_here():
            self.wait(event)

    def wait_stream(self, other: Stream) -> None:
        if self.device.waits_here():
            self.wait(Event(other))

    def wait(self, event: Event) -> None:
        if self.device.capture is not None:
            self.device.capture.waits(self, event)
        self.join(event.clock)
        if event.time > self.time and self is self.device.computing:
            self.device.stalls.append(Stall(event.label, event.time - self.time))
        self.time = max(self.time, event.time)


class Device:
    """In the place of torch.cuda.

    launches: of kernels, by the names of their operators. launch: seconds that each of them, and of transfers, takes of
    the host. waited: where the package did. removed: where nothing does, as if the line were not there.
    stalls: of the computing stream. transfers: in the order of their launches. groups, aborted: see Group.
    recording: whether a CUDA graph is, by the user. capture: what one records.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host = Stream(self, "host")
        self.computing = self._current = Stream(self, "computing")
        self.launches: Counter[str] = Counter()
        self.launch = 0.0
        self.waited: set[Site] = set()
        self.removed: Site | None = None
        self.stalls: list[Stall] = []
        self.transfers: list[Transfer] = []
        self.groups: list[Any] = []
        self.aborted: list[bool] = []
        self.recording = False
        self.capture: Capture | None = None
        self._numbers = count(1)

    def launches_one(self, name: str) -> None:
        self.launches[name] += 1
        self.host.time += self.launch

    def is_available(self) -> bool:
        """There is no memory to pin."""
        return False

    def Stream(self, device: object = None, priority: int = 0) -> Stream:
        return Stream(self, f"stream {next(self._numbers)}")

    def current_stream(self, device: object = None) -> Stream:
        return self._current

    def default_stream(self) -> Stream:
        return self.computing

    def is_current_stream_capturing(self) -> bool:
        return self.recording or self.capture is not None

    CUDAGraph = Graph

    @contextmanager
    def graph(self, graph: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        for each in self.streams:  # torch synchronizes
            self.host.join(each.clock)
        self.capture = Capture(stream)
        try:
            with self.stream(stream):
                yield
            self.capture.end()
        finally:
            self.capture = None
        self.current_stream().join(stream.clock)  # nothing has run: it is the replay that reads and writes

    def host_waits(self) -> None:
        """Called where the host waits for the device."""
        if self.capture is not None:
            raise NoGraph("the host waits for the device while a graph is recorded")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def waits_here(self) -> bool:
        """Called by what the package calls in order to wait. Whether it is to."""
        here: list[Call] = []
        frame: Any = sys._getframe(2)
        while frame is not None and len(here) < 2:
            if frame.f_code.co_filename.startswith(PACKAGE):
                here.append(Call(frame.f_code.co_filename[len(PACKAGE) + 1 :], frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        self.waited.add((*here,))
        return self.removed != (*here,)
