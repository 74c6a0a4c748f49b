"""Stage 1 of zero.setup: gradients that its DistributedDataParallel has not averaged are refused by the next step.

DistributedDataParallel averages in the backward of a forward of its own, outside no_sync(). After any other one ranks
would step different gradients. As each steps its shard alone, the replicas would stay equal, and nothing would show.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from zero._torch.autograd import writes_into
from zero.wrap.tensors import nearest_leaf, tensors_in

_UNDER_NO_SYNC = "ran under no_sync()"
_AROUND = "was of a forward of the module inside, around the DistributedDataParallel that zero.setup returned"


class Averaging:
    """Notes at the outputs of forwards, where their backwards begin, whether gradients will be averaged."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._inside = ref(ddp.module)
        self._within_ddp = False
        # What the last backward did that has left gradients as they are on this rank.
        self._left: str | None = None
        ddp.register_forward_pre_hook(_Hook(self, Averaging._begin))
        ddp.register_forward_hook(_Hook(self, Averaging._end), always_call=True)
        ddp.module.register_forward_hook(_Hook(self, Averaging._end_inside))

    def problem(self) -> str | None:
        """Returns an error message for gradients that were not averaged, of which there are some, else None."""
        return self._left and (
            f"gradients were not averaged over the ranks: the last backward {self._left}. Call the model that "
            "zero.setup returned, with the last backward of a step outside no_sync(). To average gradients by "
            "hand build zero.OSS and DistributedDataParallel without zero.setup."
        )

    def _begin(self, *_: Any) -> None:
        self._within_ddp = True

    def _end(self, ddp: DistributedDataParallel, _: Any, output: Any) -> None:
        self._within_ddp = False
        self._watch(output, None if ddp.require_backward_grad_sync else _UNDER_NO_SYNC)

    def _end_inside(self, module: nn.Module, _: Any, output: Any) -> None:
        if not self._within_ddp and module is self._inside():
            self._watch(output, _AROUND)

    def _watch(self, output: Any, left: str | None) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._reached, nearest_leaf(tensor), left))

    def _reached(self, leaf: Node | None, left: str | None, _: Tensor) -> None:
        if leaf is None or writes_into(leaf):  # torch.autograd.grad writes into none
            self._left = left


class _Hook:
    """Calls a method of `to`. A copy of the module, or what is read from its pickle, calls none."""

    def __init__(self, to: Averaging | None = None, method: Callable[..., None] | None = None) -> None:
        self._to, self._method = to, method

    def __call__(self, *args: Any) -> None:
        if self._method is not None and not torch.compiler.is_compiling():
            self._method(self._to, *args)

    def __reduce__(self) -> Any:
        return _Hook, ()
