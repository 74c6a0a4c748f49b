"""The handle of a transfer, from its launch until its result is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Handle:
    """A transfer in flight. It owns the buffers until `wait` has returned the result.

    queue: the transfers that compare or launch operations in `wait`. They are completed in the order of their launches,
        so that this order is the same on every rank, whichever handle a rank waits for first.
    """

    def __init__(self, finish: Callable[[], Any], queue: list[Handle] | None = None) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._queue = queue
        self._result: Any = None
        self._error: BaseException | None = None
        self._waited = False
        if queue is not None:
            queue.append(self)

    def wait(self) -> Any:
        """Waits for the transfer and returns its result. Must not be called again after it has returned.

        Raises the error of the transfer, also if it came up in the `wait` of another handle.
        """
        assert not self._waited, "this transfer was waited for before"
        while self._queue and self in self._queue:
            self._queue.pop(0)._complete()
        self._complete()
        self._waited = True
        result, self._result = self._result, None
        return result

    def _complete(self) -> None:
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except BaseException as error:
                self._error = error
                raise
