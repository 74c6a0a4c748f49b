"""A progress bar on a terminal if tqdm is installed; otherwise nothing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import TracebackType
from typing import Any

_LONG = 1 << 30
"""The fewest bytes for which a bar is shown."""


class Progress:
    """Counts bytes. shown: whether this rank shows the bar."""

    def __init__(self, what: str, nbytes: int, shown: bool = True) -> None:
        self._what, self._nbytes = what, nbytes
        self._shown = shown and nbytes >= _LONG and sys.stderr.isatty()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._shown and importlib.util.find_spec("tqdm"):
            tqdm = importlib.import_module("tqdm").tqdm
            self._bar = tqdm(total=self._nbytes, desc=self._what, unit="B", unit_scale=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, nbytes: int) -> None:
        if self._bar is not None:
            self._bar.update(nbytes)
