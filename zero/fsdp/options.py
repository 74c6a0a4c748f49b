"""Options of FSDP that others bring: the names of PyTorch's FSDP1, for example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zero.fsdp.prefetch import Prefetch, as_prefetch


@dataclass
class Asked:
    """What the caller asked for in options that may have several names.

    prefetch: None if it was not asked for. before: called with the module before it is looked at.
    """

    prefetch: Any = None
    ignored_modules: list[nn.Module] = field(default_factory=list)
    ignored_parameters: list[nn.Parameter] = field(default_factory=list)
    before: list[Callable[[nn.Module], None]] = field(default_factory=list)

    @property
    def ignored(self) -> list[nn.Parameter]:
        """All ignored parameters, including those of ignored modules."""
        of_modules = (param for module in self.ignored_modules for param in module.parameters())
        return [*dict.fromkeys([*of_modules, *self.ignored_parameters])]

    @property
    def resolved_prefetch(self) -> Prefetch:
        """The Prefetch. Raises ValueError for what is none."""
        return as_prefetch(self.prefetch)


translators: dict[str, Callable[[dict[str, Any], Asked], None]] = {}
"""By the names of options that they know: each takes its options out of the arguments, and sets what they mean. All
names of one translator have the same function. They may raise ValueError."""


def translate(given: dict[str, Any], asked: Asked) -> None:
    """Takes options of other names out of `given`."""
    for one in dict.fromkeys(translators[name] for name in [*given] if name in translators):
        one(given, asked)


def refuse_unknown(given: dict[str, Any], known: set[str]) -> None:
    """Raises TypeError for options that nobody knows. known: further names."""
    unknown = sorted(given.keys() - translators.keys() - known)
    if unknown:
        names = ", ".join(sorted(translators.keys() | known))
        raise TypeError(f"FSDP got an unexpected argument {unknown[0]!r}. Besides its own names it takes {names}.")


def refuse_number_of_ranks(reshard_after_forward: Any) -> None:
    """Raises ValueError for a number of ranks, which FSDP2 takes beside True, False and None."""
    if not isinstance(reshard_after_forward, bool | None):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r}: zero reshards parameters over all ranks (True) or keeps "
            "them until backward (False), not over fewer ranks in between. Pass True or False, or shard within a "
            "smaller group by sharding_strategy='HYBRID_SHARD'."
        )
