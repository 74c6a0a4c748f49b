"""What one rank writes of a model and its optimizers, planned before anything is written.

The owner of a shard writes it. Tensors that are full on every rank are written once: each rank writes an equal share of
parameters and of state that is the same on all ranks, and rank 0 writes its buffers, which are the ones that count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch import leaves
from zero.checkpoint.agree import Ranks
from zero.checkpoint.format import Index, OptimizerIndex, tensor_problem
from zero.checkpoint.shards import Held, Training, inner, kind, whole
from zero.checkpoint.values import encode
from zero.measure.param_groups import options
from zero.shards import layout
from zero.shards.shapes import alignment


@dataclass
class SavePlan:
    """What this rank writes.

    index: of the checkpoint, without what the files will hold; the first rank's is used.
    held: tensors, or ranges of them.
    values: for each optimizer, the state that is no tensor: {parameter: {key: value, as JSON}}.
    common: tensors that are the same on all ranks; `held` has this rank's share of them.
    """

    index: Index
    held: list[Held] = field(default_factory=list)
    values: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    common: list[Held] = field(default_factory=list)


def plan_save(training: Training) -> SavePlan:
    """What this rank writes.

    Raises ValueError, with a message for the user, for what cannot be stored, and for state of a shard that cannot be
    mapped to elements of the full parameter.
    """
    plan = SavePlan(_index(training))
    for name, tensor in training.tensors.items():
        if training.in_shard_group(name):
            plan.held += filter(None, [training.owned(name)])
        elif isinstance(tensor, nn.Parameter):
            plan.common += filter(None, [training.resident(name)])
        elif training.ranks.rank == 0:
            plan.held.append(training.buffer(name))
    plan.held += training.masters(settled=True)
    for number, optimizer in enumerate(training.optimizers):
        _plan_state(plan, training, optimizer, f"optimizer/{number}")
    if not training.ranks.writes:
        return SavePlan(plan.index, common=plan.common)
    plan.held += _share(plan.common, training.ranks)
    return plan


def _plan_state(plan: SavePlan, training: Training, optimizer: Optimizer, prefix: str) -> None:
    state = inner(optimizer).state
    if unknown := [key for key in state if not isinstance(key, Tensor)]:
        raise ValueError(
            f"the {kind(optimizer)} keeps state under {unknown[0]!r}, which is no parameter and has no owner."
        )
    values: dict[str, dict[str, Any]] = {}
    for one in training.stepped(optimizer):
        for key, value in state.get(one.tensor, {}).items():
            path = f"{prefix}/{one.name}/{key}"
            if not isinstance(key, str) or "/" in key:
                raise ValueError(f"{path}: names of state must be strings without a slash.")
            if isinstance(value, Tensor) and value.dim():
                (plan.common if one.shared else plan.held).append(_state_held(path, one, value))
            elif not one.is_full and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves(value)):
                raise ValueError(
                    f"{path} is a {type(value).__name__} of tensors, and the parameter is cut between ranks: only the "
                    "optimizer knows which elements of the parameter they are for. Build the optimizer, or FSDP, with "
                    "partition='whole'."
                )
            elif one.start == 0 and (training.ranks.rank == 0 or not one.shared):
                values.setdefault(one.name, {})[key] = encode(value, path)
    plan.values.append(values)


def _state_held(path: str, one: Held, value: Tensor) -> Held:
    """A state tensor of a parameter that this rank steps: it is elements of a full tensor, or a full tensor itself."""
    if problem := tensor_problem(value):
        raise ValueError(f"{path} {problem}.")
    if value.shape == one.tensor.shape:
        return replace(one, name=path, full=replace(one.full, dtype=value.dtype), tensor=value)
    if not one.is_full:
        raise ValueError(
            f"{path} has shape {list(value.shape)}, but this rank's shard of the parameter has "
            f"{list(one.tensor.shape)}: only the optimizer knows which elements of the parameter it is for. Build the "
            "optimizer, or FSDP, with partition='whole'."
        )
    return whole(path, value)


def _share(common: list[Held], ranks: Ranks) -> list[Held]:
    """This rank's share of tensors that are the same on all ranks: of each dtype as many elements as any other rank."""
    if ranks.world == 1:
        return common
    kinds: dict[torch.dtype, list[Held]] = {}
    for one in common:
        kinds.setdefault(one.full.dtype, []).append(one)
    mine = []
    for dtype, same in kinds.items():
        cut = layout.even([one.full.numel for one in same], ranks.world, align=alignment(dtype))
        for span in cut.spans(ranks.rank):
            one = same[span.index]
            mine.append(replace(one, start=span.start, stop=span.stop, offset=span.start))
    return mine


def _index(training: Training) -> Index:
    index = Index(training.stage, training.ranks.world, tied=training.tied)
    index.values = {name: encode(value, name) for name, value in training.values.items()}
    for optimizer in training.optimizers:
        groups = []
        for number, names in enumerate(training.group_names(optimizer)):
            given = options(optimizer.param_groups[number]).items()
            encoded = {key: encode(value, f"option {key!r} of group {number}") for key, value in given}
            groups.append({"params": names, "options": encoded})
        index.optimizers.append(OptimizerIndex(kind(optimizer), groups))
    return index
