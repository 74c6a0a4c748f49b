"""The workspace that oneDNN's LSTM keeps for its backward. On tensors without values torch does not allocate it.

The formula here gave the real size, to the byte, with torch 2.13 in float32 (oneDNN: src/cpu/rnn/rnn_utils). In 16 bits
the workspace is up to a third smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

LSTM_LAYER: Any = torch.ops.aten.mkldnn_rnn_layer.default

_PAGE = 4096


def with_workspace(result: Sequence[Tensor], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The operator's result with a workspace of the real size. The last tensor of `result` is an empty workspace."""
    (steps, batch, inputs), (_, hidden) = args[0].shape, args[2].shape
    buffers = [
        (steps, batch, _padded(4 * hidden)),  # gates
        (steps, batch, _padded(hidden)),
        *[(2, steps + 1, batch, _padded(max(inputs, hidden)))] * 3,  # states and their gradients, before and after
        *[(2, steps + 1, batch, hidden)] * 2,  # those of the cells
    ]
    pages = sum(-(-4 * prod(buffer) // _PAGE) for buffer in buffers)
    return (*result[:-1], result[-1].new_empty(pages * _PAGE))


def _padded(numel: int) -> int:
    """A row's length, padded to full cache lines, and not to a power of two, whose rows would share cache sets."""
    rows = -(-numel // 16) * 16
    return rows + 16 if rows % 256 == 0 else rows
