"""Tensors that have shapes but no memory."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What operators raise that cannot run on tensors without values. These classes have no public name."""


def without_values() -> FakeTensorMode:
    """In this context new tensors have shapes but no memory, on any device. torch's class has no public name."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def has_values(tensor: Tensor) -> bool:
    """Whether the tensor has memory, and not only a shape, as in `without_values`."""
    return not isinstance(tensor, FakeTensor)


def is_of_two_devices(error: RuntimeError) -> bool:
    """Whether an operator raised this because such tensors are on two devices. The error has no class of its own.

    The second text is that of torch 2.11.
    """
    return any(text in str(error) for text in ("same device", "two different devices"))
