"""What this rank reads of a checkpoint: planned from the index alone, before any tensor is read.

A plan has, for each range of a stored tensor, the memory to read it into, and what of the checkpoint does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.checkpoint.format import Entry, Geometry, Index, OptimizerIndex
from zero.checkpoint.shards import Held, Stepped, Training, inner, kind
from zero.checkpoint.source import Range, Source
from zero.checkpoint.values import decode
from zero.oss import OSS
from zero.state.optimizer_state import restore

_LISTED = 8
"""How many names an error lists."""


class LoadPlan:
    """What this rank reads of a checkpoint. problem: what does not fit, as an error message for the user."""

    def __init__(self, training: Training, index: Index) -> None:
        self._training, self._index = training, index
        self._stored_as = _stored_names(training, index)
        self.problem = self._misfit()
        self._taken: list[tuple[Range, Held]] = []
        self._optimizers: list[_OptimizerPlan] = []
        if self.problem is None:
            self._plan_model()
            self._plan_optimizers()

    def ranges(self) -> Iterable[Range]:
        """All ranges that will be read."""
        yield from (one for one, _ in self._taken)
        for plan in self._optimizers:
            yield from plan.ranges()

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
        for one, held in self._taken:
            _fill(source, one, held)
        for plan in self._optimizers:
            plan.take(source)

    # -------------------------------------------------------------------------------------------------- the model

    def _plan_model(self) -> None:
        for name in self._training.tensors:
            held = self._training.resident(name)
            if held is not None:
                entry, master = self._entry(name), self._master(name)
                converted = held.full.dtype != entry.geometry.dtype
                self._taken.append((_range(master if master is not None and converted else entry, held), held))
        for held in self._training.masters(settled=False):
            name = held.path.removeprefix("master/")
            self._taken.append((_range(self._master(name) or self._entry(name), held), held))

    def _entry(self, name: str) -> Entry:
        return self._index.entry(self._stored_as[name])

    def _master(self, name: str) -> Entry | None:
        return self._index.tensors.get(f"master/{self._stored_as[name]}")

    def _misfit(self) -> str | None:
        """Why the checkpoint must be of another model; None if nothing differs."""
        training, index = self._training, self._index
        here = {name: name for name in training.tensors} | training.tied
        there = {name: name for name in index.names()} | index.tied
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
        return f"it is of another model: {'; '.join(problems)}." if problems else None

    def _difference(self, name: str) -> str | None:
        stored, full = self._entry(name).geometry, self._training.full_geometry(name)
        if stored.shape == full.shape and _convertible(stored.dtype, full.dtype):
            return None
        return f"{name} (saved {_shown(stored)}, here {_shown(full)})"

    # ------------------------------------------------------------------------------------------------ optimizers

    def _plan_optimizers(self) -> None:
        optimizers, stored = self._training.optimizers, self._index.optimizers
        if not optimizers:
            return
        if len(optimizers) != len(stored):
            saved = f"{len(stored)} optimizers" if stored else "no optimizer"
            self.problem = f"it was saved with {saved}, but {len(optimizers)} to be loaded were given."
            return
        for optimizer, index in zip(optimizers, stored, strict=True):
            plan = _OptimizerPlan(self._training, self._index, optimizer, index, self._stored_as)
            self.problem = self.problem or plan.problem
            self._optimizers.append(plan)


class _OptimizerPlan:
    """What this rank reads of one optimizer's state.

    stored_as: for each of the model's parameters, the name that it is stored under.
    """

    def __init__(
        self, training: Training, index: Index, optimizer: Optimizer, stored: OptimizerIndex, stored_as: dict[str, str]
    ) -> None:
        self._optimizer, self._stored = optimizer, stored
        self.problem = _optimizer_misfit(training, optimizer, stored, stored_as)
        self._tensors: list[tuple[Stepped, str, Range]] = []
        self._of_own_dtype: list[tuple[Tensor, str]] = []
        """State whose dtype was not that of the stepped parameter, and keeps its dtype."""
        self._values: list[tuple[Stepped, str, Any]] = []
        self._options: list[dict[str, Any]] = []
        if self.problem is None:
            for one in training.stepped(optimizer):
                self._plan(one, stored_as[one.name], index)

    def _plan(self, one: Stepped, name: str, index: Index) -> None:
        stepped = index.tensors.get(f"master/{name}") or index.entry(name)
        for key, path in self._stored.tensors.get(name, {}).items():
            entry = index.tensors[path]
            stored = entry.geometry
            if stored.dtype != stepped.geometry.dtype:
                self._of_own_dtype.append((one.tensor, key))
            if stored.shape == one.full.shape:
                wanted = replace(one.full, dtype=stored.dtype)
                self._tensors.append((one, key, Range(entry, wanted, one.start, one.stop)))
            elif not one.cut:
                self._tensors.append((one, key, Range(entry, stored, 0, stored.numel)))
            else:
                self.problem = (
                    f"{key!r} of {name} has shape {list(stored.shape)}, the parameter {list(one.full.shape)}, and is "
                    "cut between ranks here. Build the optimizer, or FSDP, with partition='whole'."
                )
        for key, value in self._stored.values.get(name, {}).items():
            self._values.append((one, key, value))

    def ranges(self) -> Iterable[Range]:
        return (one for _, _, one in self._tensors)

    def decode(self) -> None:
        """Decodes the values, which are stored as JSON."""
        self._values = [(one, key, decode(value)) for one, key, value in self._values]
        self._options = [decode(group["options"]) for group in self._stored.groups]

    def take(self, source: Source) -> None:
        before = inner(self._optimizer).state
        taken: dict[Tensor, dict[str, Any]] = {}
        for one, key, value in self._values:
            taken.setdefault(one.tensor, {})[key] = value
        for one, key, needed in self._tensors:
            tensor = _target(one, needed, before.get(one.tensor, {}).get(key))
            _fill(source, needed, Held(key, needed.wanted, needed.start, needed.stop, tensor))
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
    there = {name: name for name in index.names()} | index.tied
    stored = {}
    for name, some in aliases.items():
        known = [there[alias] for alias in some if alias in there]
        if known:
            stored[name] = known[0]
    return stored


def _optimizer_misfit(
    training: Training, optimizer: Optimizer, stored: OptimizerIndex, stored_as: dict[str, str]
) -> str | None:
    """Why the state must be of another optimizer; None if nothing differs."""
    if stored.kind not in ("", kind(optimizer)):
        return f"it holds the state of {stored.kind}, but the optimizer is {kind(optimizer)}."
    here = [[stored_as[name] for name in names] for names in training.group_names(optimizer)]
    if len(here) != len(stored.groups):
        return f"its {stored.kind} has {len(stored.groups)} parameter groups, the optimizer here has {len(here)}."
    group_here = {name: number for number, names in enumerate(here) for name in names}
    group_there = {name: number for number, group in enumerate(stored.groups) for name in group["params"]}
    unknown = [name for name in sorted(stored.names()) if name not in group_here]
    if unknown:
        return f"it has state of {listed(unknown)}, which the {stored.kind} here does not have."
    moved = [name for name, number in group_here.items() if group_there.get(name, number) != number]
    if moved:
        return f"{listed(moved)} were in other parameter groups of the {stored.kind} when it was saved."
    return None


def _target(one: Stepped, needed: Range, present: Any) -> Tensor:
    """The tensor to read an entry of the state into: the present one if dtype and shape fit, otherwise a new one."""
    wanted = needed.wanted
    shape = tuple(one.tensor.shape) if one.cut else wanted.shape
    if isinstance(present, Tensor) and present.dtype == wanted.dtype and tuple(present.shape) == shape:
        return present
    if one.cut:
        return torch.empty(shape, dtype=wanted.dtype, device=one.tensor.device)
    return torch.empty_strided(shape, wanted.strides, dtype=wanted.dtype, device=one.tensor.device)


def _range(entry: Entry, held: Held) -> Range:
    return Range(entry, held.full, held.start, held.stop)


def _fill(source: Source, one: Range, held: Held) -> None:
    """Reads a range into the held tensor: in place where its memory has the order of the range."""
    memory = held.memory()
    if memory is not None:
        source.fill(memory, one)
        return
    full = torch.empty(held.full.numel, dtype=held.full.dtype, device=held.tensor.device)
    source.fill(full, one)
    held.tensor.detach().copy_(held.full.shaped(full))


def _convertible(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored == wanted or (stored.is_floating_point and wanted.is_floating_point)


def _shown(geometry: Geometry) -> str:
    return f"{str(geometry.dtype).removeprefix('torch.')} {list(geometry.shape)}"


def listed(names: Sequence[str]) -> str:
    """The first few names, for an error message."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"
