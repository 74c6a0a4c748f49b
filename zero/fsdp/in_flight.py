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

`Order` says which all-gathers run ahead, `Reductions` has those of gradients that are still running.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero._torch.tensors import as_plain_tensors
from zero.fsdp.unit import Index, Need, Unit


class Order:
    """Which unit follows which in forward, as units ran last, and which ones were gathered ahead by that. The root,
    which computes around all others, follows none.

    in_flight: how many units are in flight. overlaps: whether transfers overlap computing.
    """

    def __init__(self, index: Index, in_flight: int, *, overlaps: bool) -> None:
        self.in_flight = in_flight
        self._index, self._root = index, index.root
        self._ahead_in_forward = in_flight == 3 or (in_flight == 2 and overlaps)
        self._after: dict[Unit, Unit] = {}
        self._before: dict[Unit, Unit] = {}
        self._last_entered = self._root
        # Gathered ahead, and did not begin their forward yet.
        self.ahead: set[Unit] = set()

    def enter(self, unit: Unit) -> None:
        """A forward of the unit begins. Launches the all-gather of the one that followed last time."""
        # A unit that runs twice in a row would follow itself, and the unit after it would not be gathered ahead.
        if unit is not self._root and unit is not self._last_entered:
            self._after[self._last_entered], self._before[unit] = unit, self._last_entered
        self._last_entered = unit
        self.ahead.discard(unit)
        unit.needed_by.discard(Need.AHEAD)
        # Only within a forward of the whole model, at whose end it is resharded if it did not run. After another method
        # it would stay, and a later forward would not read what was written into its shards meanwhile.
        whole = self._root in self._index.running and self._root.entry_module is None
        following = self._after.get(unit)
        if whole and following is not None and self._ahead_in_forward:
            following.unshard(ahead=True)
            following.needed_by.add(Need.AHEAD)
            self.ahead.add(following)

    def gather(self, unit: Unit, *, for_backward: bool) -> None:
        """Collective. Gathers a unit that is about to begin its forward, and whose parameters are looked at before."""
        unit.unshard(for_backward=for_backward)
        unit.needed_by.add(Need.AHEAD)
        self.ahead.add(unit)

    def leave_root(self) -> None:
        """The forward of the model ends: backward begins with the unit that ran last."""
        # If no other unit has run, backward has no first unit; the one of the forward before must not stay.
        self._before.pop(self._root, None)
        if self._last_entered is not self._root:
            self._before[self._root] = self._last_entered
        while self.ahead:
            self.ahead.pop().release(Need.AHEAD)  # it did not run this time

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
        self.ahead.clear()


class Reductions:
    """Units whose gradients are being reduced: the last one's are on the wire, which is waited for before the next
    unit's are sent; those of one before it are being summed, or averaged over replicas.

    to_replicas: whether gradients are averaged over replicas after they are reduced.
    """

    def __init__(self, in_flight: int, *, to_replicas: bool) -> None:
        self._in_flight, self._to_replicas = in_flight, to_replicas
        self._units: list[Unit] = []

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._units

    def free_wire(self) -> None:
        """Waits for the reduction in flight, not for sums and averages: a second message would be as large as a unit.
        What is sent next need not wait for these."""
        last = self._units[-1:]
        left = [bucket.wait_for_sent() for unit in last for bucket in unit.buckets]
        self.finish(but=last if any(left) else ())

    def launch(self, unit: Unit) -> None:
        """Collective. Reduces the gradients that the unit's buckets have taken."""
        for bucket in unit.buckets:
            if bucket.trained:
                bucket.launch()
        self._units.append(unit)
        if self._in_flight == 1:
            self.finish()
        elif not self._to_replicas:  # averages over replicas go on beside the computing
            self.finish(but=[unit])

    def finish(self, but: Sequence[Unit] = ()) -> None:
        """Waits until gradients are reduced, all but those of some units."""
        reduced, self._units = [unit for unit in self._units if unit not in but], [*but]
        if reduced:
            with as_plain_tensors():
                for unit in reduced:
                    for bucket in unit.buckets:
                        bucket.finish()

    def clear(self) -> None:
        """An error has ended the backward."""
        self._units.clear()
