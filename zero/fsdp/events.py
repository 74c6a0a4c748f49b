"""The seam at which features take part in the forward and backward of a model.

A feature subclasses `ModelEvents`, overrides what it needs, and appends itself to `model_events`; from then on each
FSDP makes one (docs/how_it_is_built.md has one that counts all-gathers).

The core calls only what is overridden, so that a feature costs nothing where it has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from zero.fsdp.model import Forward, Model
    from zero.fsdp.unit import Unit
    from zero.shards.shard_group import ShardGroup


class ModelEvents:
    """Does nothing. Methods are called on every rank alike. model: the FSDP's units, and who orders them."""

    def __init__(self, model: Model) -> None:
        self.model = model

    # ------------------------------------------------------------------------------------------- forward

    def forward_begins(self) -> None:
        """No unit is running: the forward of the model begins, or that of one unit by itself."""

    def mode_begins(self) -> None:
        """A forward of the model begins, the first in training or the first in evaluation (`module.training`); with
        ZERO_CHECK=each every one."""

    def companions(self, unit: Unit) -> Iterable[Unit]:
        """Returns other units that must be unsharded where this one computes, in forward and in backward."""
        return ()

    def entering(self, unit: Unit) -> None:
        """A forward of the unit begins. Its parameters are still sharded."""

    def gradients_may_be_late(self) -> bool:
        """Returns whether gradients of the forward of a unit that begins may come after backward has passed it."""
        return False

    def leaving(self, unit: Unit) -> None:
        """The outermost forward of the unit ends. Its parameters are still unsharded."""

    # ------------------------------------------------------------------------------------------ parameters

    def unsharding(self, unit: Unit) -> None:
        """The unit is needed unsharded now, in forward or in backward; it may be already."""

    def unsharded(self, group: ShardGroup) -> None:
        """An all-gather of the group has ended, and its parameters are full."""

    def resharding(self, group: ShardGroup) -> None:
        """The full parameters of the group are about to be freed."""

    # -------------------------------------------------------------------------------------------- backward

    def late(self, unit: Unit) -> bool:
        """Returns whether gradients of the unit may come after backward has passed all of its forwards."""
        return False

    def backward_begins(self) -> None:
        """Backward has reached the first unit."""

    def backward_ends(self, reduced: bool) -> None:
        """Collective. All units are sharded, and gradients are reduced, except under no_sync."""

    def abandoned(self) -> None:
        """An exception has ended a forward or backward, which is forgotten."""

    def scaling(self) -> AbstractContextManager[Any]:
        """Returns a context in which the FSDP scales all gradients by one number, the same on every rank."""
        return nullcontext()

    # ---------------------------------------------------------------------------------- how the model is called

    def hook(self, unit: Unit, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what is registered on a module in place of a hook that unshards or reshards the unit."""
        return function

    def forward(self, run: Forward) -> Callable[..., Any]:
        """Returns what the FSDP calls in its forward in place of `run`."""
        return run

    def dismissed(self, *, unwrapped: bool) -> None:
        """The FSDP has ended: it was unwrapped, or handed its units to the FSDP around it."""


class Events:
    """The events of one model: by the name of a method of ModelEvents the list of those that are overridden."""

    def __init__(self, listeners: Iterable[ModelEvents] = ()) -> None:
        listeners = [*listeners]
        for name, does_nothing in vars(ModelEvents).items():
            if not name.startswith("_"):
                of_all = [getattr(one, name) for one in listeners]
                vars(self)[name] = [method for method in of_all if method.__func__ is not does_nothing]

    def __getattr__(self, name: str) -> list[Callable[..., Any]]:
        raise AttributeError(f"there is no event {name!r}")


model_events: list[Callable[[Any], ModelEvents]] = []
"""Called with the `Model` of each new FSDP."""
