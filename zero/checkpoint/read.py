"""Loading, in four steps.

    compare   every rank reads the index and compares it with its model and optimizers
    check     every rank reads the bytes that it needs and compares them with their checksums
    values    every rank takes the values that are no tensors; if a module refuses its extra state, all get theirs back
    take      every rank reads the tensors again, into the parameters and the optimizer's state, in place

After each step the ranks agree that all can go on. Only the last step changes anything for good. It cannot be undone,
because that would take a second copy of everything. But all that it reads was read a moment before, from files that are
still open, so only a disk that fails just then can stop it, or the optimizer's own load_state_dict. The error says so.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.checkpoint import directory
from zero.checkpoint.agree import Ranks, attempt
from zero.checkpoint.format import CheckpointError, Index
from zero.checkpoint.load_plan import LoadPlan, listed
from zero.checkpoint.shards import Training
from zero.checkpoint.source import Source
from zero.checkpoint.storage import place
from zero.checkpoint.values import decode

_PARTLY_LOADED = (
    " This happened while tensors were being read: model and optimizer are partly as before and partly as saved. Load "
    "this or another checkpoint before you use them."
)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Collective. Loads a checkpoint that was saved at any stage, on any number of ranks. Returns its `extra`.

        extra = zero.checkpoint.load("run", model, optimizer)

    path: a run's directory, for its latest checkpoint, or one checkpoint's directory; or an fsspec URL of either.
    model, optimizer: built as for training, at any stage. Without an optimizer only parameters and buffers are loaded.
    process_group: of a plain model; a wrapped one knows its own.

    Floating-point tensors are converted to the model's dtypes. Where masters were stored, a parameter whose dtype is
    not the stored one takes its master's values. Optimizer state whose dtype was not that of the stepped parameter
    keeps its dtype. Entries of `extra` that differed between the ranks that saved them return to the same ranks; on
    another number of ranks they are left out, with a warning.

    Memory: existing state is overwritten in place. Besides what the rank keeps in the end there is one buffer of
    BUFFER (16 MiB), and one full tensor where its dimensions are stored in another order than the model's.

    Raises CheckpointError, on every rank and before anything is changed, for files that are missing, truncated or
    altered, for a checkpoint of another model or optimizer, and where a module refuses its extra state. Only a disk
    that fails after it was read once, and an optimizer that refuses what its class has saved, leave the model partly
    loaded; the error, on every rank, says so, and another load repairs it.
    """
    training = Training(model, optimizer, process_group)
    ranks = training.ranks
    with _opened(path, training) as source:
        plan, (extra, left_out) = ranks.together(
            lambda: (LoadPlan(training, source.index), _extra(source.index, ranks)),
            before=f"{source.directory} does not fit: ",
        )
        ranks.together(lambda: source.check(plan.parts(), shown=ranks.first))
        try:
            ranks.together(plan.take_values)
        except CheckpointError:
            plan.give_values_back()
            raise
        ranks.together(lambda: plan.take(source), after=_PARTLY_LOADED)
    if left_out:
        warnings.warn(left_out, stacklevel=2)
    return extra


def _extra(index: Index, ranks: Ranks) -> tuple[dict[str, Any], str]:
    """The `extra` of this rank, and a warning that names the entries that no rank gets."""
    encoded, by_rank, left_out = index.extra, index.extra_by_rank, ""
    if len(by_rank) == ranks.all:
        encoded = encoded | by_rank[ranks.number]
    elif by_rank:
        left_out = (
            f"{listed(sorted({key for one in by_rank for key in one}))} of extra differed between the {len(by_rank)} "
            f"ranks that saved it, and there are {ranks.all} now: left out."
        )
    return {key: decode(value) for key, value in encoded.items()}, left_out


def _opened(path: str | os.PathLike[str], training: Training) -> Source:
    """Collective. The checkpoint that the path means, the same on all ranks."""
    given, unknown = attempt(lambda: place(path))
    training.ranks.compare("the arguments of zero.checkpoint.load", [f"path {given}"], unknown or training.problem)
    assert given is not None
    source, problem = attempt(lambda: Source(directory.resolve(given)))
    lines = [str(source.directory), source.digest] if source else []
    training.ranks.compare("the checkpoints found", lines, problem)
    assert source is not None
    return source
