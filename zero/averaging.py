"""Stage 1: gradients that its DistributedDataParallel has not averaged are refused by the next step.

DistributedDataParallel averages in the first backward after a forward of its own, outside no_sync(). After any other
ranks would step different gradients. As each steps its shard alone, the replicas would stay equal, and nothing would
show.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize, proxy, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero._torch.autograd import at_end_of_backward, writes_into
from zero._torch.modules import parameters_of
from zero.oss.optimizer import OSS, refuse_unaveraged
from zero.wrap.ddp import averaged_by_others
from zero.wrap.tensors import nearest_leaf, tensors_in

_UNDER_NO_SYNC = "ran under no_sync()"
_ONCE = (
    "was a second one after a forward, as of two losses one after the other. DistributedDataParallel averages in the "
    "first alone: add the losses up, (first + second).backward(), or run each one's forward just before its backward"
)
_AROUND = (
    "was around the DistributedDataParallel of {}: of a method, of a module inside, or in Lightning's manual "
    "optimization by another call than manual_backward()"
)


def refuse_gradients_not_averaged(
    ddp: DistributedDataParallel | None, optimizers: Sequence[Optimizer], made_by: str = ""
) -> None:
    """Has each step of these optimizers raise on every rank, if gradients were not averaged by what was passed here as
    `ddp`, in this call or another. made_by: what the user has called for that one, in errors."""
    if ddp is not None:
        _watched[ddp] = Averaging(ddp, made_by)
    for one in optimizers:
        if isinstance(one, OSS):
            refuse_unaveraged(one, _problem_of_any)


def will_average(ddp: DistributedDataParallel) -> None:
    """Says that it was told, other than by a forward, to average in the next backward."""
    if ddp in _watched:
        _watched[ddp].expect(ddp)


def _problem_of_any(params: Collection[nn.Parameter]) -> str | None:
    return next(filter(None, (one.problem(params) for one in [*_watched.values()])), None)


class Averaging:
    """Notes, where a gradient is written, whether it will be averaged."""

    def __init__(self, ddp: DistributedDataParallel, made_by: str) -> None:
        self._ddp, self._made_by = ref(ddp), made_by
        # Those that it averages, or has found frozen.
        self._known = {*parameters_of(ddp.module)}
        # Whose gradients are as they are on this rank, and what the backward did that wrote them last.
        self._left: dict[nn.Parameter, str] = {}
        # Whether there was a forward whose backward averages, and the parameters that have got gradients since.
        self._averages = False
        self._averaged: set[nn.Parameter] = set()
        # What autograd calls at the end of the running backward, while it may still do so. And of that backward whether
        # it came through an output of the wrapper's forward, and why that one's is not averaged.
        self._ends: Callable[[], object | None] = _nothing
        self._through = False
        self._unsent: str | None = None
        # A proxy: the garbage collector does not find cycles through hooks of autograd.
        hook, written = _Hook(self), partial(Averaging.written, proxy(self))
        ddp.register_forward_hook(hook)  # not after an exception: it has prepared no backward then
        self._hook = ref(hook)
        # It averages once all of these have gradients.
        self._trained = {one for one in self._known if one.requires_grad}
        hooks = [one.register_post_accumulate_grad_hook(written) for one in self._trained]
        finalize(self, _remove, hooks)

    def problem(self, params: Collection[nn.Parameter]) -> str | None:
        """Returns an error message for gradients that were not averaged, of which there are some, else None."""
        if self._known.isdisjoint(params) or self._problem(params) is None:
            return None
        others = averaged_by_others(self._ddp())
        return self._problem([param for param in params if param not in others])

    def _problem(self, params: Collection[nn.Parameter]) -> str | None:
        added = {param for param in params if param not in self._known and param.grad is not None}
        if added:
            return (
                f"{self._name(added) or 'a parameter'} was added to the optimizer since {self._made_by}, and "
                "its gradient was not averaged over the ranks. Wrap the model again, with the same optimizer: "
                "DistributedDataParallel(zero.unwrap(model))."
            )
        if (missing := self._missing()) and any(one in self._averaged and one.grad is not None for one in params):
            return (
                "gradients are not averaged over the ranks yet: no backward since the last forward has reached "
                f"{missing}, and DistributedDataParallel averages once all trained parameters have gradients. Step "
                "after the last backward. For parameters that some forwards do not use build zero.OSS and "
                "DistributedDataParallel(model, find_unused_parameters=True) yourself, or take stage 2."
            )
        left = next((self._left[one] for one in params if one in self._left and one.grad is not None), None)
        return left and (
            f"gradients were not averaged over the ranks: the last backward {left}. Call the model that "
            f"{self._made_by} has wrapped, with the last backward of a step outside no_sync(). To average gradients "
            f"by hand build zero.OSS and DistributedDataParallel without {self._made_by}."
        )

    def _missing(self) -> str | None:
        """The name of a parameter whose gradient the running averages wait for, if they do."""
        ddp, missing = self._ddp(), self._trained - self._averaged
        if not self._averaged or not missing or ddp is None or ddp.find_unused_parameters or ddp.static_graph:
            return None
        return self._name(missing)

    def _name(self, params: Collection[nn.Parameter]) -> str | None:
        """Of the first of the parameters that the model has, not of one that was taken out of it."""
        ddp = self._ddp()
        named = () if ddp is None else ddp.module.named_parameters()
        return next((name for name, param in named if param in params), None)

    def expect(self, ddp: DistributedDataParallel) -> None:
        """The next backward averages."""
        if ddp.require_backward_grad_sync and torch.is_grad_enabled():
            self._averages = True
            self._averaged.clear()

    def forward_ended(self, ddp: DistributedDataParallel, output: Any) -> None:
        self.expect(ddp)
        unsent = None if ddp.require_backward_grad_sync else _UNDER_NO_SYNC
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._reached, nearest_leaf(tensor), unsent))

    def _reached(self, leaf: Node | None, unsent: str | None, _: Tensor) -> None:
        if leaf is None or writes_into(leaf):  # torch.autograd.grad writes into none
            self._begin()
            self._through, self._unsent = True, unsent

    def written(self, param: nn.Parameter) -> None:
        """A gradient was written, by whichever backward."""
        if self._averages and param not in self._averaged:
            self._averaged.add(param)
            ddp = self._ddp() if self._left else None
            if ddp is not None and (ddp.find_unused_parameters or ddp.static_graph):
                self._left.clear()  # it averages also what this backward does not reach
            elif ddp is not None:
                self._left.pop(param, None)
            return
        self._begin()
        if self._through or (hook := self._hook()) is None or not hook.traced:
            around = _AROUND.format(self._made_by)
            self._left[param] = self._unsent or (_ONCE if self._through else around)

    def _begin(self) -> None:
        if self._ends() is None:
            self._through, self._unsent = False, None
            # Backwards within this one, as of re-entrant checkpointing, find it alive.
            ends = partial(_nothing)
            self._ends = ref(ends)
            at_end_of_backward(ends)


_watched: WeakKeyDictionary[DistributedDataParallel, Averaging] = WeakKeyDictionary()


def _nothing() -> None:
    """As a reference to what is gone, and as what the end of a backward calls."""


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class _Hook:
    """After a forward. A copy of the module, or what is read from its pickle, calls nothing. `traced`: whether
    torch.compile runs the forward of the wrapper itself, of which nothing is noted."""

    def __init__(self, to: Averaging | None = None) -> None:
        self._to, self.traced = to, False

    def __call__(self, ddp: Any, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self.traced = True
        elif self._to is not None:
            self._to.forward_ended(ddp, output)

    def __reduce__(self) -> Any:
        return _Hook, ()
