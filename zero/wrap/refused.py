"""Gradients that no stage takes."""

from __future__ import annotations

from typing import NoReturn

CREATE_GRAPH = (
    "the gradient of {} is itself part of a graph (create_graph=True), but a reduced gradient cannot be "
    "differentiated. Compute inner derivatives by torch.autograd.grad(..., create_graph=True), and call backward() "
    "without create_graph."
)


def refuse_sparse(name: str) -> NoReturn:
    """Raises RuntimeError for the sparse gradient of the parameter of this name."""
    raise RuntimeError(f"{name} has a sparse gradient. zero shards dense ones: build the embedding with sparse=False.")
