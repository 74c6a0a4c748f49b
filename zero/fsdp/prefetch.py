"""How many units are in flight at once, and so how far ahead they are gathered. The root unit, which stays unsharded
from forward to backward, does not count.

    1   one at a time: nothing is gathered ahead, and gradients are reduced before the next unit is gathered
    2   while a unit computes, the next unit's all-gather or the last unit's reduction is in flight: in backward the
        reduction in the first half of a unit, and the all-gather in the second; where transfers overlap computing, the
        next unit is gathered after the gradients of the current one are computed
    3   both are: the next unit is gathered before the current one computes, in forward and in backward

For a unit in flight a rank holds the full parameters (B bytes) and the full gradients (B), or, during their reduction,
the gradients and the receive buffers (2 B): never more than 2 B. So besides shards a step takes at most 2 B times the
number. Where transfers overlap computing, the receive buffers take B / W (B if gradients are sent in 16 bits; W ranks),
and a step takes at most 4 B + B / W: parameters and gradients of the unit that computes, parameters of the next unit,
gradients and receive buffers of the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero.fsdp.unit import Index, Need, Unit

OF_FSDP1 = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
_BACKWARD = {"BACKWARD_PRE": 3, "BACKWARD_POST": 2, None: 1}


def as_prefetch(given: Any) -> int | None:
    """Returns the number, None for the default. Raises ValueError for other values."""
    if given is None or (type(given) is int and given in (1, 2, 3)):
        return given
    raise ValueError(
        f"prefetch={given!r}: pass how many units are in flight at once, 1, 2 or 3, or None for the default."
    )


def in_flight(given: int | None, *, overlaps: bool) -> int:
    """Resolves the default. overlaps: whether transfers overlap computing."""
    return given or (3 if overlaps else 2)


def of_fsdp1(given: Mapping[str, Any]) -> int | None:
    """The number that stands for options of PyTorch's FSDP1: BACKWARD_PRE (3), BACKWARD_POST (2) and None (1), by enum
    or name; limit_all_gathers=False (3). forward_prefetch says no more: a number holds for forward and backward.

    Raises ValueError for other values."""
    for name in OF_FSDP1[1:]:
        if not isinstance(given.get(name, False), bool):
            raise ValueError(f"{name}={given[name]!r}: pass True or False, or leave it out and pass prefetch.")
    if not given.get("limit_all_gathers", True):
        return 3
    if "backward_prefetch" not in given:
        return None
    name = getattr(given["backward_prefetch"], "name", given["backward_prefetch"])
    if name not in _BACKWARD:
        raise ValueError(f"backward_prefetch={name!r} is unknown. Choose BACKWARD_PRE, BACKWARD_POST or None.")
    return _BACKWARD[name]


class Order:
    """Which unit follows which in forward, as units ran last, and which ones were gathered ahead by that. The root,
    which computes around all others, follows none.

    ahead: whether units are gathered ahead in forward.
    """

    def __init__(self, index: Index, *, ahead: bool) -> None:
        self._index, self._root, self._gathers_ahead = index, index.units[0], ahead
        self._after: dict[Unit, Unit] = {}
        self._before: dict[Unit, Unit] = {}
        self._last_entered = self._root
        # Gathered ahead, and did not begin their forward yet.
        self._ahead: set[Unit] = set()

    def enter(self, unit: Unit) -> None:
        """A forward of the unit begins. Launches the all-gather of the one that followed last time."""
        if unit is not self._root and unit is not self._last_entered:
            self._after[self._last_entered], self._before[unit] = unit, self._last_entered
        self._last_entered = unit
        self._ahead.discard(unit)
        unit.needed_by.discard(Need.AHEAD)
        # Only within a forward of the whole model, at whose end it is resharded if it did not run. After another method
        # it would stay, and a later forward would not read what was written into its shards meanwhile.
        whole = self._root in self._index.running and self._root.entry_module is None
        following = self._after.get(unit)
        if whole and following is not None and self._gathers_ahead:
            following.unshard(ahead=True)
            following.needed_by.add(Need.AHEAD)
            self._ahead.add(following)

    def leave_root(self) -> None:
        """The forward of the model ends: backward begins with the unit that ran last."""
        self._before.pop(self._root, None)
        if self._last_entered is not self._root:
            self._before[self._root] = self._last_entered
        while self._ahead:
            self._ahead.pop().release(Need.AHEAD)  # it did not run this time

    def is_first_in_backward(self, unit: Unit) -> bool:
        """Whether backward reached this unit first, last time."""
        return unit is self._before.get(self._root)

    def launch_before(self, unit: Unit) -> None:
        """Launches the all-gather of the unit that backward is expected to reach after this one, unless it is in
        backward."""
        following = self._before.get(unit)
        if following is not None and following.calls and Need.BACKWARD not in following.needed_by:
            following.unshard(for_backward=True, ahead=True)
            following.needed_by.add(Need.AHEAD)

    def forget(self) -> None:
        """An error has ended the forward."""
        self._ahead.clear()
