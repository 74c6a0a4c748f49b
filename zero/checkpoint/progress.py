"""A progress bar on a terminal if tqdm is installed; otherwise nothing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONG = 1 << 30
"""The fewest bytes for which a bar is shown."""


@contextmanager
def progress(what: str, nbytes: int, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """The function to call with the bytes that are done. shown: whether this rank shows the bar."""
    if shown and nbytes >= _LONG and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
        with importlib.import_module("tqdm").tqdm(total=nbytes, desc=what, unit="B", unit_scale=True) as bar:
            yield bar.update
    else:
        yield lambda done: None
