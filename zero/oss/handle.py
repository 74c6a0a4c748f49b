"""A transfer between its launch and the moment that what it brings is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Handle:
    """A transfer in flight. It owns the buffers until `wait` returned what the transfer brought.

    queue: the transfers that tell or launch something when they are waited for. These are completed in the order in
        which they were launched, so that it is the same on every rank whatever each waits for first.
    """

    def __init__(self, finish: Callable[[], Any], queue: list[Handle] | None = None) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._queue = queue
        self._brought: Any = None
        self._waited = False
        if queue is not None:
            queue.append(self)

    def wait(self) -> Any:
        """Blocks until the transfer is complete; to be called once."""
        assert not self._waited, "this transfer was waited for before"
        self._waited = True
        while self._queue and self in self._queue:
            self._queue.pop(0)._complete()
        self._complete()
        brought, self._brought = self._brought, None
        return brought

    def _complete(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._brought = finish()
