"""The ways that tensors take between the ranks of one host, to run a test by each of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

TRANSPORTS = ["host memory", "gloo"]


@contextmanager
def by(transport: str) -> Iterator[None]:
    """On every rank. Process groups that are first used in here go this way."""
    if transport == "host memory":
        yield
    else:
        with without_host_memory():
            yield


@contextmanager
def without_host_memory() -> Iterator[None]:
    """On every rank. Ranks that first meet in here do not read one another's memory: Gloo sends."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, ZERO_HOST_MEMORY="0"))
        if importlib.util.find_spec("zero.oss.agreement") is not None:
            patches.enter_context(mock.patch("zero.oss.agreement.meet", return_value=None))
        yield
