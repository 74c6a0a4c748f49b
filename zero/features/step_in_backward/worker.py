"""The thread in which shards in the memory of the CPU are stepped while backward goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

_WAITING = 2
"""Steps that may wait or run at a time: their gradients are kept meanwhile. Backward waits with the next one."""


class Worker:
    """Runs steps one after another, here or in a thread of its own. torch's kernels release the interpreter's lock."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: deque[Future[None]] = deque()

    def run(self, step: Callable[[], None], *, beside: bool) -> None:
        """Runs a step without gradients. beside: in the thread. Raises the error of an earlier step there."""
        if not beside:
            _without_gradients(step)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-steps")
        while len(self._running) >= _WAITING:
            self._running.popleft().result()
        self._running.append(self._thread.submit(_without_gradients, step))

    def join(self) -> None:
        """Waits for all steps. Raises the error of the first that failed."""
        errors = [error for step in [*self._running] if (error := step.exception()) is not None]
        self._running.clear()
        if errors:
            raise errors[0]


def _without_gradients(step: Callable[[], None]) -> None:
    with torch.no_grad():
        step()
