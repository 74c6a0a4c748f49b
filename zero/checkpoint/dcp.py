"""Checkpoints of torch.distributed.checkpoint (DCP), as FSDP2, FSDP1, Accelerate and Lightning save them in shards:
loaded at any stage, and written from a checkpoint of zero, one tensor at a time.

Entries have flat names, and most also the keys of the nested dictionaries that they come from. What precedes the names
of parameters is the user's choice, and is found by these:

    model.layers.0.weight, or model.module.layers.0.weight as DistributedDataParallel has it
    model.layers.0._extra_state, of a module's get_extra_state()
    optimizer.state.layers.0.weight.exp_avg, or optimizer.state.0.exp_avg by the number of the parameter
    optimizer.param_groups.0.lr, or optimizer.param_groups.layers.0.weight.lr, with the option of each parameter
    zero.extra, of an export: what DCP would change, such as empty dictionaries and keys that are no strings
    anything else, such as scheduler.last_epoch, is `extra` where it is no tensor

`.metadata` is a pickle, and so are values that are no tensors. Here both can only name what DCP itself stores: nothing
of what a file brings along is run.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from zero._torch.compiling import name_without_compile
from zero._torch.telling import warn_user
from zero._torch.tensors import tree_map
from zero.checkpoint.files import Source
from zero.checkpoint.format import RESUMED, Entry, Geometry, decode, encode, listed, under
from zero.checkpoint.shards import Training
from zero.checkpoint.storage import METADATA, Place
from zero.comm import Comm
from zero.full_state import load_full_optimizer_state_dict, load_full_state_dict
from zero.measure.built import state_made_by
from zero.measure.kinds import ELEMENTWISE, SINGLE
from zero.measure.param_groups import options as options_of
from zero.measure.param_groups import params_of
from zero.state.given import Later
from zero.state.optimizer_state import refuse_other_options
from zero.state.stepped import SteppedShards

_DDP, _EXACT = "module.", "zero.extra"

_Keys = tuple[str | int, ...]

# What `.metadata` names, by module. None of these runs anything that it is given.
_RECORDS = {
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    ),
    **dict.fromkeys(("pathlib", "pathlib._local"), ("PosixPath", "PurePosixPath")),
}


class _Records(pickle.Unpickler):
    """Reads what `.metadata` is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which no such checkpoint needs, and which may be harmful")


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "rb") as file:
            found = _Records(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"it holds a {type(found).__name__}")
        return found


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@dataclass
class _Optimizer:
    """What is stored of an optimizer.

    entries: all. state: by the name or the number of a parameter its entries, by their keys. unknown: entries of state
    of no parameter of the model. groups: the names or numbers of their parameters, and their options.
    """

    entries: set[str] = field(default_factory=set)
    state: dict[Any, dict[_Keys, str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    groups: list[tuple[list[Any], dict[str, Any]]] = field(default_factory=list)

    @property
    def names(self) -> set[Any]:
        return {*self.state, *(name for names, _ in self.groups for name in names)}

    @property
    def is_numbered(self) -> bool:
        return any(isinstance(name, int) for names, _ in self.groups for name in names)

    def named(self, names: Sequence[str]) -> _Optimizer:
        """With the names of parameters in place of numbers, which count through all groups."""
        numbers = [number for of_group, _ in self.groups for number in of_group]
        name_of = dict(zip(map(str, numbers), names, strict=True))  # a parameter may have a number for a name
        groups = [([name_of[str(number)] for number in of_group], options) for of_group, options in self.groups]
        state = {name_of[str(number)]: keys for number, keys in self.state.items() if str(number) in name_of}
        lost = [entry for number, keys in self.state.items() if str(number) not in name_of for entry in keys.values()]
        return replace(self, groups=groups, state=state, unknown=self.unknown + lost)


class Stored:
    """What is stored, by name: on the first rank. training: which has looked."""

    def __init__(self, directory: Place, training: Training) -> None:
        if not directory.mounted:
            raise ValueError(f"{directory} is a checkpoint of torch.distributed.checkpoint: copy it to a mounted disk")
        self._directory, self._training, self._reader = directory, training, _Reader(directory.path)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._entries, paths = self._metadata.state_dict_metadata, self._metadata.planner_data or {}
            self._paths: dict[str, _Keys] = {entry: tuple(paths.get(entry, (entry,))) for entry in self._entries}
            files = {one.relative_path: 0 for one in self._metadata.storage_data.values()}
            for one in self._metadata.storage_data.values():
                files[one.relative_path] = max(files[one.relative_path], one.offset + one.length)
        except Exception as error:  # of a pickle that is damaged, or of another version of torch
            raise ValueError(f"{directory / METADATA} cannot be read ({type(error).__name__}: {error})") from error
        for name, nbytes in files.items():
            if not (directory / name).exists() or directory.system.size((directory / name).path) < nbytes:
                raise ValueError(f"{directory / name} is missing or truncated")
        # Each name that a tensor of the model has, also where it was wrapped to checkpoint activations or to compile.
        self._names = {**{name: name for name in training.tensors}, **training.tied}
        self._whole: dict[str, Any] = json.loads(self.read(_EXACT)) if _EXACT in self._entries else {}
        self._optimizers = self._find_optimizers()
        of_optimizers = {entry for one in self._optimizers.values() for entry in one.entries}
        found, depth = dict[str, dict[str, str]](), dict[str, int]()
        for entry, path in self._paths.items():
            last = str(path[-1])
            if entry not in of_optimizers and (name := _known(last, self._names)) is not None:
                prefix = f"{entry.removesuffix(last)}{'' if _plain(last) == name else _DDP}"
                found.setdefault(prefix, {})[entry] = name
                depth[prefix] = len(path)
        self._prefix = self._only(Counter({one: len(names) for one, names in found.items()}))
        # By entry the name of a parameter or buffer; extra state, by module and key; what else is in the dictionary.
        self._own, self._values, self._others = dict[str, str](), dict[str, dict[_Keys, str]](), list[str]()
        if (chosen := self._prefix) is not None:
            self._own, at = found[chosen], depth[chosen]
            for entry, path in self._paths.items():
                if entry in of_optimizers or entry in self._own or not entry.startswith(chosen) or len(path) < at:
                    continue
                key = str(path[at - 1])
                if (owner := _known(key, training.values)) is not None:
                    self._values.setdefault(owner, {})[path[at:]] = entry
                elif chosen and (len(path) == at or key.rpartition(".")[2] == "_extra_state"):
                    self._others.append(entry)
        self._taken = {*self._own, *(one for of in self._values.values() for one in of.values())}
        self._taken |= set() if training.optimizers else of_optimizers

    def _find_optimizers(self) -> dict[str, _Optimizer]:
        """The optimizers, by what precedes their entries."""
        found, options = dict[str, _Optimizer](), dict[str, tuple[str, _Keys]]()
        for entry, path in self._paths.items():
            own = _known(str(path[-1]), self._names) is not None
            for before, after in _after("state", path, whole=own):
                one = found.setdefault(before, _Optimizer())
                one.entries.add(entry)
                name, keys = self._divided(after)
                if name is None or not keys:
                    one.unknown.append(entry)
                else:
                    one.state.setdefault(name, {})[keys] = entry
            for before, after in _after("param_groups", path, whole=own):
                name, keys = self._divided(after)
                if not after or (name is not None and keys):
                    options[entry] = before, () if name is None else (name, *keys)
        # A flat one has them for each parameter: they are read at once, and for optimizers alone.
        values, of_all = self._read(options) if self._training.optimizers else {}, dict[str, dict[Any, Any]]()
        for entry, (before, keys) in options.items():
            found.setdefault(before, _Optimizer()).entries.add(entry)
            if keys:
                _put(of_all.setdefault(before, {}), keys, values.get(entry))
            else:  # all groups in one value
                of_all.setdefault(before, {}).update(enumerate(values.get(entry, ())))
        for before, groups in of_all.items():
            for name, group in groups.items() if values else ():
                params = group.get("params", [name])  # a flat one has the name in their place
                params = [_known(one, self._names) or one if isinstance(one, str) else one for one in params]
                found[before].groups.append((params, options_of(_with_lists(group))))
        with_names = {before for before, one in found.items() if any(isinstance(name, str) for name in one.state)}
        return {before: one for before, one in found.items() if before in with_names or before in of_all}

    def _divided(self, keys: _Keys) -> tuple[str | int | None, _Keys]:
        """The parameter's name or number that keys begin with, None if they do not, and what follows."""
        if not keys or isinstance(keys[0], int):
            return (keys[0] if keys else None), keys[1:]
        parts = keys[0].split(".")  # of a flat name the key, too
        for at in range(len(parts), 0, -1):
            if (name := _known(".".join(parts[:at]), self._names)) is not None:
                return name, (*parts[at:], *keys[1:])
        return (int(parts[0]) if parts[0].isdecimal() else None), (*parts[1:], *keys[1:])

    def _only(self, found: Counter[str]) -> str | None:
        """What precedes most names; None where there are none."""
        most = [prefix for prefix, count in found.items() if count and count == max(found.values())]
        if len(most) > 1:  # as of a model and its average
            keys = {one: one.removesuffix(_DDP).removesuffix(".").rpartition(".")[2] for one in most}
            most = [one for one in most if keys[one] in ("model", "state_dict")] or most
        if len(most) > 1:
            under_each = [one or "no prefix" for one in sorted(most)]
            raise ValueError(f"has the names of the model's parameters more than once, under {listed(under_each)}")
        return most[0] if most else None

    def read(self, entry: str) -> Any:
        """A tensor in full, on the CPU, or another value."""
        return self._read([entry])[entry]

    def _read(self, entries: Iterable[str]) -> dict[str, Any]:
        room = dict[str, Any].fromkeys(entries)
        for entry in room:
            if isinstance(kind := self._entries[entry], TensorStorageMetadata):
                room[entry] = torch.empty(kind.size, dtype=kind.properties.dtype, device="cpu")
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(room, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return planner.state_dict

    def weights(self, *, strict: bool) -> list[tuple[str, str]]:
        """The names of the weights, and their entries. Raises ValueError if they are not the model's. strict: whether
        all have to be there, and no others."""
        training = self._training
        if self._prefix is None:
            raise ValueError(f"it has none of the model's parameters, but {listed([*self._entries])}")
        found = {name: entry for entry, name in self._own.items()}
        stored = {self._names[name] for name in found} | self._values.keys() | self._whole.get("values", {}).keys()
        # DCP has nothing for an empty dictionary.
        valued = [name for name, value in training.values.items() if not (isinstance(value, dict) and not value)]
        differing = []
        for name, entry in found.items():
            full, kind = training.parts[self._names[name]].full, self._entries[entry]
            saved = None
            if isinstance(kind, TensorStorageMetadata):
                saved = Geometry(tuple(kind.size), kind.properties.dtype)
            if saved is None or not full.takes(saved):
                differing.append(f"{name} (saved {saved or 'as no tensor'}, here {full})")
        named = [("these differ", differing)]
        missing = [one for one in [*training.parts, *valued] if one not in stored]
        named += [("it has nothing for", missing)] if strict else []
        named += [("the model has no", self._others)] if strict else []
        if problems := [f"{what}: {listed(some)}" for what, some in named if some]:
            raise ValueError(f"it is of another model: {'; '.join(problems)}")
        return [*found.items()]

    def stream(self, weights: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(entry)) for name, entry in weights)

    def values(self) -> dict[str, Any]:
        """The extra state of modules, as JSON."""
        found: dict[str, Any] = {}
        for name, keys in self._values.items():
            for path, entry in keys.items():
                _put(found, (name, *path), self.read(entry))
        return {
            **{name: encode(_with_lists(value), name) for name, value in found.items()},
            **self._whole.get("values", {}),
        }

    def states(self) -> list[dict[str, Any]]:
        """The full state of each optimizer, whose tensors are read once they are used. Raises ValueError if there is
        none, its groups have other parameters, or none of the optimizers takes some of it."""
        given, saved, taken = len(self._training.shards), self._whole.get("optimizers", 0), set[str]()
        if 0 < given < saved:
            raise ValueError(f"it was saved with {saved} optimizers, but {given} to be loaded were given")
        states = [self._state(number, taken) for number in range(given)]
        left = [
            (name, entry)
            for one in self._optimizers.values()
            for name, keys in one.state.items()
            for entry in keys.values()
            if not one.is_numbered and isinstance(name, str) and self._names[name] not in taken
        ]
        if states and left:
            raise ValueError(
                f"it has optimizer state that none given here takes, of {listed([*dict(left)])}, such as "
                f"{left[0][1]}. Give all optimizers that were saved, with the parameters that they had"
            )
        return states

    def _state(self, number: int, taken: set[str]) -> dict[str, Any]:
        """taken: gets the names of the parameters whose state it is."""
        shards, training, aliases = self._training.shards[number], self._training, dict[str, list[str]]()
        for name, stored_as in self._names.items():
            aliases.setdefault(stored_as, []).append(name)
        own = [training.names[param] for param in params_of(shards)]
        saved = self._optimizer_of(shards, own, {alias for name in own for alias in aliases[name]})
        self._taken |= saved.entries
        # A number is one of a parameter where all are numbers, and begins the name of another model's where none is.
        unknown = saved.unknown + [
            one for name in saved.state if isinstance(name, int) for one in saved.state[name].values()
        ]
        if unknown:
            raise ValueError(f"it has optimizer state of no parameter of the model: {listed(unknown)}")
        of_name = {name: options for names, options in saved.groups for name in names}
        found: dict[str, Any] = {"state": {}, "param_groups": []}
        at = 0
        for group in shards.param_groups:
            names = [aliases[training.names[param]] for param in group["params"]]
            options = [of_name[name] for every in names for name in every if name in of_name]
            differ = any(one is not options[0] and one != options[0] for one in options)
            if of_name and names and (differ or not options):
                raise ValueError(
                    f"the {shards.kind} here has a group of other parameters than it was saved with, as of "
                    f"{names[0][0]}"
                )
            for position, every in enumerate(names, at):
                if having := [name for name in every if name in saved.state]:
                    found["state"][position] = self._state_of(shards, group, every[0], saved.state[having[0]])
                    taken.add(every[0])
            numbers = [*range(at, at + len(names))]
            found["param_groups"].append({**(options[0] if options else options_of(group)), "params": numbers})
            at += len(names)
        refuse_other_options(shards, found["param_groups"])
        return found

    def _optimizer_of(self, shards: SteppedShards, own: list[str], aliases: set[str]) -> _Optimizer:
        """What is stored of an optimizer. own: the names of its parameters. aliases: all of their names."""

        def fits(one: _Optimizer) -> bool:
            with suppress(ValueError):
                refuse_other_options(shards, [options for _, options in one.groups])
                return True
            return False

        named = {before: one for before, one in self._optimizers.items() if not one.is_numbered}
        found = Counter({before: len(one.names & aliases) for before, one in named.items()})
        most = [before for before, count in found.items() if count == max(found.values())]
        if len(most) > 1:  # as of an optimizer and an average
            found = Counter({before: found[before] for before in most if fits(named[before])}) or found
        if (before := self._only(found)) is not None:
            return named[before]
        by_number = {before: one for before, one in self._optimizers.items() if one.is_numbered}
        if not by_number:
            raise ValueError("it was saved with no optimizer, or without one of these parameters")
        sizes = {before: [len(numbers) for numbers, _ in one.groups] for before, one in by_number.items()}
        here = [len(group["params"]) for group in shards.param_groups]
        if len(fitting := [before for before, there in sizes.items() if there == here]) != 1:
            told = ", ".join(f"{before} ({there})" for before, there in sizes.items())
            raise ValueError(
                f"it has numbers, not names, for the parameters of {told} in groups, and "
                f"{'several' if fitting else 'none'} of these can be the {shards.kind} here, with {here}. Save what "
                "torch.distributed.checkpoint.state_dict.get_state_dict returns, which has names"
            )
        return by_number[fitting[0]].named(own)

    def _state_of(
        self, shards: SteppedShards, group: dict[str, Any], name: str, keys: Mapping[_Keys, str]
    ) -> dict[str, Any]:
        """The state of a parameter. name: its own."""
        training, found = self._training, dict[Any, Any]()
        full = list(training.parts[name].full.shape)
        made = state_made_by(shards.optim, group, torch.float32) if any(len(path) > 1 for path in keys) else {}
        for path, entry in keys.items():
            kind = self._entries[entry]
            size = [*kind.size] if isinstance(kind, TensorStorageMetadata) else full
            if type(shards.optim) in ELEMENTWISE and path[0] not in SINGLE and size != full:
                raise ValueError(f"{entry} has shape {size}, and the parameter {name} here {full}")
            value: Any = None
            # A plain optimizer on one rank keeps what it is given.
            if not isinstance(kind, TensorStorageMetadata) or (training.stage == 0 and training.ranks.all == 1):
                value = self.read(entry)
            else:
                like = torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")
                value = Later.like(like, device=torch.device("cpu"))
                value.receive = partial(self.read, entry)
            # A flat name has dots between nested keys, and so may a key have.
            parted = [(".".join(map(str, path[:at])), path[at:]) for at in range(1, len(path) + 1)]
            key, rest = next((one for one in parted if one[0] in made), (path[0], path[1:]))
            _put(found, (key, *rest), value)
        return {key: _with_lists(value) for key, value in found.items()}

    def extra(self) -> dict[str, Any]:
        """What is no tensor, and belongs neither to the model nor to an optimizer, as JSON by the user's own names."""
        if self._whole:
            return dict(self._whole["extra"])
        found, left = dict[Any, Any](), list[str]()
        for entry, kind in self._entries.items():
            if entry in self._taken:
                continue
            if isinstance(kind, TensorStorageMetadata):
                left.append(entry)
                continue
            try:
                value = self.read(entry)
                encode(value, entry)
                _put(found, self._paths[entry], value)
            except Exception:  # of a class that a pickle would import, or that JSON cannot hold
                left.append(entry)
        if left:
            warn_user(f"{self._directory}: {listed(left)} are tensors, or of classes of their own: left out.")
        return {str(key): encode(_with_lists(value), str(key)) for key, value in found.items()}


def _after(marker: str, path: _Keys, *, whole: bool) -> Iterator[tuple[str, _Keys]]:
    """What precedes a key of an optimizer's dictionary in a path, and what follows. whole: not within a flat name."""
    for at, key in enumerate(path):
        parts = [marker] if key == marker else [] if whole else str(key).split(".")
        for place in (place for place, part in enumerate(parts) if part == marker):
            before = [*map(str, path[:at]), *parts[:place]]
            yield ".".join(before), (*filter(None, [".".join(parts[place + 1 :])]), *path[at + 1 :])


def _put(into: dict[Any, Any], path: _Keys, value: Any) -> None:
    """Into nested dictionaries."""
    for one in path[:-1]:
        into = into.setdefault(one, {})
    into[path[-1]] = value


def _known(text: str, names: Mapping[str, Any]) -> str | None:
    """Which of the names a key is, also with the `module.` of DistributedDataParallel."""
    plain = _plain(text)
    return next((one for one in (plain, plain.removeprefix(_DDP)) if one in names), None)


def _plain(name: str) -> str:
    return name_without_compile(name).replace("_checkpoint_wrapped_module.", "")


def _with_lists(value: Any) -> Any:
    """Dictionaries by positions become lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(one) for key, one in value.items()}
    return [*inner.values()] if inner and [*inner] == [*range(len(inner))] else inner


def load(directory: Place, training: Training, *, weights: bool, strict: bool) -> dict[str, Any]:
    """Collective. As zero.checkpoint.load: the first rank reads, and all get tensor after tensor. Returns `extra`."""
    ranks, stored, told = training.ranks, None, dict[str, Any]()
    of_weights, states = list[tuple[str, str]](), list[dict[str, Any] | None]([None] * len(training.optimizers))
    with ranks.together(before=f"{directory} does not fit: "):
        if not training.wrappers and ranks.all != Comm.default().world:
            raise ValueError("a plain model takes it in the default group. Wrap the model for this one, by zero.setup")
        if ranks.first:
            stored = Stored(directory, training)
            of_weights = stored.weights(strict=strict) if weights else []
            states = [*stored.states()]
            told = {"extra": stored.extra(), "values": stored.values() if weights else {}}
    told = ranks.gather(told)[0]
    training.set_values(told["values"])
    with ranks.together(after=" Model and optimizer are partly as before and partly as saved. Load again before use."):
        if weights:
            load_full_state_dict(training.model, stored.stream(of_weights) if stored else None, strict)
        for optimizer, state in zip(training.optimizers, states, strict=True):
            load_full_optimizer_state_dict(training.model, optimizer, state)
    return {key: decode(value) for key, value in told["extra"].items()}


class _FromZero(DefaultSavePlanner):
    """Reads a tensor as it is written. read: what reads it, by the tensor without memory in its place."""

    def __init__(self, read: dict[Tensor, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        # A tuple of tensors is one object.
        found = super().lookup_object(index)
        return tree_map(lambda one: self._read[one]() if isinstance(one, Tensor) and one in self._read else one, found)


def write(source: Source, out: Place, weights: Mapping[str, tuple[Entry, torch.dtype]]) -> None:
    """Writes weights, the state of all optimizers, and what `extra` has for every rank, as DCP's get_state_dict names
    them: {"model": ..., "optimizer": ..., and the entries of `extra`}. An optimizer of parameters that another steps,
    such as an average, is "optimizer_1". weights: by name what is read for it, and its dtype."""
    index, read = source.index, dict[Tensor, Callable[[], Tensor]]()

    def in_full(entry: Entry, dtype: torch.dtype) -> Tensor:
        full, at = torch.empty(entry.geometry.shape, dtype=dtype, device="cpu"), 0
        for piece in source.stream(entry, dtype):
            full.view(-1)[at : at + len(piece)] = piece
            at += len(piece)
        return full

    def later(entry: Entry, dtype: torch.dtype) -> Tensor:
        read[found := torch.empty(entry.geometry.shape, dtype=dtype, device="meta")] = partial(in_full, entry, dtype)
        return found

    model: dict[str, Any] = {name: later(*of) for name, of in weights.items()}
    model |= {name: decode(value) for name, value in under("model/", index.values).items()}
    whole: dict[str, Any] = {"model": model}
    for number, optimizer in enumerate(index.optimizers):
        groups = [{**decode(group["options"]), "params": group["params"]} for group in optimizer["groups"]]
        names = {name for group in groups for name in group["params"]}
        # With the others, as get_state_dict has several; by itself where they step the same parameters.
        key = next(
            key
            for key in ("optimizer", *(f"optimizer_{one}" for one in range(1, number + 1)))
            if names.isdisjoint(
                name for group in whole.get(key, {}).get("param_groups", ()) for name in group["params"]
            )
        )
        own = whole.setdefault(key, {"state": {}, "param_groups": []})
        own["param_groups"] += groups
        for name, of, value, within in index.state(number):
            if isinstance(value, Entry):
                value = later(value, value.geometry.dtype)
            else:
                value = decode(value, [later(entry, entry.geometry.dtype) for entry in within].__getitem__)
            own["state"].setdefault(name, {})[of] = value
    # Generators of random numbers are of a rank.
    extra = {key: one for key, one in index.extra.items() if not key.startswith(RESUMED) or key.count("/") == 2}
    whole |= {key: decode(value) for key, value in extra.items() if key not in whole}
    whole[_EXACT] = json.dumps(
        {"extra": extra, "values": under("model/", index.values), "optimizers": len(index.optimizers)}
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # disabled: one process is meant
        try:
            dcp.save(whole, storage_writer=FileSystemWriter(out.path), planner=_FromZero(read), no_dist=True)
        except CheckpointException as error:  # torch's is no Exception, which nobody would catch
            causes = [cause for cause, _ in error.failures.values()]
            raise ValueError(f"{out} could not be written: {causes[0]!r}") from causes[0]
