"""The gradients that one OSS steps: what stands in `param.grad` (zero/wrap/gradients.py), or this rank's slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zero._torch.tensors import as_plain_tensors
from zero.shards.owned_shards import OwnedShards
from zero.shards.shard_group import ShardGroup
from zero.wrap.bucket import FullBucket
from zero.wrap.gradients import OWN_ONLY, OwnedGradient, WideAverage
from zero.wrap.refused import refuse_sparse


class OwnedGradients:
    """`are_sharded`: whether ShardedDDP brings them, each to its owner."""

    def __init__(self, shards: OwnedShards) -> None:
        self.are_sharded, self._shards = False, shards
        # By module: what brings full averages into `param.grad`.
        self._filled_by: WeakKeyDictionary[nn.Module, Sequence[FullBucket]] = WeakKeyDictionary()
        # Gradients of shards that were shown between steps, by parameter: others were assigned.
        self._shown: dict[nn.Parameter, Tensor | None] = {}

    def filled_by(self, buckets: Sequence[FullBucket], module: nn.Module) -> None:
        """These buckets bring full averages of the module's gradients from here on."""
        self._filled_by[module] = buckets

    def cleared(self) -> None:
        """The user has cleared all gradients."""
        self.drop_of_shards()
        for buckets in self._filled_by.values():
            for bucket in buckets:
                bucket.unreduced.clear()

    def wait_for_copies(self) -> None:
        """Makes the host wait for gradients that are on their way to it."""
        for group in self._shards.shard_groups:
            if group.copies:
                group.wait_for_copies()

    def refuse(self) -> None:
        """Raises RuntimeError for a gradient that cannot be stepped: that was not reduced, was assigned, or is another
        parameter's. The other ranks find the same, or wait for this one in vain."""
        for bucket in (bucket for buckets in self._filled_by.values() for bucket in buckets):
            for index in bucket.unreduced:
                if bucket.params[index].grad is not None:
                    raise RuntimeError(
                        f"{bucket.names[index]} has a gradient that was not averaged over the ranks: the "
                        "last backward ran under no_sync(), or failed. Run the last backward before step() outside "
                        "no_sync(), or call reduce(). To average gradients by hand build zero.OSS without zero.setup."
                    )
        for group, index in self._positions() if self.are_sharded else ():
            name, param = group.names[index], group.params[index]
            held, of_shard = param.grad, self._shards[param].grad
            if isinstance(held, OwnedGradient):
                held.refuse_of_others(group, index)
            if of_shard is not None and of_shard is not self._shown.get(param):
                raise RuntimeError(f"the shard of {name} was given a gradient that no backward has brought. {_BY_HAND}")
            if held is not None and (not isinstance(held, OwnedGradient) or held.unreduced is not None):
                raise RuntimeError(
                    f"{name} has a gradient that was not reduced: the last backward ran under no_sync(), or went "
                    "around ShardedDDP, or the gradient was assigned. Run the last backward before step() outside "
                    f"no_sync(), or call reduce(). {OWN_ONLY} {_BY_HAND}"
                )

    def of_shard(self, param: nn.Parameter) -> Tensor | None:
        """What ShardedDDP has brought of a parameter's gradient to this rank."""
        return param.grad.shard if isinstance(param.grad, OwnedGradient) else None

    def show(self, param: nn.Parameter) -> None:
        """Gives the shard of a parameter its gradient, for whoever reads it between steps."""
        shard = self._shards[param]
        if self.are_sharded and shard.grad is self._shown.get(param):
            self._shown[param] = shard.grad = self.of_shard(param)

    def drop_of_shards(self) -> None:
        """Leaves shards without gradients: views would keep those of full parameters past model.zero_grad()."""
        self._shown.clear()
        for shard in self._shards.values():
            shard.grad = None

    def collect(self) -> bool:
        """Puts gradients where the inner optimizer finds them. Returns whether there are any (True if ShardedDDP brings
        them). Raises RuntimeError as `refuse`, and for sparse ones."""
        self.refuse()
        shards = self._shards
        for param, shard in shards.items():
            shard.grad = self.of_shard(param) if self.are_sharded else None
            if not self.are_sharded and param.grad is not None and shard in shards.empty:
                shard.grad = shard.data
        if self.are_sharded:
            return True
        for group, index, share in self._shares():
            shards[group.params[index]].grad = group.to_main(share, for_step=True)
        return any(param.grad is not None for param in shards)

    def _positions(self) -> Iterator[tuple[ShardGroup, int]]:
        return ((group, index) for group in self._shards.shard_groups for index in range(len(group.params)))

    def _shares(self) -> Iterator[tuple[ShardGroup, int, Tensor]]:
        """Yields this rank's slices of the gradients of full parameters, with their groups and positions: views where
        their order in memory allows, with averages in place of what was rounded. Raises RuntimeError for a sparse
        gradient, whichever rank owns it, on all alike."""
        for group, index in self._positions():
            full = group.params[index].grad
            if full is not None and full.is_sparse:
                refuse_sparse(group.names[index])
        for group in self._shards.shard_groups:
            for index in group.shapes.spans:
                full = group.params[index].grad
                if full is None:
                    continue
                with as_plain_tensors():
                    share = group.own_slice(index, full)
                    if isinstance(full, WideAverage):
                        share = torch.where(full.wide.to(share.dtype) == share, full.wide, share.to(full.wide.dtype))
                yield group, index, share


_BY_HAND = "Gradients that no backward computes, as in evolution strategies, are for stage 1: OSS without ShardedDDP."
