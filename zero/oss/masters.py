"""What the optimizer steps in the place of this rank's shards of the parameters, flat and of the length of a shard.

master      of a dtype of more bits, where the parameters have fewer: the parameters are the rounded masters
elsewhere   in the memory of the CPU or in files (offload.py), with the gradients of the shard and the optimizer's
            state: masters, or where the parameters have enough bits, copies of them

After a step they are written into the parameters, and before a step what was written into the parameters since (loaded
weights) is taken over, for there it is the master that is out of date.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zero.comm.streams import apart, streams_of
from zero.oss.offload import ShardStore
from zero.oss.shard_group import ShardGroup

_CHUNK = 2**22
"""Elements that are compared, or rounded, at a time."""


class Masters:
    """Of shard groups whose dtype has fewer bits than `dtype`, and with `store` of all that do not lie there."""

    def __init__(self, dtype: torch.dtype | None, store: ShardStore | None = None) -> None:
        self._dtype, self.store = dtype, store
        self._stepped: dict[ShardGroup, Tensor] = {}
        self._on_their_way: dict[ShardGroup, Any] = {}
        """Events after the gradients that are being brought."""

    def add(self, flat: ShardGroup) -> Tensor:
        """What is stepped of a shard group: its shard itself where nothing else is to be."""
        shard = flat.shard
        if self._is_wider(flat):
            shard = shard.to(self._dtype)
        elif self.store is None or self.store.has(shard):
            return shard
        self._stepped[flat] = shard if self.store is None else self.store.place(shard)
        return self._stepped[flat]

    def _is_wider(self, flat: ShardGroup) -> bool:
        return (
            self._dtype is not None
            and flat.full.is_floating_point()
            and self._dtype.itemsize > flat.full.element_size()
        )

    @property
    def of_more_bits(self) -> bool:
        """Whether there are masters of more bits than the parameters have, which belong to the optimizer's state."""
        return any(self._is_wider(flat) for flat in self._stepped)

    def differ(self) -> bool:
        """Whether any has bits of its own: is another than the parameters in its dtype."""
        chunks = (pair for flat, stepped in self._stepped.items() for pair in _chunks(stepped, flat.shard))
        return any(bool((own != shard.to(own)).any()) for own, shard in chunks)

    def of(self, flat: ShardGroup) -> Tensor | None:
        """The master; None of what has as many bits as the parameters."""
        return self._stepped.get(flat) if self._is_wider(flat) else None

    def settled(self, flat: ShardGroup) -> Tensor | None:
        """A master as the next step takes it; see `settled`."""
        master = self.of(flat)
        return None if master is None else settled(master, flat.shard)

    def refresh(self) -> None:
        """Takes over what was written into the parameters since the last `write`."""
        for flat, stepped in self._stepped.items():
            for own, shard in _chunks(stepped, flat.shard):
                now = shard.to(own.device)
                torch.where(_written(now, own), now.to(own.dtype), own, out=own)
            self._used(stepped)

    def write(self, flats: Iterable[ShardGroup]) -> None:
        """Writes them into this rank's shards of the parameters, rounded."""
        for flat in flats:
            if flat in self._stepped:
                for own, shard in _chunks(self._stepped[flat], flat.shard):
                    shard.copy_(own)  # the host may write into masters from here on
                self._used(self._stepped[flat])

    # ----------------------------------------------------------------------------------------------- elsewhere

    def bring(self, flat: ShardGroup, gradient: Tensor) -> Tensor:
        """A gradient of the shard, in the dtype of what is stepped, where that lies; on its way until `arrive`."""
        stepped, streams = self._stepped.get(flat, flat.shard), streams_of(gradient)
        brought = streams.bring(gradient, stepped)
        if apart(gradient, stepped) and (departure := streams.departure()) is not None:
            self._on_their_way[flat] = departure
        return brought

    def arrive(self, flat: ShardGroup) -> None:
        """The host waits for the gradients that were brought."""
        if flat in self._on_their_way:
            self._on_their_way.pop(flat).synchronize()

    def _used(self, stepped: Tensor) -> None:
        if self.store is not None:
            self.store.used(stepped)


def settled(master: Tensor, shard: Tensor) -> Tensor:
    """A master as the next step takes it: where something else was written into the parameters, that.

    Where nothing was, the master itself. It is not written to: the weights that belong to it may be loaded after it.
    """
    shard = shard.to(master.device)
    written = _written(shard, master)
    return torch.where(written, shard.to(master.dtype), master) if written.any() else master


def _written(shard: Tensor, master: Tensor) -> Tensor:
    return shard != master.to(shard.dtype)


def _chunks(stepped: Tensor, shard: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(stepped.split(_CHUNK), shard.split(_CHUNK), strict=True)
