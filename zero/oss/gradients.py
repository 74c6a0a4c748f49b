"""The gradients of this rank's shards, and gradients that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from zero.oss.shown_gradients import ShownGradients, full_gradient
from zero.shards import norm
from zero.shards.shard_group import ShardGroup

if TYPE_CHECKING:
    from zero.oss.optimizer import OSS


class OwnedGradients:
    """The gradients of the shards that one OSS steps.

    `arrive_sharded`: whether ShardedDDP sets them; otherwise steps take them from `param.grad`.
    `shown`: what `param.grad` shows after a backward of ShardedDDP.
    """

    def __init__(self, optimizer: OSS) -> None:
        self.arrive_sharded = False
        self.shown = ShownGradients(optimizer.part)
        self._oss = optimizer

    def arrive(self) -> None:
        """Makes the host wait for gradients that are on their way to it."""
        for group in self._oss.shard_groups:
            group.arrive()

    def collect(self) -> bool:
        """Puts gradients where the inner optimizer finds them. Returns whether there are any; True if ShardedDDP sets
        them. Raises RuntimeError for gradients that no_sync left unreduced, and for sparse ones."""
        self.shown.drop_cleared()
        if self.arrive_sharded and not self._oss.saved.asked_for_full:  # who then steps with gradients of its own
            refuse_unreduced(self._oss.shard_groups)
            return True
        shards = self._oss.shards
        for shard in shards.values():
            shard.grad = None
        for group, index, share in _shares(self._oss.shard_groups):
            shards[group.params[index]].grad = group.bring(share)
        return any(param.grad is not None for param in shards)

    def norm(self, norm_type: float) -> Tensor:
        """Collective. Returns the norm of all gradients, 0-dim."""
        if self.arrive_sharded:
            self.shown.drop_cleared()
            refuse_unreduced(self._oss.shard_groups)
            owned = self._oss.shards.gradients()
        else:
            owned = [share for _, _, share in _shares(self._oss.shard_groups)]
        dtypes = {shard.dtype for shard in self._oss.shards.values()}
        return norm.total_norm(owned, self._oss.comm, norm_type, self._oss.shard_groups[0].full.device, dtypes)

    def clip(self, max_norm: float, total: Tensor) -> Tensor:
        """Scales all gradients, whose norm is `total`, to at most max_norm. Returns the norm before."""
        full = [param.grad for param in self._oss.shards if param.grad is not None]
        norm.clip(self._oss.shards.gradients() if self.arrive_sharded else full, total, max_norm)
        return total


def _shares(groups: Sequence[ShardGroup]) -> Iterator[tuple[ShardGroup, int, Tensor]]:
    """Yields this rank's slices of the gradients of full parameters, with their groups and positions: views where
    their order in memory allows. Raises RuntimeError for a sparse gradient, whichever rank owns it, on all alike."""
    for name, gradient in _gradients(groups):
        refuse_sparse(gradient, name)
    for group in groups:
        for index, span in group.spans.items():
            full = group.params[index].grad
            if full is not None:
                ordered = group.shapes.in_memory_order(index, full)
                yield group, index, group.shapes.shaped(index, ordered[span.start : span.stop], span)


def refuse_sparse(gradient: Tensor, name: str) -> None:
    """Raises RuntimeError for a sparse gradient of the parameter of this name."""
    if gradient.is_sparse:
        raise RuntimeError(
            f"{name} has a sparse gradient. zero shards dense ones: build the embedding with sparse=False."
        )


def refuse_unreduced(groups: Sequence[ShardGroup]) -> None:
    """Raises RuntimeError for a gradient that is still in `param.grad`: ShardedDDP has not reduced it."""
    name, gradient = next(_gradients(groups), ("", None))
    if gradient is not None:
        raise RuntimeError(
            f"{name} has a gradient that was not reduced: the last backward ran under no_sync(), or went around "
            "ShardedDDP. Run the last backward before step() outside no_sync(), or call reduce()."
        )


def _gradients(groups: Sequence[ShardGroup]) -> Iterator[tuple[str, Tensor]]:
    for group in groups:
        for param, name in zip(group.params, group.names, strict=True):
            gradient = full_gradient(param)
            if gradient is not None:
                yield name, gradient
