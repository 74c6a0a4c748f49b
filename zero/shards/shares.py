"""Which rank gets how much: whole parameters by what their steps cost, and of those that are cut as much as makes
memory equal.

An optimizer such as Muon needs each matrix whole, and takes for its step a time that grows faster than the matrix.
Ranks with equal times then have unequal memory, which the parameters beside the matrices, an embedding above all, make
up for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn


@dataclass(frozen=True)
class Division:
    """owners: the ranks of parameters that stay whole. ends: of the bytes of the parameters that are cut, trained ones
    (True) and frozen ones, the part that lies before the end of each rank's; None: all ranks get the same."""

    owners: Mapping[nn.Parameter, int]
    ends: Mapping[bool, Sequence[float] | None]


class Shares:
    """What each rank has been given so far.

    still_cut: bytes of trained parameters beside those of the first `divide`, such as another optimizer's, which will
        be cut and can make memory equal.
    """

    def __init__(self, world: int, *, still_cut: int = 0) -> None:
        self._still_cut = still_cut
        # By whether parameters are trained: the bytes of each rank, and what its steps of whole parameters cost.
        self._bytes = {trained: np.zeros(world) for trained in (True, False)}
        self._costs = {trained: np.zeros(world) for trained in (True, False)}

    def copy(self) -> Shares:
        made = Shares(len(self._bytes[True]), still_cut=self._still_cut)
        made._bytes = {trained: held.copy() for trained, held in self._bytes.items()}
        made._costs = {trained: held.copy() for trained, held in self._costs.items()}
        return made

    def divide(self, params: Sequence[nn.Parameter], whole: Collection[nn.Parameter]) -> Division:
        """Gives each rank its share of more parameters. whole: those that stay whole."""
        owners: dict[nn.Parameter, int] = {}
        ends: dict[bool, Sequence[float] | None] = {}
        for trained in (True, False):
            alike = [param for param in params if param.requires_grad == trained]
            kept = [param for param in alike if param in whole]
            cut = sum(param.nbytes for param in alike) - sum(param.nbytes for param in kept)
            owners |= self._assign(kept, trained, cut + self._still_cut * trained)
            ends[trained] = self._fill(trained, cut)
        self._still_cut = 0
        return Division(owners, ends)

    def _assign(self, params: Sequence[nn.Parameter], trained: bool, cut: int) -> dict[nn.Parameter, int]:
        """Returns owners by cost, if what is cut can make memory equal; else by bytes. cut: bytes."""
        sizes, prices = [param.nbytes for param in params], [cost(param) for param in params]
        held, spent = self._bytes[trained], self._costs[trained]
        owners = assign(prices, spent)
        after = _with(held, owners, sizes)
        if len(held) * after.max() - after.sum() > cut:
            owners = assign(sizes, held)
            after = _with(held, owners, sizes)
        self._bytes[trained], self._costs[trained] = after, _with(spent, owners, prices)
        return dict(zip(params, owners, strict=True))

    def _fill(self, trained: bool, cut: int) -> Sequence[float] | None:
        held = self._bytes[trained]
        if not cut or np.ptp(held) == 0:
            return None
        level = _level(held, cut)
        given = np.maximum(level - held, 0)
        self._bytes[trained] = np.maximum(held, level)
        return [*map(float, np.cumsum(given) / given.sum())]


def cost(param: nn.Parameter) -> int:
    """What a step of a whole parameter costs beside others: elements times the smaller side of the matrix, as of the
    products by which Muon makes it orthogonal (K. Jordan, Muon, 2024)."""
    rows = param.shape[0] if param.dim() > 1 else 1
    return param.numel() * min(rows, param.numel() // max(rows, 1))


def assign(sizes: Sequence[int], loads: Sequence[float] | NDArray[np.float64]) -> list[int]:
    """Returns an owner for each parameter, such that loads are as equal as uncut parameters allow.

    Longest processing time first (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969): the largest
    parameter goes to the rank with the smallest load, whatever the order of the parameters.
    """
    held = np.array(loads, dtype=np.float64)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        rank = int(held.argmin())  # with many ranks cheaper than a heap, unless there are very many parameters
        owners[index] = rank
        held[rank] += sizes[index]
    return owners


def _with(held: NDArray[np.float64], owners: Sequence[int], amounts: Sequence[int]) -> NDArray[np.float64]:
    return held + np.bincount(np.array(owners, dtype=int), np.array(amounts, dtype=float), len(held))


def _level(held: NDArray[np.float64], amount: float) -> float:
    """To which load ranks are filled up by this amount: as water, ranks that have more get nothing."""
    lowest = np.sort(held)
    levels = (np.cumsum(lowest) + amount) / np.arange(1, len(held) + 1)
    # The first k ranks are filled if the level does not reach the next one.
    return float(levels[np.append(levels[:-1] <= lowest[1:], True).argmax()])
