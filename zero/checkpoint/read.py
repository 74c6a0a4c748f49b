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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.checkpoint import directory
from zero.checkpoint.files import FileProblem
from zero.checkpoint.format import CheckpointError, Entry, Geometry, Index, OptimizerIndex
from zero.checkpoint.parts import Held, Stepped, Training, flat_of, inner, kind
from zero.checkpoint.source import Range, Source
from zero.checkpoint.storage import place
from zero.checkpoint.values import decode
from zero.oss import OSS

_HALF = (
    "It went wrong while tensors were being taken: model and optimizer are partly as before and partly as saved. Load "
    "this or another checkpoint before they are used."
)

_LISTED = 8
"""How many names an error lists."""

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

    Floating-point tensors are converted to the model's dtypes; where masters were stored, a parameter of more bits than
    were stored takes its master's. Of `extra`, what differed between the ranks that saved it comes back to the same
    ranks, and is left out, with a warning, where there is another number of them.

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
        plan = Plan(training, source.index)
        found = f"{source.directory} does not fit: {plan.problem}" if plan.problem else None
        ranks.exchange(None, found)
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
    return _extra(source.index, training)


class Plan:
    """What this rank takes of a checkpoint. What does not fit is in `problem`, in words for the user."""

    def __init__(self, training: Training, index: Index) -> None:
        self._training, self._index = training, index
        self._stored = _stored_names(training, index)
        self.problem = self._misfit()
        self._taken: list[tuple[Range, Held]] = []
        self._state: list[_State] = []
        if self.problem is None:
            self._plan_model()
            self._plan_optimizers()

    def ranges(self) -> Iterable[Range]:
        yield from (one for one, _ in self._taken)
        for state in self._state:
            yield from state.ranges()

    def take_values(self) -> None:
        """What is no tensor: modules may refuse theirs, and can be given back what they had."""
        for state in self._state:
            state.decode()
        for name, told in self._index.values.items():
            self._training.holders[name].set_extra_state(decode(told))

    def give_values_back(self) -> None:
        for name, value in self._training.values.items():
            with suppress(Exception):  # one that refuses what it gave itself is lost, the others are not
                self._training.holders[name].set_extra_state(value)

    @torch.no_grad()
    def take(self, source: Source) -> None:
        for one, held in self._taken:
            _fill(source, one, held)
        for state in self._state:
            state.take(source)

    # -------------------------------------------------------------------------------------------------- the model

    def _plan_model(self) -> None:
        for name in self._training.tensors:
            held = self._training.resident(name)
            if held is not None:
                entry, master = self._entry(name), self._master(name)
                wider = held.whole.dtype.itemsize > entry.geometry.dtype.itemsize
                self._taken.append((_range(master if master is not None and wider else entry, held), held))
        for held in self._training.masters(settled=False):
            name = held.path.removeprefix("master/")
            self._taken.append((_range(self._master(name) or self._entry(name), held), held))

    def _entry(self, name: str) -> Entry:
        return self._index.entry(self._stored[name])

    def _master(self, name: str) -> Entry | None:
        return self._index.tensors.get(f"master/{self._stored[name]}")

    def _misfit(self) -> str | None:
        """Whether the checkpoint is of another model."""
        training, index = self._training, self._index
        here = {name: name for name in training.tensors} | training.tied
        there = {name: name for name in index.names()} | index.tied
        names = [
            ("it has nothing for", [name for name in training.tensors if name not in self._stored]),
            ("the model has no", [name for name in there if name not in here]),
            ("these differ", list(filter(None, map(self._difference, self._stored)))),
        ]
        problems = [f"{what}: {_listed(some)}" for what, some in names if some]
        if not problems and index.stage is not None:
            problems += [
                f"{name} and {home} were {'one tensor' if saved else 'two'} when it was saved, and are not here"
                for tied, saved in [(index.tied, True), (training.tied, False)]
                for name, home in tied.items()
                if (here[name] == here[home]) != (there.get(name) == there.get(home))
            ]
        if set(training.values) != set(index.values) and not problems:
            problems.append("other modules had extra state (get_extra_state) when it was saved")
        return f"it is of another model: {'; '.join(problems)}." if problems else None

    def _difference(self, name: str) -> str | None:
        stored, whole = self._entry(name).geometry, self._training.whole(name)
        if stored.shape == whole.shape and _convertible(stored.dtype, whole.dtype):
            return None
        return f"{name} (saved {_shown(stored)}, here {_shown(whole)})"

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
            state = _State(self._training, self._index, optimizer, index, self._stored)
            self.problem = self.problem or state.problem
            self._state.append(state)


class _State:
    """What this rank takes of one optimizer's state."""

    def __init__(
        self, training: Training, index: Index, optimizer: Optimizer, stored: OptimizerIndex, names: dict[str, str]
    ) -> None:
        self._index, self._optimizer, self._stored = index, optimizer, stored
        self.problem = _optimizer_misfit(training, optimizer, stored, names)
        self._tensors: list[tuple[Stepped, str, Range]] = []
        self._values: list[tuple[Stepped, str, Any]] = []
        self._options: list[dict[str, Any]] = []
        if self.problem is None:
            for one in training.stepped(optimizer):
                self._plan(one, names[one.name])

    def _plan(self, one: Stepped, name: str) -> None:
        for key, path in self._stored.tensors.get(name, {}).items():
            entry = self._index.tensors[path]
            stored = entry.geometry
            if stored.shape == one.whole.shape:
                wanted = replace(one.whole, dtype=stored.dtype)
                self._tensors.append((one, key, Range(entry, wanted, one.start, one.stop)))
            elif not one.cut:
                self._tensors.append((one, key, Range(entry, stored, 0, stored.numel)))
            else:
                self.problem = (
                    f"{key!r} of {name} has shape {list(stored.shape)}, the parameter {list(one.whole.shape)}, and is "
                    "cut between ranks here. Build the optimizer, or FSDP, with partition='whole'."
                )
        for key, told in self._stored.values.get(name, {}).items():
            self._values.append((one, key, told))

    def ranges(self) -> Iterable[Range]:
        return (one for _, _, one in self._tensors)

    def decode(self) -> None:
        """What is no tensor, from JSON."""
        self._values = [(one, key, decode(told)) for one, key, told in self._values]
        self._options = [decode(group["options"]) for group in self._stored.groups]

    def take(self, source: Source) -> None:
        before = inner(self._optimizer).state
        taken: dict[Tensor, dict[str, Any]] = {}
        for one, key, value in self._values:
            taken.setdefault(one.tensor, {})[key] = value
        for one, key, needed in self._tensors:
            tensor = _room(one, needed, before.get(one.tensor, {}).get(key))
            _fill(source, needed, Held(key, needed.wanted, needed.start, needed.stop, tensor))
            taken.setdefault(one.tensor, {})[key] = tensor
        if isinstance(self._optimizer, OSS):
            self._optimizer.take_parts(taken, self._options)  # type: ignore[arg-type]
        else:
            _hand_over(self._optimizer, taken, self._options)


def _stored_names(training: Training, index: Index) -> dict[str, str]:
    """For the model's tensors, the name that each is stored under: any of its names here, as any of its names there."""
    aliases = {name: [name] for name in training.tensors}
    for name, home in training.tied.items():
        aliases[home].append(name)
    there = {name: name for name in index.names()} | index.tied
    stored = {}
    for name, some in aliases.items():
        known = [there[alias] for alias in some if alias in there]
        if known:
            stored[name] = known[0]
    return stored


def _optimizer_misfit(
    training: Training, optimizer: Optimizer, stored: OptimizerIndex, renamed: dict[str, str]
) -> str | None:
    if stored.kind not in ("", kind(optimizer)):
        return f"it holds the state of {stored.kind}, but the optimizer is {kind(optimizer)}."
    here = [[renamed[name] for name in names] for names in training.group_names(optimizer)]
    if len(here) != len(stored.groups):
        return f"its {stored.kind} has {len(stored.groups)} parameter groups, the optimizer here has {len(here)}."
    group_here = {name: number for number, names in enumerate(here) for name in names}
    group_there = {name: number for number, group in enumerate(stored.groups) for name in group["params"]}
    homeless = [name for name in sorted(stored.names()) if name not in group_here]
    if homeless:
        return f"it has state of {_listed(homeless)}, which the {stored.kind} here does not have."
    moved = [name for name, number in group_here.items() if group_there.get(name, number) != number]
    if moved:
        return f"{_listed(moved)} were in other parameter groups of the {stored.kind} when it was saved."
    return None


def _hand_over(optimizer: Optimizer, taken: dict[Tensor, dict[str, Any]], options: list[dict[str, Any]]) -> None:
    """Through the optimizer's own `load_state_dict`, which knows what dtype and device each entry needs."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    number = {param: position for position, param in enumerate(params)}
    optimizer.load_state_dict(
        {
            "state": {number[param]: state for param, state in taken.items()},
            "param_groups": [
                {**option, "params": [number[param] for param in group["params"]]}
                for option, group in zip(options, optimizer.param_groups, strict=True)
            ],
        }
    )


def _room(one: Stepped, needed: Range, present: Any) -> Tensor:
    """A tensor for an entry of the state: the one that is there if it is such a one, or a new one."""
    wanted = needed.wanted
    shape = tuple(one.tensor.shape) if one.cut else wanted.shape
    if isinstance(present, Tensor) and present.dtype == wanted.dtype and tuple(present.shape) == shape:
        return present
    if one.cut:
        return torch.empty(shape, dtype=wanted.dtype, device=one.tensor.device)
    return torch.empty_strided(shape, wanted.strides, dtype=wanted.dtype, device=one.tensor.device)


def _range(entry: Entry, held: Held) -> Range:
    return Range(entry, held.whole, held.start, held.stop)


def _fill(source: Source, one: Range, held: Held) -> None:
    flat = flat_of(held)
    if flat is not None:
        source.fill(flat, one)
        return
    whole = torch.empty(held.whole.numel, dtype=held.whole.dtype, device=held.tensor.device)
    source.fill(whole, one)
    held.tensor.detach().copy_(held.whole.shaped(whole))


def _extra(index: Index, training: Training) -> dict[str, Any]:
    extra = decode(index.extra)
    by_rank = index.extra_by_rank
    if by_rank and len(by_rank) == training.ranks.all:
        return {**extra, **decode(by_rank[training.ranks.number])}
    if by_rank:
        warnings.warn(
            f"{_listed(sorted({key for one in by_rank for key in one}))} of extra differed between the {len(by_rank)} "
            f"ranks that saved it, and there are {training.ranks.all} now: left out.",
            stacklevel=3,
        )
    return dict(extra)


def _convertible(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored == wanted or (stored.is_floating_point and wanted.is_floating_point)


def _shown(geometry: Geometry) -> str:
    return f"{str(geometry.dtype).removeprefix('torch.')} {list(geometry.shape)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


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
