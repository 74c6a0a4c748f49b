"""Where all threads of a process stand, as far as that says what it can never come to.

A rank that waits within zero for another one, and that one in torch.distributed.barrier(), can meet only if a further
thread of either makes the other's call. Where neither has such a thread they never meet.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch.distributed as dist
import torch.utils.data

from zero.comm.work import wait_watching

WITHIN_ZERO = "zero"

_WAITS, _BARRIER = wait_watching.__code__, inspect.unwrap(dist.barrier).__code__
# Threads of these call neither zero nor a barrier: torch's data loading, and what waits in the standard library.
_IDLE = (str(Path(torch.utils.data.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))
_OTHERS = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def standing() -> tuple[int, str, list[int]] | None:
    """Returns an identity, in what this process waits, and for which ranks of the job if that is a barrier; None if it
    may go on, or another of its threads may call something."""
    frames, found = sys._current_frames(), []
    for thread in threading.enumerate():
        outwards = [*_outwards(frames.get(thread.ident or 0))]
        waits = next((frame for frame in outwards if frame.f_code in (_WAITS, _BARRIER)), None)
        if waits is not None:
            found.append(waits)
        # A timer waits in the standard library for the time to call what the user has given it.
        elif thread is not threading.current_thread() and (
            isinstance(thread, threading.Timer) or not all(_is_idle(frame.f_code.co_filename) for frame in outwards)
        ):
            return None
    if len(found) != 1:
        return None
    (frame,) = found
    if frame.f_code is _WAITS:
        return id(frame), WITHIN_ZERO, []
    return id(frame), "torch.distributed.barrier()", dist.get_process_group_ranks(frame.f_locals.get("group"))


def _is_idle(file: str) -> bool:
    return file.startswith(_IDLE[:2]) or (file.startswith(_IDLE[2]) and not file.startswith(_OTHERS)) or file[:1] == "<"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
