"""The gradients that an optimizer of shards takes from full parameters, and those that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from zero.oss.shard_group import ShardGroup


def take_gradients(
    flats: Sequence[ShardGroup],
    shards: Mapping[nn.Parameter, nn.Parameter],
    bring: Callable[[ShardGroup, Tensor], Tensor],
) -> bool:
    """Gives each shard that this rank owns its share of the parameter's gradient: a view, where dtype and order allow.

    bring: gives it the dtype and the device of the shard. Returns whether any parameter has a gradient. Raises
    RuntimeError for a sparse one, whoever owns it, so that all ranks raise alike.
    """
    for shard in shards.values():
        shard.grad = None
    for flat, index, share in _shares(flats):
        shards[flat.params[index]].grad = bring(flat, share)
    return any(param.grad is not None for param in shards)


def shares(flats: Sequence[ShardGroup]) -> list[Tensor]:
    """What this rank owns of the gradients of full parameters: views, where their order in memory allows.

    Raises RuntimeError for a sparse gradient, whoever owns it.
    """
    return [share for _, _, share in _shares(flats)]


def _shares(flats: Sequence[ShardGroup]) -> Iterator[tuple[ShardGroup, int, Tensor]]:
    for name, gradient in _gradients(flats):
        refuse_sparse(gradient, name)
    for flat in flats:
        for index, span in flat.spans.items():
            full = flat.params[index].grad
            if full is not None:
                ordered = flat.shapes.in_memory_order(index, full)
                yield flat, index, flat.shapes.shaped(index, ordered[span.start : span.stop], span)


def refuse_sparse(gradient: Tensor, name: str) -> None:
    """Raises RuntimeError for a sparse gradient of the parameter of this name."""
    if gradient.is_sparse:
        raise RuntimeError(
            f"{name} has a sparse gradient. zero shards dense ones: build the embedding with sparse=False."
        )


def refuse_unreduced(flats: Sequence[ShardGroup]) -> None:
    """Raises RuntimeError for a gradient that ShardedDDP has left with its parameter: it was not reduced."""
    name, gradient = next(_gradients(flats), ("", None))
    if gradient is not None:
        raise RuntimeError(
            f"{name} has a gradient that was not reduced: the last backward ran under no_sync(), or went around "
            "ShardedDDP. Run the last backward before step() outside no_sync(), or call reduce()."
        )


def _gradients(flats: Sequence[ShardGroup]) -> Iterator[tuple[str, Tensor]]:
    for flat in flats:
        for param, name in zip(flat.params, flat.names, strict=True):
            if param.grad is not None:
                yield name, param.grad
