"""Copies between a GPU and the memory of the CPU, beside what the GPU computes.

A lane is a stream of the device. What is launched in it runs after all that the computing stream was given before, and
`join` makes the computing stream run what it is given next after all that is in the lane. Both are ordered by events on
the device: the host goes on, until it needs itself what was brought (`wait`). Transfers by NCCL are ordered with the
stream in which they are launched and waited for, so they take their place among the copies. On the CPU streams are
torch's stand-ins, which do nothing.

Memory that is copied from or to belongs to the computing stream, which frees and uses it anew only after `join`; what
leaves the device is kept from being used anew by the allocator (`record_stream`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Lane:
    """As a context, what is launched goes into the lane. One a device; see `lane_of`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)
        self._within: Any = None
        self._used = False

    def __enter__(self) -> None:
        self._used = True
        self._stream.wait_stream(self._streams.current_stream(self._device))
        self._within = self._streams.stream(self._stream)
        self._within.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._within.__exit__(*raised)

    def join(self) -> None:
        """What is launched from now on runs after what is in the lane."""
        self._streams.current_stream(self._device).wait_stream(self._stream)

    def bring(self, source: Tensor, to: Tensor) -> Tensor:
        """Copies from the device to `to`, which is on the CPU; there when the host has called `wait`."""
        with self:
            to.copy_(source, non_blocking=True)
        source.record_stream(self._stream)
        return to

    def wait(self) -> None:
        """The host waits for all that is in the lane."""
        if self._used:
            self._used = False
            self.event().synchronize()

    def event(self) -> Any:
        """After all that is in the lane now."""
        event = self._streams.Event()
        event.record(self._stream)
        return event


def bring(source: Tensor, like: Tensor) -> Tensor:
    """In the dtype of `like`, where that lies. From a device to the CPU it is on its way until the device's lane has
    been waited for."""
    source = source.to(like.dtype)
    if source.device == like.device:
        return source
    if like.device.type != "cpu":
        return source.to(like.device)
    there = torch.empty(source.shape, dtype=source.dtype, pin_memory=like.is_pinned())
    return lane_of(source.device).bring(source, there)


_lanes: dict[torch.device, Lane] = {}


def lane_of(device: torch.device) -> Lane:
    if device not in _lanes:
        _lanes[device] = Lane(device)
    return _lanes[device]
