"""How far ahead units are gathered, and how many are in flight at once.

Of a unit in flight a rank holds its full parameters (B bytes), its full gradients (B), or, while these are on their
way, the gradients and what comes in (2 B): never more than 2 B. So besides what lies in shards a step takes 2 B times
the limit at most. Where transfers overlap computing, what comes in is B / W (B where 16 bits travel), and a step takes
4 B + B / W at most: parameters and gradients of the unit that computes, the next one's parameters, and the last one's
gradients, with what comes of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class BackwardPrefetch(enum.Enum):
    """When, in backward, the unit that comes next is gathered. PyTorch's names; its own enum is understood too."""

    BACKWARD_PRE = "before the gradients of the current unit are computed: overlaps most"
    BACKWARD_POST = "after that, while they are on their way: one unit less in memory"


@dataclass(frozen=True)
class Prefetch:
    """What an FSDP gathers before it is needed.

    backward_prefetch: a BackwardPrefetch or its name; None gathers each unit when backward reaches it. "auto" is
        BACKWARD_PRE where transfers overlap computing, as over NCCL, if the limit is 3; elsewhere BACKWARD_POST.
    forward_prefetch: in forward, gather the unit that came next the last time while the current one computes. None does
        so where transfers overlap computing.
    limit: how many units may be in flight at once, 1 to 3; None is 3 where transfers overlap computing, 2 elsewhere.
        With 1 a unit's gradients have been reduced before the next is gathered, and nothing is gathered ahead. With 2
        either the next unit's parameters or the last one's gradients are on their way while one computes, with 3 both.
        The root unit, which stays from forward to backward, is not counted; a limit of 1 also makes units of large
        modules that hold nothing but parameters (embeddings, heads).

    Raises ValueError for what is none of these.
    """

    backward_prefetch: Any = "auto"
    forward_prefetch: bool | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        when = self.backward_prefetch
        name = when if isinstance(when, str) else getattr(when, "name", when)
        if name not in (None, "auto") and not (isinstance(name, str) and name in BackwardPrefetch.__members__):
            known = ", ".join(BackwardPrefetch.__members__)
            raise ValueError(f"backward_prefetch={when!r} is unknown. Choose one of {known}, 'auto', or None.")
        if self.limit not in (None, 1, 2, 3):
            raise ValueError(f"limit={self.limit!r}: how many units are in flight at once is 1, 2, 3, or None.")
        chosen = name if name in (None, "auto") else BackwardPrefetch[name]
        object.__setattr__(self, "backward_prefetch", chosen)

    def where(self, *, overlaps: bool) -> Prefetch:
        """What is left open chosen. overlaps: whether transfers overlap computing."""
        limit = self.limit or (3 if overlaps else 2)
        backward = self.backward_prefetch
        if backward == "auto":
            backward = BackwardPrefetch.BACKWARD_PRE if overlaps and limit == 3 else BackwardPrefetch.BACKWARD_POST
        return Prefetch(backward, overlaps if self.forward_prefetch is None else self.forward_prefetch, limit)

    @property
    def before_forward(self) -> bool:
        return self.limit != 1 and self.forward_prefetch is True

    @property
    def before_backward(self) -> bool:
        return self.limit != 1 and self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE

    @property
    def after_backward(self) -> bool:
        return self.limit != 1 and self.backward_prefetch is BackwardPrefetch.BACKWARD_POST


MEMORY_FIRST = Prefetch(backward_prefetch=None, forward_prefetch=False, limit=1)
"""One unit at a time."""

SPEED_FIRST = Prefetch(BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True, limit=3)
"""Whatever can be on its way while something computes is."""


def as_prefetch(given: Any) -> Prefetch:
    """Takes a BackwardPrefetch, zero's or PyTorch's, or its name too. Raises ValueError for what is none."""
    if given is None:
        return Prefetch()
    if isinstance(given, Prefetch):
        return given
    try:
        return Prefetch(given)
    except ValueError as error:
        raise ValueError(
            f"prefetch={given!r}: pass a zero.Prefetch, zero.MEMORY_FIRST, zero.SPEED_FIRST, a BackwardPrefetch "
            "(zero's or PyTorch's), or None for the default."
        ) from error
