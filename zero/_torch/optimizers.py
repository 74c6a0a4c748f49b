"""Optimizers, and the schedulers and gradient scalers that step them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import ref

from torch.optim import Optimizer
from torch.optim import optimizer as hooks
from torch.optim.lr_scheduler import LRScheduler

from zero._torch.modules import OwnHook


def takes_state_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be registered on its state_dict()."""
    # A subclass, such as one that wraps another optimizer, may not have called the constructor of Optimizer, which
    # makes the table of hooks.
    return hasattr(optimizer, "_optimizer_state_dict_post_hooks")


def with_state_hooks(optimizer: Optimizer, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns in place of the optimizer's own state_dict(), between the user's hooks on that."""
    if not takes_state_hooks(optimizer):
        return make()
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    found = make()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = None if isinstance(after, OwnHook) else after(optimizer, found)
        found = found if changed is None else changed
    return found


def with_load_hooks(optimizer: Optimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Calls `load` in place of the optimizer's own load_state_dict(), between the user's hooks on that."""
    state_dict = dict(state_dict)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    load(state_dict)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


class HooksOfSteps:
    """Hooks of one optimizer's own, the last before a step and the first after it. torch can register hooks at the end
    only: its tables, which have no public names, are ordered dictionaries.

    tell: called with the optimizer and what a hook of the user's raises, also one of every optimizer."""

    # It does not keep the optimizer, which keeps the hooks.
    def __init__(self, optimizer: Optimizer, before: Any, after: Any, tell: Callable[[Any, Exception], None]) -> None:
        self._before = Optimizer.register_step_pre_hook(optimizer, before).id
        self._after = Optimizer.register_step_post_hook(optimizer, after).id
        self._tell = tell

    def take_their_places(self, optimizer: Optimizer) -> None:
        """Called by the first hook before the step of any optimizer: torch looks at the others afterwards."""
        before: Any = optimizer._optimizer_step_pre_hooks
        after: Any = optimizer._optimizer_step_post_hooks
        before.move_to_end(self._before)
        after.move_to_end(self._after, last=False)
        for table in (before, after, hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks):
            for number, hook in table.items():  # values alone change, which a loop over the table allows
                if number not in (self._before, self._after, _first) and not isinstance(hook, _Told):
                    table[number] = _Told(hook, self._tell)


class _Told:
    """In the place of a hook of the user's in torch's table, from which its own handle removes it."""

    def __init__(self, hook: Callable[..., Any], tell: Callable[[Any, Exception], None]) -> None:
        self._hook, self._tell = hook, tell

    def __call__(self, optimizer: Optimizer, *given: Any) -> Any:
        try:
            return self._hook(optimizer, *given)
        except Exception as error:
            self._tell(optimizer, error)
            raise


_first = -1
"""The number of the hook that is called first before the steps of all optimizers."""


def call_first(hook: Callable[..., Any]) -> None:
    """Has a hook be called before the steps of all optimizers, and before all other hooks."""
    global _first
    _first = hooks.register_optimizer_step_pre_hook(hook).id
    table: Any = hooks._global_optimizer_pre_hooks
    table.move_to_end(_first, last=False)


def move_hooks(optimizer: Optimizer, to: Optimizer) -> None:
    """Makes an optimizer's hooks those of another.

    The tables themselves move, in which the handles that registering has returned remove hooks."""
    for name in [name for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")]:
        hooks = vars(optimizer)[name]
        hooks.update(vars(to)[name])
        setattr(to, name, hooks)
        setattr(optimizer, name, OrderedDict())


def is_of_scheduler(step: Callable[..., Any]) -> bool:
    """Whether a scheduler has put this function in the place of the optimizer's step, which it counts."""
    return getattr(step, "_wrapped_by_lr_sched", False)


def call_stepped(optimizer: Optimizer) -> None:
    """Keeps schedulers from warning that the optimizer was never stepped. What they read has no public name."""
    vars(optimizer)["_opt_called"] = True


@contextmanager
def without_optimizer_hooks() -> Iterator[None]:
    """In this context the hooks on the steps of all optimizers are not called."""
    # Public methods remove hooks one by one. The tables are replaced rather than emptied: this may run in a hook, which
    # is called in a loop over a table.
    before, after = hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks
    try:
        hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks = type(before)(), type(after)()
        yield
    finally:
        hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks = before, after


def follow(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Has a scheduler, and the schedulers that it consists of, schedule this optimizer instead of its own."""
    for one in (scheduler, *getattr(scheduler, "_schedulers", ())):
        one.optimizer = optimizer
    # A scheduler's constructor marks the step of its optimizer, and the scheduler warns where that mark is missing.
    step, held = type(optimizer).step, ref(optimizer)

    @wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        stepped = held()
        stepped._opt_called = True  # type: ignore[union-attr]
        return step(stepped, *args, **kwargs)  # type: ignore[arg-type]

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked  # type: ignore[method-assign]
