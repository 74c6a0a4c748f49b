"""Autograd: the backward that runs now, and what autograd records of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node


def in_a_backward() -> bool:
    """Whether autograd is running a backward in this thread now. Nothing public says so."""
    return torch._C._current_graph_task_id() != -1


def transformed() -> bool:
    """Whether torch.func.grad, vjp, jvp, jacrev or another transform that differentiates runs: they refuse writes into
    tensors that a function captures. Nothing public says so."""
    levels = torch._C._functorch.get_interpreter_stack()
    return levels is not None and any(one.key() != torch._C._functorch.TransformType.Vmap for one in levels)


def saves_copies() -> bool:
    """Whether torch.autograd.graph.allow_mutation_on_saved_tensors() is on. Nothing public says so."""
    return bool(torch.autograd.graph._allow_mutation_on_saved_tensors_enabled)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Has autograd call the function when the backward that is running now is complete."""
    # Only from torch 2.15 on has this a public name.
    public: Any = getattr(torch.autograd.graph, "queue_callback", None)
    (public or Variable._execution_engine.queue_callback)(function)


def shape_expected_by(leaf: Node) -> torch.Size:
    """The shape of the gradients that a node accepts which accumulates them (AccumulateGrad). It has no public name."""
    return torch.Size(leaf._input_metadata[0].shape)  # which is a list


def writes_into(leaf: Node) -> bool:
    """Whether the backward that is running now writes into the leaf's `grad`. torch.autograd.grad does not."""
    # Nothing public says which leaves a backward writes into; a hook on the leaf runs too late.
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad runs, and returns the leaf's gradient
        return False


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of; None if it is no view. Tensors have no public attribute for it."""
    return tensor._base


# A context in which torch counts no writes into a tuple of tensors, as DistributedDataParallel uses it for its buffers.
keeping_versions = torch.autograd._unsafe_preserve_version_counter


def writes_so_far(tensors: Iterable[Tensor]) -> int:
    """How often torch counted a write into any of the tensors. Its counter has no public name."""
    return sum(tensor._version for tensor in tensors)
