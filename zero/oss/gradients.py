"""The gradients that an optimizer of parts takes from whole parameters, and those that it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from zero.oss.flat import FlatGroup


def take_gradients(flats: Sequence[FlatGroup], parts: Mapping[nn.Parameter, nn.Parameter]) -> bool:
    """Gives each part that this rank owns its share of the parameter's gradient: a view, where dtype and order allow.

    Returns whether any parameter has a gradient. Raises RuntimeError for a sparse one, whoever owns it, so that all
    ranks raise alike.
    """
    for name, gradient in _gradients(flats):
        refuse_sparse(gradient, name)
    for flat in flats:
        for index, span in flat.spans.items():
            param, part = flat.params[index], parts[flat.params[index]]
            if param.grad is None:
                part.grad = None
                continue
            taken = flat.shapes.in_memory_order(index, param.grad)[span.start : span.stop]
            part.grad = flat.shapes.shaped(index, taken, span).to(part.dtype)
    return any(param.grad is not None for param in parts)


def refuse_sparse(gradient: Tensor, name: str) -> None:
    """Raises RuntimeError for a sparse gradient of the parameter of this name."""
    if gradient.is_sparse:
        raise RuntimeError(
            f"{name} has a sparse gradient. zero shards dense ones: build the embedding with sparse=False."
        )


def refuse_unreduced(flats: Sequence[FlatGroup]) -> None:
    """Raises RuntimeError for a gradient that ShardedDDP has left with its parameter: it was not reduced."""
    name, gradient = next(_gradients(flats), ("", None))
    if gradient is not None:
        raise RuntimeError(
            f"{name} has a gradient that was not reduced: the last backward ran under no_sync(), or went around "
            "ShardedDDP. Run the last backward before step() outside no_sync(), or call reduce()."
        )


def _gradients(flats: Sequence[FlatGroup]) -> Iterator[tuple[str, Tensor]]:
    for flat in flats:
        for param, name in zip(flat.params, flat.names, strict=True):
            if param.grad is not None:
                yield name, param.grad
