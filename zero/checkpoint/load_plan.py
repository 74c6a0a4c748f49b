"""What this rank reads of a checkpoint: planned from the index alone, before any tensor is read.

A plan has, for each part of a stored tensor that will be read, the memory to read it into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.checkpoint.format import Entry, Geometry, Index, OptimizerIndex, Part, all_of
from zero.checkpoint.shards import Held, Training, inner, kind
from zero.checkpoint.source import Source
from zero.checkpoint.values import decode
from zero.oss import OSS
from zero.state.optimizer_state import restore

_LISTED = 8
"""How many names an error lists."""


class LoadPlan:
    """What this rank reads of a checkpoint. Raises ValueError where the checkpoint does not fit."""

    def __init__(self, training: Training, index: Index) -> None:
        self._training, self._index = training, index
        self._stored_as = _stored_names(training, index)
        self._refuse_another_model()
        self._tensors = [*self._of_model()]
        optimizers, stored = training.optimizers, index.optimizers
        if optimizers and len(optimizers) != len(stored):
            saved = f"{len(stored)} optimizers" if stored else "no optimizer"
            raise ValueError(f"it was saved with {saved}, but {len(optimizers)} to be loaded were given")
        pairs = zip(optimizers, stored, strict=True) if optimizers else ()
        self._optimizers = [_OptimizerPlan(training, index, *pair, self._stored_as) for pair in pairs]

    def parts(self) -> Iterable[tuple[Entry, Part]]:
        """All parts of stored tensors that will be read."""
        yield from self._tensors
        for plan in self._optimizers:
            yield from ((entry, part) for _, _, entry, part in plan.tensors)

    def take_values(self) -> None:
        """Takes the values that are no tensors. A module may refuse its extra state; see `give_values_back`."""
        for plan in self._optimizers:
            plan.decode()
        for name, value in self._index.values.items():
            self._training.holders[name].set_extra_state(decode(value))

    def give_values_back(self) -> None:
        """Undoes `take_values`."""
        for name, value in self._training.values.items():
            with suppress(Exception):  # a module may refuse even its own state; the others get theirs back
                self._training.holders[name].set_extra_state(value)

    @torch.no_grad()
    def take(self, source: Source) -> None:
        """Reads the tensors into the model and the optimizers' state. This cannot be undone."""
        for entry, held in self._tensors:
            _fill(source, entry, held)
        for plan in self._optimizers:
            plan.take(source)

    def _of_model(self) -> Iterator[tuple[Entry, Held]]:
        for name in self._training.tensors:
            held, stored = self._training.resident(name), self._stored_as[name]
            if held is not None:
                entry, master = self._index.entry(stored), self._index.master(stored)
                converted = held.full.dtype != entry.geometry.dtype
                yield master if master is not None and converted else entry, held
        for held in self._training.masters(settled=False):
            stored = self._stored_as[held.name.removeprefix("master/")]
            yield self._index.master(stored) or self._index.entry(stored), held

    def _refuse_another_model(self) -> None:
        """Raises ValueError where the checkpoint must be of another model."""
        training, index = self._training, self._index
        here = {name: name for name in training.tensors} | training.tied
        there = index.stored_as()
        names = [
            ("it has nothing for", [name for name in training.tensors if name not in self._stored_as]),
            ("the model has no", [name for name in there if name not in here]),
            ("these differ", list(filter(None, map(self._difference, self._stored_as)))),
        ]
        problems = [f"{what}: {listed(some)}" for what, some in names if some]
        if not problems and index.stage is not None:
            problems += [
                f"{name} and {other} were {'one tensor' if saved else 'two'} when it was saved, and are not here"
                for tied, saved in [(index.tied, True), (training.tied, False)]
                for name, other in tied.items()
                if (here[name] == here[other]) != (there.get(name) == there.get(other))
            ]
        if set(training.values) != set(index.values) and not problems:
            problems.append("other modules had extra state (get_extra_state) when it was saved")
        if problems:
            raise ValueError(f"it is of another model: {'; '.join(problems)}")

    def _difference(self, name: str) -> str | None:
        stored, full = self._index.entry(self._stored_as[name]).geometry, self._training.full_geometry(name)
        convertible = stored.dtype.is_floating_point and full.dtype.is_floating_point
        if stored.shape == full.shape and (convertible or stored.dtype == full.dtype):
            return None
        return f"{name} (saved {_shown(stored)}, here {_shown(full)})"


class _OptimizerPlan:
    """What this rank reads of one optimizer's state. Raises ValueError where it does not fit.

    stored_as: for each of the model's parameters, the name that it is stored under.
    tensors: what is stepped, the key of its state, and the part to read.
    """

    def __init__(
        self, training: Training, index: Index, optimizer: Optimizer, stored: OptimizerIndex, stored_as: dict[str, str]
    ) -> None:
        self._optimizer, self._stored = optimizer, stored
        _refuse_another_optimizer(training, optimizer, stored, stored_as)
        self.tensors: list[tuple[Held, str, Entry, Part]] = []
        self._of_own_dtype: list[tuple[Tensor, str]] = []
        """State whose dtype was not that of the stepped parameter, and keeps its dtype."""
        self._values: list[tuple[Held, str, Any]] = []
        self._options: list[dict[str, Any]] = []
        for one in training.stepped(optimizer):
            name = stored_as[one.name]
            stepped = index.master(name) or index.entry(name)
            self._values += [(one, key, value) for key, value in stored.values.get(name, {}).items()]
            for key, path in stored.tensors.get(name, {}).items():
                entry = index.tensors[path]
                self.tensors.append((one, key, entry, _part(one, key, name, entry.geometry)))
                if entry.geometry.dtype != stepped.geometry.dtype:
                    self._of_own_dtype.append((one.tensor, key))

    def decode(self) -> None:
        """Decodes the values, which are stored as JSON."""
        self._values = [(one, key, decode(value)) for one, key, value in self._values]
        self._options = [decode(group["options"]) for group in self._stored.groups]

    def take(self, source: Source) -> None:
        before = inner(self._optimizer).state
        taken: dict[Tensor, dict[str, Any]] = {}
        for one, key, value in self._values:
            taken.setdefault(one.tensor, {})[key] = value
        for one, key, entry, part in self.tensors:
            tensor = _target(one, part.full, before.get(one.tensor, {}).get(key))
            _fill(source, entry, Held(part.full, part.start, part.stop, key, tensor))
            taken.setdefault(one.tensor, {})[key] = tensor
        if isinstance(self._optimizer, OSS):
            self._optimizer.take_shards(taken, self._options)  # type: ignore[arg-type]
        else:
            restore(self._optimizer, taken, self._options)
        state = inner(self._optimizer).state  # torch's optimizers convert loaded state to the parameter's dtype
        for tensor, key in self._of_own_dtype:
            if state[tensor][key].dtype != taken[tensor][key].dtype:
                state[tensor][key] = taken[tensor][key]


def _stored_names(training: Training, index: Index) -> dict[str, str]:
    """For each of the model's tensors, the name that it is stored under.

    A tensor with several names matches a stored tensor that has any of these names.
    """
    aliases = {name: [name] for name in training.tensors}
    for name, other in training.tied.items():
        aliases[other].append(name)
    there = index.stored_as()
    stored = {}
    for name, some in aliases.items():
        known = [there[alias] for alias in some if alias in there]
        if known:
            stored[name] = known[0]
    return stored


def _refuse_another_optimizer(
    training: Training, optimizer: Optimizer, stored: OptimizerIndex, stored_as: dict[str, str]
) -> None:
    """Raises ValueError where the state must be of another optimizer."""
    if stored.kind not in ("", kind(optimizer)):
        raise ValueError(f"it holds the state of {stored.kind}, but the optimizer is {kind(optimizer)}")
    here = [[stored_as[name] for name in names] for names in training.group_names(optimizer)]
    if len(here) != len(stored.groups):
        groups = f"{len(stored.groups)} parameter groups, the optimizer here has {len(here)}"
        raise ValueError(f"its {stored.kind} has {groups}")
    group_here = {name: number for number, names in enumerate(here) for name in names}
    group_there = {name: number for number, group in enumerate(stored.groups) for name in group["params"]}
    if unknown := [name for name in sorted({*stored.tensors, *stored.values}) if name not in group_here]:
        raise ValueError(f"it has state of {listed(unknown)}, which the {stored.kind} here does not have")
    if moved := [name for name, number in group_here.items() if group_there.get(name, number) != number]:
        raise ValueError(f"{listed(moved)} were in other parameter groups of the {stored.kind} when it was saved")


def _part(one: Held, key: str, name: str, stored: Geometry) -> Part:
    """What to read of the state under a key: the elements that are stepped, or all where it has a shape of its own."""
    if stored.shape == one.full.shape:
        return Part(replace(one.full, dtype=stored.dtype), one.start, one.stop)
    if one.is_full:
        return all_of(stored)
    raise ValueError(
        f"{key!r} of {name} has shape {list(stored.shape)}, the parameter {list(one.full.shape)}, and is cut between "
        "ranks here. Build the optimizer, or FSDP, with partition='whole'"
    )


def _target(one: Held, full: Geometry, present: Any) -> Tensor:
    """The tensor to read an entry of the state into: the present one if dtype and shape fit, otherwise a new one."""
    shape = tuple(one.tensor.shape) if not one.is_full else full.shape
    if isinstance(present, Tensor) and present.dtype == full.dtype and tuple(present.shape) == shape:
        return present
    if one.is_full:
        return torch.empty_strided(shape, full.strides, dtype=full.dtype, device=one.tensor.device)
    return torch.empty(shape, dtype=full.dtype, device=one.tensor.device)


def _fill(source: Source, entry: Entry, held: Held) -> None:
    """Reads into the held tensor: in place where its memory has the order of what is read."""
    memory = held.memory()
    if memory is not None:
        source.fill(memory, entry, held)
        return
    full = torch.empty(held.full.numel, dtype=held.full.dtype, device=held.tensor.device)
    source.fill(full, entry, held)
    held.tensor.detach().copy_(held.full.shaped(full))


def _shown(geometry: Geometry) -> str:
    return f"{str(geometry.dtype).removeprefix('torch.')} {list(geometry.shape)}"


def listed(names: Sequence[str]) -> str:
    """The first few names, for an error message."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"
