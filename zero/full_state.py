"""Weights and optimizer state in full, the same at any stage: as dictionaries, and as streams that hold one unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.compiling import name_without_compile, renamed
from zero._torch.modules import parameters_of
from zero._torch.optimizers import with_state_hooks
from zero.comm import AGREEMENT, Comm
from zero.comm.together import MOST_FLAGS, Together
from zero.comm.waiting import calling
from zero.fsdp.full_weights import Recipient, full_weights, gathered, named_tensors
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.state import gathered as states
from zero.state import leaves
from zero.state.optimizer_state import Leaf
from zero.state.stepped import SteppedShards
from zero.tensor_parallel.parts import is_first
from zero.wrap.precision import original_dtypes
from zero.wrappers import comms_of, each, names_of, stepped_for, taken_out, unwrapped

Device = torch.device | str | None
WITHIN = "/"
"""Between the name of a parameter and the key of its state, in the names of streams. torch's names have dots."""


@calling("zero.full_state_dict")
def full_state_dict(
    model: nn.Module, to: int | None = 0, device: Device = "cpu", dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Collective. The full weights as copies, under the module's own names, whatever wraps it.

    Takes FSDP, ShardedDDP, DistributedDataParallel, modules that contain them, plain ones, and modules inside of these,
    compiled or not. Tied parameters share one copy. Shards are gathered unit by unit: besides the result, a rank that
    gets it holds at most one unit, and other ranks hold nothing. Where the module has hooks of the user's on its
    state_dict(), or a state_dict() of its own, the recipient holds all full parameters at once, on `device`.

    to: the rank of the model's process group that gets the weights; others send theirs and get an empty dictionary. In
        hybrid strategies ranks are numbered through the first replica first. None: every rank gets the weights, which
        takes as many copies on a host as it has ranks.
    device: the weights' device, by default the CPU, whose memory they need; None for that of the parameters.
    dtype: of floating-point tensors, by default that of the model as the user made it: where `precision=` stores
        parameters rounded, these are the masters.

    Weights of a tensor parallel model are whole tensors; `to` then means one of the ranks that have the parts.

    Raises ValueError where `to` is no rank of the group, RuntimeError within forward and backward.
    """
    inner, wrappers = unwrapped(model)
    receives = to is None or is_first(parameters_of(inner))
    with taken_out(inner):
        full = full_weights(inner, comms_of(wrappers)[0], _recipient(inner, wrappers, to, device, dtype))
    return renamed(full, name_without_compile) if receives else {}


@overload
def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, to: int | None = 0, device: Device = "cpu"
) -> dict[str, Any]: ...
@overload
def full_optimizer_state_dict(
    model: nn.Module, optimizer: Sequence[Optimizer], to: int | None = 0, device: Device = "cpu"
) -> list[dict[str, Any]]: ...
@calling("zero.full_optimizer_state_dict")
def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], to: int | None = 0, device: Device = "cpu"
) -> Any:
    """Collective. The full state of the optimizer in the plain optimizer's own format, at any stage, as copies.

    It loads by `load_full_optimizer_state_dict` at any other stage and number of ranks, and into the plain optimizer.
    It is gathered shard group by shard group: besides the result, a rank that gets it holds as much as one unit.

    model, optimizer: those that train; of several optimizers it returns a list. to, device: as of `full_state_dict`.

    Raises ValueError on every rank for state that cannot be made whole, and where `to` is no rank of the group.
    """
    (inner, wrappers), optimizers = unwrapped(model), each(optimizer)
    if not isinstance(optimizer, Optimizer):
        return [full_optimizer_state_dict(model, one, to, device) for one in optimizers]
    optimizer = optimizers[0]
    stepped, to, takes_part = stepped_for(inner, wrappers, optimizer, to)
    receives = takes_part and states.receives(stepped, to)
    if not stepped.shard_groups:
        own = leaves.opened(optimizer.state_dict()) if receives else {}
        return leaves.closed({key: leaves.copied(leaf, device) for key, leaf in own.items()})
    with Together([optimizer.comm] if isinstance(optimizer, OSS) else comms_of(wrappers), AGREEMENT) as together:

        def consolidated() -> dict[str, Any]:
            together.agree()  # before anybody sends: hooks and the device are the recipient's alone
            return (takes_part and states.consolidate(stepped, to, device)) or {}

        if receives:
            torch.empty(0, device=device)  # raises if there is none
            full = with_state_hooks(optimizer, consolidated)
        else:
            full = consolidated()
        together.agree()
        return full


def full_tensors(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    to: int | None = 0,
    device: Device = "cpu",
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Collective while it is iterated, on every rank. Yields the full weights and then, of an optimizer, its state, as
    pairs of name and tensor, at any stage: for a file, or for an inference engine that takes weights from a trainer.

        for name, tensor in zero.full_tensors(model): ...

    A rank that gets them holds at most one unit at a time, as far as the caller keeps none. Tied weights come once.
    Ranks that get none iterate, too, over nothing. Whoever breaks off ends the iteration on all ranks, and the model
    can be used; where every rank gets tensors, one that goes on raises RuntimeError. An iterator that is kept after it
    was broken off, as a traceback keeps it, has to be closed by its `close()`. Extra state of modules is not in it.

    optimizer: that trains the model, or several as a list. Its state has names such as "layers.0.weight/exp_avg", and
        numbers are tensors without dimensions. to, device, and for weights dtype: as of `full_state_dict`.

    Raises as `full_state_dict` and `full_optimizer_state_dict`; ValueError for state in other containers than dicts.
    """
    inner, wrappers = unwrapped(model)
    comms = comms_of(wrappers)
    names: dict[Tensor, str] = {}
    for name, tensor in named_tensors(inner).items():
        names.setdefault(tensor, name_without_compile(name))
    receives = to is None or is_first(parameters_of(inner))

    def named(batch: dict[Tensor, Tensor]) -> list[tuple[str, Tensor]]:
        return [(names[tensor], copy) for tensor, copy in batch.items() if tensor in names and receives]

    weights = gathered(inner, comms[0], _recipient(inner, wrappers, to, device, dtype))
    of_optimizers = [stepped_for(inner, wrappers, one, to) for one in (() if optimizer is None else each(optimizer))]
    # Neither keeps a batch.
    batches = chain(map(named, weights), *(_state(inner, device, *one) for one in of_optimizers))
    return _in_step(comms, batches, receives_some=to is None)


def _recipient(
    inner: nn.Module, wrappers: Sequence[nn.Module], to: int | None, device: Device, dtype: torch.dtype | None
) -> Recipient:
    dtypes: dict[Any, torch.dtype] = {**original_dtypes(inner)}
    for one in wrappers:
        dtypes |= one.rounded if isinstance(one, ShardedDDP) else {}
    return Recipient(to, device, dtype, dtypes)


def _in_step(
    comms: Sequence[Comm], batches: Iterable[list[tuple[str, Tensor]]], *, receives_some: bool
) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields from the batches, of which all ranks have as many; after each they agree whether to go on."""
    remaining, together = iter(batches), Together(comms, AGREEMENT)
    try:
        while True:
            with calling("zero.full_tensors"):
                batch = next(remaining, None)
            if batch is None:
                return
            while batch:  # neither it nor what it has given is kept while the next one is gathered
                yield batch.pop(0)
            if together.agree():
                break
    except GeneratorExit:
        together.agree(MOST_FLAGS)
        raise
    except Exception as error:
        together.tell(error)
        raise
    if receives_some:
        raise RuntimeError("another rank has broken off zero.full_tensors, which every rank iterates to the same item.")


def _state(
    inner: nn.Module, device: Device, stepped: SteppedShards, to: int | None, takes_part: bool
) -> Iterator[list[tuple[str, Tensor]]]:
    names = names_of(inner, stepped)

    def named(batch: list[Leaf]) -> list[tuple[str, Tensor]]:
        found = []
        for number, key, leaf in batch:
            if not isinstance(leaf, Tensor):
                leaf = leaf.item() if isinstance(leaf, np.generic) else leaf
                if not isinstance(leaf, (bool, int, float, complex)):
                    raise ValueError(
                        f"the state {leaves.entry_of(key)!r} of {names[number]} is no tensor or number, and cannot be "
                        "streamed. Call zero.full_optimizer_state_dict."
                    )
                dtype = {float: torch.float64, complex: torch.complex128}.get(type(leaf))  # Python's own
                leaf = torch.tensor(leaf, dtype=dtype, device="cpu")
            found.append((f"{names[number]}{WITHIN}{key}", leaf))
        return found

    return map(named, states.gathered(stepped, to, device, takes_part=takes_part))  # it keeps no batch
