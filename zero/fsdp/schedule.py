"""When units are gathered, released and reduced, and what is waited for.

forward of a unit     gather, compute, release (the root and units that are to be kept: stay)
backward of a unit    gather, compute, release and send gradients, wait for those of the unit before
end of backward       what is left is released and sent, everything is waited for
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zero.fsdp.precision import MixedPrecision
from zero.fsdp.unit import Stage, Unit
from zero.oss.comm import Comm
from zero.sdp.tensors import at_end_of_backward, in_a_backward, map_tensors, tensors_in


class Schedule:
    """Drives the units of one model through forward and backward by hooks on their modules.

    `active`: whether gradients are reduced now, or kept (no_sync).
    """

    def __init__(
        self, units: list[Unit], comm: Comm, *, reshard_after_forward: bool, precision: MixedPrecision
    ) -> None:
        self.active = True
        self._precision = precision
        self._units, self._comm = units, comm
        self._root = units[0]
        self._reshard_after_forward = reshard_after_forward
        self._channel = comm.channel("the backward of FSDP")
        self._in_backward = False
        self._reducing: Unit | None = None
        self._pending: Unit | None = None
        """Its gradients are to be sent after the next operation by which ranks compare where they are."""
        for unit in units:
            unit.module.register_forward_pre_hook(self._pre_forward(unit), with_kwargs=True)
            unit.module.register_forward_hook(self._post_forward(unit), always_call=True)

    # --------------------------------------------------------------------------------------------- forward

    def _pre_forward(self, unit: Unit) -> Callable[..., Any]:
        def pre_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._in_backward and not in_a_backward():
                self.abandon()
            if unit.stage is Stage.BACKWARD:
                return None  # activation checkpointing computes the forward again, and backward has gathered the unit
            unit.unshard()
            unit.depth += 1
            args, kwargs = self._precision.cast_inputs(args), self._precision.cast_inputs(kwargs)
            return self._watch_inputs(unit, args, kwargs)

        return pre_forward

    def _watch_inputs(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Has the unit told when its backward is complete: when a gradient leaves through one of its inputs.

        The inputs are seen through views, made before anything else in the unit. Autograd runs what can run latest
        created first, so when it comes to such a view everything in the unit has been run.
        """
        told = False

        def leaving(_: Tensor) -> None:
            nonlocal told
            if not told and unit.stage is Stage.BACKWARD:
                told = True
                unit.calls -= 1
                if unit.calls == 0:
                    self._complete(unit)

        def watched(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            view = tensor.view_as(tensor)
            view.register_hook(leaving)
            unit.views.append(view)
            return view

        if unit is self._root or not torch.is_grad_enabled():
            return args, kwargs
        unit.calls += 1
        return map_tensors(watched, args), map_tensors(watched, kwargs)

    def _post_forward(self, unit: Unit) -> Callable[..., None]:
        def post_forward(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if unit.stage is Stage.BACKWARD:
                return
            unit.depth = max(unit.depth - 1, 0)
            needs_backward = False
            if torch.is_grad_enabled():
                for tensor in tensors_in(output):
                    if tensor.requires_grad and not any(tensor is view for view in unit.views):
                        needs_backward = True
                        tensor.register_hook(self._pre_backward(unit))
            kept = needs_backward and (unit is self._root or not self._reshard_after_forward)
            if unit.depth == 0:
                unit.views.clear()
                if not kept:
                    unit.reshard()

        return post_forward

    # -------------------------------------------------------------------------------------------- backward

    def _pre_backward(self, unit: Unit) -> Callable[[Tensor], None]:
        def pre_backward(_: Tensor) -> None:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"a gradient was asked for with create_graph=True through {unit.title} of FSDP, whose "
                    "parameters are gone by then. Take such gradients at stage 2 (ShardedDDP) or below."
                )
            if not self._in_backward:
                self._in_backward = True
                at_end_of_backward(self._finish)
            if unit.stage is Stage.IDLE and unit.enter_backward():
                self._launch_pending()

        return pre_backward

    def _complete(self, unit: Unit) -> None:
        if not self.active:
            unit.keep_gradients()
            return
        self._finish_reduce()
        unit.end_backward()
        self._send_after_next(unit)

    def _send_after_next(self, unit: Unit) -> None:
        """A reduce is not compared between ranks by itself: it goes with the next gather, which announces it."""
        if self._pending is not None:
            self._comm.agree(self._channel)
            self._launch_pending()
        self._pending = unit
        self._comm.announce(unit.reduce_channel)

    def _launch_pending(self) -> None:
        if self._pending is not None:
            self._finish_reduce()
            self._comm.announce(None)
            self._pending.launch_reduce()
            self._reducing, self._pending = self._pending, None

    def _finish_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.finish_reduce()
            self._reducing = None

    def _finish(self) -> None:
        """At the end of backward."""
        for unit in reversed(self._units):
            if unit.stage is Stage.IDLE and unit.calls and unit.whole:
                unit.enter_backward()  # kept since forward, but not reached here: other ranks may have reached it
            if unit.stage is Stage.BACKWARD:
                self._complete(unit)
            elif unit.kept and self.active:
                unit.take_leftovers()
                self._send_after_next(unit)
        self._comm.agree(self._channel)
        self._launch_pending()
        self._finish_reduce()
        for unit in self._units:
            unit.calls = 0
            unit.reshard()
        self._in_backward = False

    def abandon(self) -> None:
        """Forgets what an exception ended before its end; the model can go on."""
        self._reducing = self._pending = None
        self._comm.announce(None)
        self._in_backward = False
        for unit in self._units:
            unit.abandon()
