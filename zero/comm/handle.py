"""A transfer between its launch and the moment that what it brings is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Handle:
    """A transfer in flight. It owns the buffers until `wait` returned what the transfer brought.

    queue: the transfers that compare or launch something when they are waited for. They are completed in the order in
        which they were launched, so that the order is the same on every rank whatever each waits for first.
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
        """Blocks until the transfer is complete; to be called until it has returned.

        Raises what kept it from arriving, also where that was found while another transfer was waited for.
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
