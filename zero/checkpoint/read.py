"""Loading.

    compare   every rank reads the index and compares it with its model and optimizers
    check     every rank reads the bytes that it needs and compares them with their checksums
    values    every rank takes what is no tensor; modules that set extra state get theirs back if another refuses
    take      every rank reads the tensors again, into the parameters and the optimizer's state, in place

Ranks agree after each that all can go on. Until the last nothing is changed for good. The last has no way back, for
that would be a second copy of everything: but all that it reads was read a moment before from files that are still
open, so that only a disk that fails just then can stop it, or the optimizer's own load_state_dict. It says so.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from zero.checkpoint import directory
from zero.checkpoint.files import FileProblem
from zero.checkpoint.format import CheckpointError, Index
from zero.checkpoint.load_plan import LoadPlan, listed
from zero.checkpoint.shards import Training
from zero.checkpoint.source import Source
from zero.checkpoint.storage import place
from zero.checkpoint.values import decode

_HALF = (
    "It went wrong while tensors were being taken: model and optimizer are partly as before and partly as saved. Load "
    "this or another checkpoint before they are used."
)

T = TypeVar("T")


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Collective. Takes a checkpoint that was saved at any stage, on any number of ranks. Returns its `extra`.

        extra = zero.checkpoint.load("run", model, optimizer)

    path: a run's directory, for its latest checkpoint, or one checkpoint's; or such a URL of fsspec's.
    model, optimizer: built as for training, at any stage. Without an optimizer only parameters and buffers are taken.
    process_group: of a plain model; a wrapped one knows its own.

    Floating-point tensors are converted to the model's dtypes; where masters were stored, a parameter of another dtype
    than was stored takes its master's. Optimizer state keeps a dtype that was not that of what was stepped. Of `extra`,
    what differed between the ranks that saved it comes back to the same ranks, and is left out, with a warning, where
    there is another number of them.

    Memory: state that is there is overwritten in place; besides what the rank keeps in the end there is one buffer of
    BUFFER (16 MiB), and, for a tensor whose dimensions lie in another order than those stored, that tensor.

    Raises CheckpointError, on every rank and before anything is changed, for files that are missing, truncated or
    altered, for a checkpoint of another model or optimizer, and where a module refuses its extra state. Only a disk
    that fails after it was read once, and an optimizer that refuses what its class has saved, leave the model partly
    loaded; the error, on every rank, says so, and another load makes it whole.
    """
    training = Training(model, optimizer, process_group)
    ranks = training.ranks
    given, unknown = _attempt(lambda: place(path))
    ranks.compare("the arguments of zero.checkpoint.load", [f"path {given}"], unknown or training.problem)
    assert given is not None
    source, problem = _attempt(lambda: Source(directory.resolve(given)))
    ranks.compare("the checkpoints found", [str(source.directory), source.digest] if source else [], problem)
    assert source is not None
    with source:
        plan, problem = _attempt(lambda: LoadPlan(training, source.index))
        unfit = problem or (plan.problem if plan else None)
        extra, unreadable = _attempt(lambda: _extra(source.index, training))
        problem = unfit or unreadable
        ranks.exchange(None, f"{source.directory} does not fit: {problem}" if problem else None)
        assert plan is not None
        assert extra is not None
        _, problem = _attempt(lambda: source.check(plan.ranges(), shown=ranks.first))
        ranks.exchange(None, problem)
        _, problem = _attempt(plan.take_values)
        try:
            ranks.exchange(None, problem)
        except CheckpointError:
            plan.give_values_back()
            raise
        _, problem = _attempt(lambda: plan.take(source))
        ranks.exchange(None, problem and f"{problem} {_HALF}")
    if left_out := _left_out(source.index, training):
        warnings.warn(left_out, stacklevel=2)
    return extra


def _extra(index: Index, training: Training) -> dict[str, Any]:
    extra = _decoded(index.extra)
    if index.extra_by_rank and len(index.extra_by_rank) == training.ranks.all:
        extra |= _decoded(index.extra_by_rank[training.ranks.number])
    return extra


def _left_out(index: Index, training: Training) -> str | None:
    """What of `extra` there is no rank for, in words for the user."""
    by_rank = index.extra_by_rank
    if not by_rank or len(by_rank) == training.ranks.all:
        return None
    return (
        f"{listed(sorted({key for one in by_rank for key in one}))} of extra differed between the {len(by_rank)} "
        f"ranks that saved it, and there are {training.ranks.all} now: left out."
    )


def _decoded(extra: dict[str, Any]) -> dict[str, Any]:
    return {key: decode(told) for key, told in extra.items()}


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What the work returned, or what is wrong with the checkpoint, in words for the user."""
    try:
        return work(), None
    except (FileProblem, ValueError) as error:
        return None, f"{error}."
    except OSError as error:
        return None, f"{error.filename or 'the checkpoint'} cannot be read ({error.strerror or error})."
    except Exception as error:  # of the user's optimizer or modules: the other ranks must hear of it
        return None, f"{type(error).__name__}: {error}."
