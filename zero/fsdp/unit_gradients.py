"""The gradients of one unit: this rank's shards of them at rest, and the full ones that autograd writes in backward.

    at rest       `param.grad` is this rank's shard of the averaged gradient, in the shard's shape, for any optimizer
    in backward   `param.grad` is autograd's own full gradient; what was in it before waits in `_resting`
    no_sync       full gradients wait in `_unreduced`; `param.grad` is this rank's share of them, or what rests

What is computed from parameters at rest has gradients of shards, which autograd adds to what is in `param.grad` then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from zero._torch import add_all
from zero.comm import Int8
from zero.oss.shard_group import ShardGroup
from zero.sdp.bucket import GradBucket, Phase


class UnitGradients:
    """Of the parameters in these groups.

    `buckets`: those of the groups.
    `kept`: whether a backward under no_sync came here since the last that was not.
    `sends`: whether gradients are on their way.
    """

    def __init__(self, groups: Sequence[ShardGroup], *, sent_as: torch.dtype | Int8 | None = None) -> None:
        self.buckets = [GradBucket(group, self, sent_as=sent_as) for group in groups]
        self.kept = self.sends = False
        self._resting: dict[nn.Parameter, Tensor] = {}
        self._unreduced: dict[nn.Parameter, Tensor] = {}
        self._shows_resting: set[nn.Parameter] = set()
        """Parameters with an unreduced gradient whose `grad` is what rests, not their share of that."""

    def _trained(self) -> Iterator[tuple[GradBucket, int, nn.Parameter]]:
        for bucket in self.buckets:
            for index in bucket.trained:
                yield bucket, index, bucket.group.params[index]

    # ------------------------------------------------------------------------------------------- a backward

    def enter_backward(self) -> None:
        """From here on autograd may write full gradients; nothing is on its way."""
        for bucket in self.buckets:
            assert bucket.phase is Phase.FILLING
            bucket.notice_trained()
        for _, _, param in self._trained():
            param.grad = self._set_aside(param)

    def _set_aside(self, param: nn.Parameter) -> Tensor | None:
        """Sets the gradient of the shard aside until this backward's joins it; returns the full one that no_sync kept.

        What zero_grad has cleared since is cleared here too.
        """
        shown, param.grad = param.grad, None
        unreduced = self._unreduced.pop(param, None)
        if shown is None:
            self._resting.pop(param, None)
        elif unreduced is None or param in self._shows_resting:
            self._resting[param] = shown
        self._shows_resting.discard(param)
        return None if shown is None else unreduced

    def hand_over(self) -> None:
        """Backward is complete: the buckets take the gradients, to be sent."""
        for bucket, index, param in self._trained():
            gradient, param.grad = param.grad, None
            bucket.take(index, gradient)
        self.sends, self.kept = True, False

    def hand_over_leftovers(self) -> None:
        """The buckets take what backwards under no_sync kept here, after a backward that did not come here."""
        for bucket, index, param in self._trained():
            bucket.take(index, self._set_aside(param))
        self.sends, self.kept = True, False

    def finish(self, title: str) -> None:
        """Waits for this rank's shard of the gradients, and adds it to what was there before. title: of the unit."""
        for bucket, index, param in self._trained():
            if param.grad is not None:  # which autograd lets pass where a shard has the shape of the full parameter
                raise RuntimeError(
                    f"{bucket.group.names[index]} got a gradient after {title} of FSDP had sent its gradients, in one "
                    "backward, and not through what the unit's forward returned. Compute with parameters inside of "
                    "forward, and return what comes of it."
                )
        for bucket in self.buckets:
            if bucket.phase is Phase.REDUCING:
                bucket.finish()
        self.sends = False

    def bring(self, group: ShardGroup, sums: Tensor) -> Tensor:
        """See Destination."""
        return group.bring_to_shard(sums)

    def receive(self, group: ShardGroup, gradients: Mapping[int, Tensor | None]) -> None:
        """See Destination. `param.grad` is the shard's from here on."""
        added: list[tuple[Tensor, Tensor]] = []
        for index, gradient in gradients.items():
            param = group.params[index]
            before = self._resting.pop(param, param.grad)
            if before is not None and gradient is not None:
                added.append((before, gradient))
            param.grad = gradient if before is None else before
        if added:
            group.settle()
            add_all(*zip(*added, strict=True))

    # ----------------------------------------------------------------------------------------- under no_sync

    def take_full(self) -> dict[nn.Parameter, tuple[ShardGroup, int, Tensor]]:
        """Ends a backward under no_sync: its full gradients, for `keep` when the parameters are shards again."""
        found = {param: (bucket.group, i, param.grad) for bucket, i, param in self._trained() if param.grad is not None}
        for param in found:
            param.grad = None
        return found

    def keep(self, full: dict[nn.Parameter, tuple[ShardGroup, int, Tensor]]) -> None:
        """Full gradients stay here; `param.grad` shows this rank's share of them."""
        self.kept = True
        for param in self._resting.keys() - full.keys():  # to which this backward did not come
            param.grad = self._resting.pop(param)
        for param, (flat, index, gradient) in full.items():
            ordered = flat.shapes.in_memory_order(index, gradient)
            span = flat.spans.get(index)
            share = (ordered[span.start : span.stop] if span else ordered[:0]).to(flat.shard)
            param.grad = flat.shapes.shaped(index, share, span) if span else share.view(flat.shard_views[index].shape)
            self._unreduced[param] = gradient

    def unreduced(self, param: nn.Parameter) -> bool:
        """Whether a gradient of the parameter waits here that no_sync kept from its owners."""
        return param in self._unreduced

    # ---------------------------------------------------------------------------------------------- at rest

    def take_resting(self, param: nn.Parameter) -> None:
        """Autograd is about to add a gradient of the shard to `param.grad`.

        Where that shows a share of what no_sync kept, it gets what rests instead.
        """
        if param.grad is None:  # cleared
            self._unreduced.pop(param, None)
            self._resting.pop(param, None)
        elif param in self._unreduced and param not in self._shows_resting:
            param.grad = self._resting.pop(param, None)
            self._shows_resting.add(param)

    # -------------------------------------------------------------------------------------------- exceptions

    def clear_full(self) -> None:
        """Drops what a backward has written that an exception ended."""
        for _, _, param in self._trained():
            param.grad = None
        self.kept = False

    @property
    def waits(self) -> bool:
        """Whether gradients from before a backward that an exception ended are set aside."""
        return bool(self._resting.keys() - self._unreduced.keys())

    def put_back(self) -> None:
        """Puts them where they were. What no_sync kept is kept."""
        for param in self._resting.keys() - self._unreduced.keys():
            param.grad = self._resting.pop(param)

    def abandon(self) -> None:
        """Forgets what was sent, once it has arrived."""
        self.sends = False
        for bucket in self.buckets:
            bucket.abandon()
