"""Writes into unsharded parameters, such as averages and clamps: each element keeps its owner's value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isqrt

import torch
from torch import Tensor

from zero._torch.autograd import writes_so_far
from zero._torch.tensors import has_values
from zero.comm.streams import STEP_GRAPH
from zero.shards.shard_group import ShardGroup

# Elements that are compared at a time, so that temporaries are small.
_CHUNK = 2**18

_LOST = (
    "parameters of {} were written through `.data` in a forward, which FSDP looks for in the first two forwards, and "
    "then in ever fewer. What was written before may be lost. Write so that torch counts it, `p.copy_(...)` under "
    "torch.no_grad(), or set ZERO_CHECK=each in the environment of every rank."
)


class Writes:
    """Detects writes into the unsharded parameters of one shard group, and copies them into the shard.

    torch does not count writes through `param.data`. To look for these reads the entire shard, so it is done in a few
    forwards and their backwards (`Search`); once there were some, they are expected from then on.

    `looks`: whether that is now. `missed`: whether it was not in the forward before.
    """

    def __init__(self, group: ShardGroup) -> None:
        self.looks = self.missed = False
        self._group, self._uncounted = group, False
        # torch's count of writes at the last all-gather.
        self.when_gathered = 0

    def take_over(self, *, left: bool = False) -> str | None:
        """Called before the full parameters are freed. After writes it copies elements that differ into the shard;
        where `full` has a lower precision, the others keep theirs. Returns an error message if earlier writes may be
        lost.

        left: a forward has left them for a backward that has not come: what was written meanwhile counts, through
            `.data`, too."""
        # The shard has no memory now; the reshard copies all of it from `full`, with whatever was written.
        if self._group.shard_in_full:
            return None
        if left:
            self._copy()
            return None
        counted = writes_so_far(self._group.params) != self.when_gathered
        found = self.looks and not self._uncounted and not counted and self._differs()
        self._uncounted |= found
        if not counted and not self._uncounted:
            return None
        self._copy()
        return _LOST.format(self._group.label) if found and self.missed else None

    def _copy(self) -> None:
        with torch.no_grad():
            for now, own, gathered in self._chunks():
                same = (now == gathered).to(own.device)
                own.copy_(torch.where(same, own, now.to(own)))

    def _differs(self) -> bool:
        return has_values(self._group.full) and any(
            not torch.equal(now, gathered) and not _equal_with_nan(now, gathered) for now, _, gathered in self._chunks()
        )

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields chunks of this rank's segment of `full` and of the shard, and of the shard as it was gathered."""
        group = self._group
        for now, own in zip(group.own_of_full.split(_CHUNK), group.shard.split(_CHUNK), strict=True):
            yield now, own, own.to(now)


def _equal_with_nan(one: Tensor, other: Tensor) -> bool:
    """As where a run has diverged: NaN is equal to NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


class Search:
    """Says in which forwards of a model writes through `.data`, and reads of other units, are looked for: in forward 1,
    2, 5, 8, 13 ... of a mode (`module.training`), or in each. What is first found after forwards in which nobody
    looked raises.

    `forwards`: how many forwards of the model have begun, by mode.
    """

    def __init__(self) -> None:
        self.forwards: Counter[bool] = Counter()
        # The same of calls of other methods, and of the model within a backward.
        self._other_calls: Counter[bool] = Counter()
        self._looks = False

    def begin(self, writes: Iterable[Writes], *, mode: bool, whole: bool, each: bool) -> bool:
        """A forward begins. Returns whether to look. whole: it is one of the model, and not of another method or within
        a backward. each: whether every forward is searched."""
        forwards = self.forwards if whole else self._other_calls
        forwards[mode] += 1
        number = forwards[mode]
        due = (each or (_is_fibonacci(number) and number != 3)) and not STEP_GRAPH.recorded  # to look reads values
        # Also after one that was due, to end the search.
        if due or self._looks:
            self._looks, missed = due, number > 2 and not each
            for one in writes:
                one.looks, one.missed = self._looks, missed
        return due


def _is_fibonacci(number: int) -> bool:
    """Some of these numbers are multiples of any number, so that what a user does every third time is looked for."""
    return any(isqrt(square) ** 2 == square for square in (5 * number**2 - 4, 5 * number**2 + 4))
