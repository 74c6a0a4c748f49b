"""What the profiler and dispatch modes record: ranges, and operators."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.utils import _python_dispatch

# torch.profiler.record_function that may be entered again and again: 0.4 microseconds where no profiler runs.
profiler_range = _RecordFunctionFast


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """torch's, from which its documentation has users derive, but which is in a private module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """If True, torch disables compiling for each operator, which is a tenth of the mode's time."""
        return False


# The operator that modes see where the device of a fake tensor is read.
DEVICE_OF: Any = torch.ops.prim.device.default

# The operator that `item()` and `bool()` of a tensor call.
VALUE_OF: Any = torch.ops.aten._local_scalar_dense.default
