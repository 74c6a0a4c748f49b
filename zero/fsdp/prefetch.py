"""How far ahead units are gathered, and how many units are in flight at once.

For a unit in flight a rank holds the full parameters (B bytes) and the full gradients (B), or, during their reduction,
the gradients and the receive buffers (2 B): never more than 2 B. So besides shards a step takes at most 2 B times the
limit. Where transfers overlap computing, the receive buffers take B / W (B if gradients are sent in 16 bits; W ranks),
and a step takes at most 4 B + B / W: parameters and gradients of the unit that computes, parameters of the next unit,
gradients and receive buffers of the last.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class BackwardPrefetch(enum.Enum):
    """When the next unit is gathered in backward. Has PyTorch's names; PyTorch's own enum is accepted, too."""

    BACKWARD_PRE = "before the gradients of the current unit are computed: overlaps most"
    BACKWARD_POST = "after they are computed, during their reduction: one unit less in memory"


@dataclass(frozen=True)
class Prefetch:
    """Which units an FSDP gathers ahead, and how many are in flight at once.

    backward_prefetch: a BackwardPrefetch or its name; None gathers each unit when backward reaches it. "auto" is
        BACKWARD_PRE if transfers overlap computing, as over NCCL, and the limit is 3; otherwise BACKWARD_POST.
    forward_prefetch: gathers the next unit while the current unit computes in forward, in the order of the last
        forward. None does so if transfers overlap computing.
    limit: how many units may be in flight at once, 1 to 3; None means 3 if transfers overlap computing, otherwise 2.
        1: nothing is gathered ahead, and gradients are reduced before the next unit is gathered. 2: while a unit
        computes, the next unit's all-gather or the last unit's reduction is in flight. 3: both are. The root unit,
        which stays unsharded from forward to backward, does not count. A limit of 1 also makes units of large modules
        without children (embeddings, heads).

    Raises ValueError for other values.
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
        """Returns the options with "auto" and None resolved. overlaps: whether transfers overlap computing."""
        limit = self.limit or (3 if overlaps else 2)
        backward = self.backward_prefetch
        if backward == "auto":
            backward = BackwardPrefetch.BACKWARD_PRE if overlaps and limit == 3 else BackwardPrefetch.BACKWARD_POST
        forward = overlaps if self.forward_prefetch is None else self.forward_prefetch
        return Prefetch(None, False, limit) if limit == 1 else Prefetch(backward, forward, limit)


MEMORY_FIRST = Prefetch(backward_prefetch=None, forward_prefetch=False, limit=1)
"""Has one unit in flight, and gathers nothing ahead."""

SPEED_FIRST = Prefetch(BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True, limit=3)
"""Has three units in flight, and gathers the next unit as early as possible in forward and backward."""


def as_prefetch(given: Any) -> Prefetch:
    """Converts a BackwardPrefetch of zero or PyTorch, its name or None to a Prefetch. Raises ValueError for others."""
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
