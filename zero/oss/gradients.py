"""Gradients of full parameters at stage 1: the slices that this rank steps, and gradients that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from zero.oss.shown_gradients import full_gradient
from zero.shards.shard_group import ShardGroup


def take_gradients(
    groups: Sequence[ShardGroup],
    shards: Mapping[nn.Parameter, nn.Parameter],
    bring: Callable[[ShardGroup, Tensor], Tensor],
) -> bool:
    """Sets the gradient of each shard of this rank to its slice of the parameter's gradient, a view where possible.

    bring: converts a gradient to the dtype and device of the shard. Returns whether any parameter has a gradient.
    Raises RuntimeError for a sparse gradient, whichever rank owns it, so that all ranks raise alike.
    """
    for shard in shards.values():
        shard.grad = None
    for group, index, share in _shares(groups):
        shards[group.params[index]].grad = bring(group, share)
    return any(param.grad is not None for param in shards)


def shares(groups: Sequence[ShardGroup]) -> list[Tensor]:
    """This rank's slices of the gradients of full parameters: views where their order in memory allows.

    Raises RuntimeError for a sparse gradient, whichever rank owns it.
    """
    return [share for _, _, share in _shares(groups)]


def _shares(groups: Sequence[ShardGroup]) -> Iterator[tuple[ShardGroup, int, Tensor]]:
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
