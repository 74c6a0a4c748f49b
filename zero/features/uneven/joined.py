"""Training with different numbers of batches on different ranks, at every stage.

Inside zero.join each rank announces to the others what it does next. A rank whose data has ended does the same as the
others, until the data of all has ended:

    forward     of its last batch again, so that its operations are in the same order as the others'
    backward    of this forward, with gradients of zero (repeat.py)
    the rest    (step, clipping, loss scaling, zero_grad, schedulers) with the arguments of the others

While all ranks have data, an announcement is only a comparison of signatures, as at the end of a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch import at_end_of_backward, keeps_graph, writes_into, writes_so_far
from zero.features.uneven.messages import (
    METHODS,
    Message,
    Ranks,
    as_plain,
    from_plain,
    plain_options,
    problem_in,
    replace,
    take_options,
)
from zero.features.uneven.repeat import Call, Repeat, outputs_in
from zero.fsdp import FSDP
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.oss.gradients import full_gradient


class _Forward:
    """A forward whose backward may follow, as long as its graph is alive."""

    def __init__(self, call: Call, outputs: Sequence[Tensor]) -> None:
        self.call, self._outputs = call, [ref(tensor) for tensor in outputs]

    def is_reached(self) -> bool:
        """Whether the backward that is running now, which began at another forward, reaches this one. Also True if its
        outputs are gone and only the graph is left."""
        alive = [tensor for output in self._outputs if (tensor := output()) is not None]
        return not alive or any(writes_into(tensor.grad_fn) for tensor in alive if tensor.grad_fn is not None)


class Joined:
    """A model, and its optimizers, schedulers and scaler. Messages name all of them by their place in one list."""

    def __init__(self, model: Any, others: Sequence[Any], ranks: Ranks, divide_by_initial: bool, throw: bool) -> None:
        self._model, self._all, self._ranks = model, [model, *others], ranks
        self._optimizers = [one for one in others if isinstance(one, Optimizer)]
        self._divide_by_initial, self._throw = divide_by_initial, throw
        self._repeat = Repeat(model)
        self._busy = False
        """Whether a method runs that was announced; what it calls is not announced."""
        self._ended_before = self._over = self._all_know = self._in_backward = False
        self._forwards, self._factor, self._kind = 0, 1.0, ""
        self._pending: WeakValueDictionary[int, _Forward] = WeakValueDictionary()
        self._seen, self._changed = self._gradients(), False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """In this context the user's calls are announced before they run."""
        disable = partial(torch.compiler.disable, reason="zero.join announces each forward to other ranks")
        with ExitStack() as stack:
            before = self._model.register_forward_pre_hook(disable(self._forward), prepend=True, with_kwargs=True)
            after = self._model.register_forward_hook(disable(self._forward_done))
            stack.callback(before.remove)
            stack.callback(after.remove)
            for place, one in enumerate(self._all):
                for name in METHODS:
                    if hasattr(type(one), name):
                        stack.callback(replace(one, name, partial(self._called, place, name)))
            try:
                yield
            finally:
                self._over = True
                self._repeat.forget()

    # ------------------------------------------------------------------------------- a rank that has data

    def _forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._busy:
            return
        self._in_backward = False  # an exception may have ended the last backward
        self._forwards += 1
        self._call = self._repeat.remember(args, kwargs)
        self._kind = self._call.kind
        act = {"do": "forward", "number": self._forwards, "gradients": torch.is_grad_enabled()}
        self._announce({**act, "training": self._model.training, "reduced": self._model.require_backward_grad_sync})

    def _forward_done(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._busy or not torch.is_grad_enabled():
            return
        outputs = outputs_in(output)
        forward = _Forward(self._call, [tensor for tensor, _ in outputs])
        for place, (tensor, leaf) in enumerate(outputs):  # their graph keeps `forward` alive
            tensor.register_hook(partial(self._reached, forward, place, leaf))
        self._pending[self._forwards] = forward

    def _reached(self, forward: _Forward, place: int, leaf: Node | None, gradient: Tensor) -> Tensor | None:
        """Called when a backward is at an output: one that leaves gradients, or an inner torch.autograd.grad."""
        if self._over or not (leaf is None or writes_into(leaf)):
            return None
        if not self._in_backward:
            self._begin_backward(forward)
        forward.call.reached.add(place)
        return None if self._factor == 1 else gradient * self._factor

    def _begin_backward(self, first: _Forward) -> None:
        reached = sorted(number for number, one in self._pending.items() if one is first or one.is_reached())
        reduced, keeps = self._model.require_backward_grad_sync, keeps_graph()
        with_data = self._announce({"do": "backward", "of": reached, "reduced": reduced, "keeps_graph": keeps})
        self._factor = 1.0 if self._divide_by_initial else self._ranks.world / with_data
        for number in [] if keeps else reached:
            self._pending.pop(number, None)
        self._in_backward = True
        at_end_of_backward(lambda: at_end_of_backward(self._backward_ends))  # after the wrapper's own callbacks

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._seen = self._gradients()

    def _called(self, place: int, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._busy or self._over:
            return original(*args, **kwargs)
        act: Message = {"do": "call", "on": place, "name": name}
        problem = None
        try:
            act["args"] = [as_plain(value, self._all) for value in args]
            act["kwargs"] = {key: as_plain(value, self._all) for key, value in kwargs.items()}
        except TypeError as error:
            problem = f"{type(self._all[place]).__name__}.{name} was given {error}"
        self._announce(act, problem)
        self._busy = True
        try:
            return original(*args, **kwargs)
        finally:  # from here on all ranks have the same gradients again
            self._busy, self._changed, self._seen = False, False, self._gradients()

    def _gradients(self) -> tuple[int, int, int]:
        """The number of gradients, the sum of their addresses, and how often they were written into."""
        found = [
            gradient
            for one in self._optimizers
            for optimizer in ((one, one.optim) if isinstance(one, OSS) else (one,))
            for param in params_of(optimizer)
            if (gradient := full_gradient(param)) is not None
        ]
        return len(found), sum(gradient.data_ptr() for gradient in found), writes_so_far(found)

    # --------------------------------------------------------------------------------------- announcements

    def _announce(self, act: Message, problem: str | None = None) -> int:
        """Collective. Returns how many ranks have data. Raises RuntimeError on every rank where one has a problem."""
        now = self._gradients()
        cleared = now != self._seen and not now[0]
        self._changed = bool(now[0]) and (self._changed or now != self._seen)
        self._seen = now
        if self._changed and problem is None:
            problem = _changed_problem(self._model)
        if self._ranks.agree(act, flag=problem is not None):
            return self._ranks.world
        shown = {"cleared": cleared, "changed": self._changed, "kind": self._kind, "alive": [*self._pending]}
        message = {"act": act, "problem": problem, "options": plain_options(self._optimizers), **shown}
        return len(self._hear(self._ranks.gather(message)))

    def announce_failure(self, error: Exception) -> None:
        """Collective, unless all ranks know. This rank leaves by an error.

        Not within a backward of DistributedDataParallel: other ranks wait there without reading messages, and this
        rank would wait for them.
        """
        if not self._all_know and not (self._in_backward and isinstance(self._model, DistributedDataParallel)):
            with suppress(RuntimeError):  # other ranks may have failed by now, too
                self._ranks.agree(None)
                self._ranks.gather({"problem": f"left zero.join by {type(error).__name__}: {error}"})

    def _hear(self, messages: Sequence[Message]) -> list[int]:
        """Collective. Returns the ranks that have data. Raises RuntimeError, on every rank, where they cannot go on."""
        active = [rank for rank, message in enumerate(messages) if "act" in message]
        problem = problem_in(messages, active, throw=self._throw)
        if problem is not None:
            self._all_know = True
            raise RuntimeError(problem)
        if active:
            self._send_along(messages, active)
        return active

    def _send_along(self, messages: Sequence[Message], active: Sequence[int]) -> None:
        """Collective. Sends ranks without data what they need from the others."""
        do, source = messages[active[0]]["act"]["do"], active[0]
        if do == "forward" and source != 0:  # all ranks use rank 0's buffers
            buffers = self._repeat.buffers()
            copies = [buffer.detach().clone() for buffer in buffers]
            self._ranks.broadcast(copies, source)
            for buffer, copy in zip(buffers, copies, strict=True) if self._ranks.rank == 0 else ():
                buffer.data.copy_(copy)
        if do == "call" and any(messages[rank]["changed"] for rank in active):
            params = [param for optimizer in self._optimizers for param in params_of(optimizer)]
            self._ranks.broadcast([param.grad for param in params if param.grad is not None], source)

    # -------------------------------------------------------------------------- a rank whose data has ended

    def follow(self) -> None:
        """Collective. Does what ranks with data do, until no rank has data."""
        self._busy = True
        with self._repeat.without_gradients():
            while self._follow_one():
                self._ended_before = True

    def _follow_one(self) -> bool:
        own = {"ended_before": self._ended_before, "forwards": self._forwards}
        self._ranks.agree(None)
        messages = self._ranks.gather({**own, "options": plain_options(self._optimizers)})
        active = self._hear(messages)
        last = active or [rank for rank, message in enumerate(messages) if not message["ended_before"]]
        source = messages[last[0]]
        take_options(self._optimizers, source["options"])
        if any(messages[rank]["cleared"] for rank in active):
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        if active:
            self._repeat.keep(source["alive"])
            self._do(source["act"], source["kind"])
        elif len(last) < len(messages):
            self._ranks.broadcast(self._repeat.buffers(), last[0])
        return bool(active)

    def _do(self, act: Message, kind: str) -> None:
        if act["do"] == "forward":
            self._repeat.forward(act, kind)
        elif act["do"] == "backward":
            self._in_backward = True
            self._repeat.backward(act)
            self._in_backward = False
        else:
            args = [from_plain(value, self._all) for value in act["args"]]
            kwargs = {key: from_plain(value, self._all) for key, value in act["kwargs"].items()}
            getattr(self._all[act["on"]], act["name"])(*args, **kwargs)


def _changed_problem(model: nn.Module) -> str | None:
    """An error message for gradients that were changed by hand. Below stage 2 there is none: every rank has the full
    gradients, and ranks without data are sent the changed ones."""
    if isinstance(model, DistributedDataParallel):
        return None
    how = "model.clip_grad_norm_" if isinstance(model, FSDP) else "optimizer.clip_grad_norm"
    return (
        "gradients were changed between backward and step by something that zero.join was not given. Ranks without "
        f"data would not change their shards. Clip with {how}, pass the GradScaler to zero.join, or change gradients "
        "in a hook, on every rank: optimizer.register_step_pre_hook(hook)."
    )
