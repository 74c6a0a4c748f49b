"""Checkpoints of torch.distributed.checkpoint (DCP), as FSDP2, FSDP1, Accelerate and Lightning save them in shards:
loaded at any stage, and written from a checkpoint of zero, one tensor at a time.

Entries have flat names. What precedes the names of parameters is the user's choice, and is found by these:

    model.layers.0.weight
    optimizer.state.layers.0.weight.exp_avg
    optimizer.param_groups.0.lr, or optimizer.param_groups.layers.0.weight.lr, with the option of each parameter
    anything else, such as scheduler.last_epoch, is `extra` where it is no tensor

`.metadata` is a pickle, and so are values that are no tensors. Here both can only name what DCP itself stores: nothing
of what a file brings along is run.
"""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from zero.checkpoint.files import Source
from zero.checkpoint.format import RESUMED, Entry, decode, encode, listed, under
from zero.checkpoint.shards import Training
from zero.checkpoint.storage import METADATA, Place
from zero.comm import Comm
from zero.full_state import load_full_optimizer_state_dict, load_full_state_dict
from zero.measure.param_groups import options as options_of
from zero.measure.param_groups import params_of
from zero.state.given import Later
from zero.state.optimizer_state import refuse_other_options

_STATE, _GROUPS = ".state.", ".param_groups"

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


class Stored:
    """What is stored, by name: on the first rank. training: which has looked."""

    def __init__(self, directory: Place, training: Training) -> None:
        if not directory.mounted:
            raise ValueError(f"{directory} is a checkpoint of torch.distributed.checkpoint: copy it to a mounted disk")
        self._directory, self._training, self._reader = directory, training, _Reader(directory.path)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._entries, self._paths = self._metadata.state_dict_metadata, self._metadata.planner_data or {}
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
        self._own = dict[str, str]()  # by entry the name of the parameter or buffer
        self._steps = dict[str, set[str]]()  # whose parameters an optimizer steps, by what precedes its entries
        self._groups = dict[str, dict[str, dict[str, Any]]]()  # the options of a group, by number or parameter
        of_model, options = Counter[str](), dict[str, tuple[str, str]]()
        for entry in self._entries:
            before, state, after = entry.partition(_STATE)
            if state and (name := _plain(after.rpartition(".")[0])) in self._names:
                self._steps.setdefault(before, set()).add(name)
                continue
            before, groups, after = entry.partition(_GROUPS)
            if groups:
                options[entry] = before, after.removeprefix(".")
                continue
            last = str(self._paths.get(entry, (entry,))[-1])  # of the keys of nested dictionaries
            if (name := _plain(last)) in self._names:
                self._own[entry] = name
                of_model[entry.removesuffix(last)] += 1
        # A flat one has them for each parameter: they are read at once, and for optimizers alone.
        values = self._read(options) if training.optimizers else {}
        for entry, (before, after) in options.items():
            of_all, (owner, _, option) = self._groups.setdefault(before, {}), after.rpartition(".")
            if entry in values and after:
                of_all.setdefault(_plain(owner), {})[option] = values[entry]
            elif entry in values:  # all groups in one value
                of_all |= {str(number): group for number, group in enumerate(values[entry])}
        for before, of_all in self._groups.items():
            named = {_plain(name) for group in of_all.values() for name in group.get("params", ())}
            self._steps.setdefault(before, set()).update((named | of_all.keys()) & self._names.keys())
        self._weights = self._only(of_model)

    def _only(self, found: Counter[str]) -> str | None:
        """What precedes most names; None where there are none."""
        most = [prefix for prefix, count in found.items() if count and count == max(found.values())]
        if len(most) > 1:  # as of a model and its average
            most = [one for one in most if one.rpartition(".")[0].rpartition(".")[2] in ("model", "state_dict")] or most
        if len(most) > 1:
            raise ValueError(f"has the names of the model's parameters more than once, under {listed(sorted(most))}")
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
        parts, prefix = self._training.parts, self._weights
        if prefix is None:
            raise ValueError(f"it has none of the model's parameters, but {listed([*self._entries])}")
        found = {name: entry for entry, name in self._own.items() if entry.startswith(prefix)}
        stored = {self._names[name] for name in found}
        missing = [name for name in parts if name not in stored]
        others = [one for one in self._entries if prefix and one.startswith(prefix) and one not in self._own]
        differing = []
        for name, entry in found.items():
            full, size = parts[self._names[name]].full.shape, [*getattr(self._entries[entry], "size", ())]
            if [*full] != size:
                differing.append(f"{name} (saved {size}, here {[*full]})")
        named = [("these differ", differing)]
        named += [("it has nothing for", missing), ("the model has no", others)] if strict else []
        if problems := [f"{what}: {listed(some)}" for what, some in named if some]:
            raise ValueError(f"it is of another model: {'; '.join(problems)}")
        return [*found.items()]

    def stream(self, weights: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(entry)) for name, entry in weights)

    def state(self, number: int) -> dict[str, Any]:
        """The full state of an optimizer, whose tensors are read once they are used. Raises ValueError if there is
        none, or its groups have other parameters."""
        shards, training, aliases = self._training.shards[number], self._training, dict[str, list[str]]()
        for name, stored_as in self._names.items():
            aliases.setdefault(stored_as, []).append(name)
        own_names = {name for param in params_of(shards) for name in aliases[training.names[param]]}
        before = self._only(Counter({one: len(names & own_names) for one, names in self._steps.items()}))
        if before is None:
            raise ValueError("it was saved with no optimizer, or without one of these parameters")
        prefix, of_all = f"{before}{_STATE}", self._groups.get(before, {})
        of_name = {_plain(name): group for group in of_all.values() for name in group.get("params", ())}
        of_name |= {owner: group for owner, group in of_all.items() if "params" not in group}
        state_of: dict[str, dict[str, Any]] = {}
        for entry, kind in self._entries.items():
            if entry.startswith(prefix):
                name, _, key = entry.removeprefix(prefix).rpartition(".")
                value: Any = None
                # A plain optimizer on one rank keeps what it is given.
                if not isinstance(kind, TensorStorageMetadata) or (training.stage == 0 and training.ranks.all == 1):
                    value = self.read(entry)
                else:
                    like = torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")
                    value = Later.like(like, device=torch.device("cpu"))
                    value.receive = partial(self.read, entry)
                state_of.setdefault(_plain(name), {})[key] = value
        found: dict[str, Any] = {"state": {}, "param_groups": []}
        at = 0
        for group in shards.param_groups:
            names = [aliases[training.names[param]] for param in group["params"]]
            saved = [of_name[name] for every in names for name in every if name in of_name]
            if of_all and names and (not saved or any(one is not saved[0] and one != saved[0] for one in saved)):
                raise ValueError(
                    f"the {shards.kind} here has a group of other parameters than it was saved with, as of "
                    f"{names[0][0]}"
                )
            for position, every in enumerate(names, at):
                if having := [name for name in every if name in state_of]:
                    found["state"][position] = state_of[having[0]]
            given = options_of(saved[0] if saved else group)
            numbers = [*range(at, at + len(names))]
            found["param_groups"].append({**given, "params": numbers})
            at += len(names)
        refuse_other_options(shards, found["param_groups"])
        return found

    def extra(self) -> dict[str, Any]:
        """What is no tensor, and belongs neither to the model nor to an optimizer, as JSON by the user's own names."""
        found, left = dict[Any, Any](), list[str]()
        prefixes = tuple(f"{one}{kind}" for one in self._steps for kind in (_STATE, _GROUPS))
        prefixes += (self._weights,) if self._weights else ()
        for entry, kind in self._entries.items():
            if entry in self._own or entry.startswith(prefixes):
                continue
            if isinstance(kind, TensorStorageMetadata):
                left.append(entry)
                continue
            into, (*path, last) = found, self._paths.get(entry, (entry,))
            for one in path:
                into = into.setdefault(one, {})
            try:
                into[last] = self.read(entry)
                encode(into[last], entry)
            except Exception:  # of a class that a pickle would import, or that JSON cannot hold
                into.pop(last, None)
                left.append(entry)
        if left:
            warn_user(f"{self._directory}: {listed(left)} are tensors, or of classes of their own: left out.")
        return {str(key): encode(_with_lists(value), str(key)) for key, value in found.items()}


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
            states = [stored.state(number) for number in range(len(states))]
            told = stored.extra()
    told = ranks.gather(told)[0]
    with ranks.together(after=" Model and optimizer are partly as before and partly as saved. Load again before use."):
        if weights:
            load_full_state_dict(training.model, stored.stream(of_weights) if stored else None, strict)
        for optimizer, state in zip(training.optimizers, states, strict=True):
            load_full_optimizer_state_dict(training.model, optimizer, state)
    return {key: decode(value) for key, value in told.items()}


class _FromZero(DefaultSavePlanner):
    """Reads a tensor as it is written. entries: what reads it, by name."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__()
        self._read = entries

    def lookup_object(self, index: MetadataIndex) -> Any:
        read = self._read.get(index.fqn)
        return super().lookup_object(index) if read is None else read()


def write(source: Source, out: Place, weights: Mapping[str, tuple[Entry, torch.dtype]]) -> None:
    """Writes weights, the state of all optimizers, and what `extra` has for every rank, as DCP's get_state_dict names
    them: {"model": ..., "optimizer": ..., and the entries of `extra`}. weights: by name what is read for it, and its
    dtype."""
    index, read = source.index, dict[str, Any]()

    def in_full(entry: Entry, dtype: torch.dtype) -> Tensor:
        full, at = torch.empty(entry.geometry.shape, dtype=dtype, device="cpu"), 0
        for piece in source.stream(entry, dtype):
            full.view(-1)[at : at + len(piece)] = piece
            at += len(piece)
        return full

    def later(name: str, entry: Entry, dtype: torch.dtype) -> Tensor:
        read[name] = partial(in_full, entry, dtype)
        return torch.empty(entry.geometry.shape, dtype=dtype, device="meta")

    model: dict[str, Any] = {name: later(f"model.{name}", *of) for name, of in weights.items()}
    model |= {name: decode(value) for name, value in under("model/", index.values).items()}
    state: dict[str, dict[str, Any]] = {}
    for number in range(len(index.optimizers)):
        for path, value in under(f"optimizer/{number}/", {**index.tensors, **index.values}).items():
            name, _, key = path.rpartition("/")
            if isinstance(value, Entry):
                value = later(f"optimizer.state.{name}.{key}", value, value.geometry.dtype)
            else:
                value = decode(value)
            state.setdefault(name, {})[key] = value
    groups = [
        {**decode(group["options"]), "params": group["params"]}
        for optimizer in index.optimizers
        for group in optimizer["groups"]
    ]
    whole: dict[str, Any] = {"model": model}
    if groups:
        whole["optimizer"] = {"state": state, "param_groups": groups}
    for key, value in index.extra.items():
        if not key.startswith(RESUMED) or key.count("/") == 2:  # generators of random numbers are of a rank
            whole.setdefault(key, decode(value))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # disabled: one process is meant
        try:
            dcp.save(whole, storage_writer=FileSystemWriter(out.path), planner=_FromZero(read), no_dist=True)
        except CheckpointException as error:  # torch's is no Exception, which nobody would catch
            causes = [cause for cause, _ in error.failures.values()]
            raise ValueError(f"{out} could not be written: {causes[0]!r}") from causes[0]
