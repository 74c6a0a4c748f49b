"""The forward of a model as the FSDP runs it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from zero.sdp.buffers import BufferSync
from zero.sdp.wrapper import UNWRAPPED

if TYPE_CHECKING:
    from zero.fsdp.model import Model


_TO_USER = 6
"""Frames from a warning to the code that calls the FSDP, through torch's module call."""


class Forward:
    """Calls the module, between what all ranks do before and after. buffers: broadcast before a forward. warning:
    shown once, in the first forward."""

    def __init__(self, model: Model, buffers: BufferSync | None, warning: str | None = None) -> None:
        self.module = model.module
        self._model, self._buffers, self._warning = model, buffers, warning

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begin()
        output = self.module(*args, **kwargs)
        self.end()
        return output

    def begin(self) -> None:
        """Collective. Raises RuntimeError if parameters were moved, cast or given other data since wrapping."""
        if self._warning is not None:
            warning, self._warning = self._warning, None
            warnings.warn(warning, stacklevel=_TO_USER)
        self._model.refuse_moved()
        self._model.schedule.before_forward()
        if self._buffers is not None:
            self._buffers.before_forward()

    def end(self) -> None:
        if self._buffers is not None:
            self._buffers.after_forward(reduced=self._model.backward.reduces)


def refuse_forward(*_: Any, **__: Any) -> NoReturn:
    """Raises RuntimeError. Called in place of the forward, once the module is unwrapped."""
    raise RuntimeError(UNWRAPPED.format("FSDP"))
