"""Streams that only take notes, in the place of a GPU's."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from zero.oss import lane


class Streams:
    """In the place of torch.cuda. `notes` are what streams were told, and what else a test writes in between."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._current = self._computing = self._stream("computing")
        self.Event = self._event

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return self._stream("lane")

    def _stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.notes.append(f"{name} after {other.name}"))

    def _event(self) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda stream: self.notes.append(f"event in {stream.name}"),
            synchronize=lambda: self.notes.append("host waits"),
        )

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self._current

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Any:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def note(self, what: str) -> None:
        self.notes.append(f"{what} in {self._current.name}")


@contextmanager
def noted_streams() -> Any:
    """In here the streams of any device are these."""
    streams = Streams()
    with mock.patch("torch.get_device_module", return_value=streams), mock.patch.object(lane, "_lanes", {}):
        yield streams
