"""The index of a checkpoint, to JSON and back.

A checkpoint is a directory. `index.json` names every tensor and its shards, which are in one safetensors file a rank. A
shard is a range of a tensor's elements, counted in row-major order, or, where the tensor is stored with its dimensions
in another order, in row-major order of the permuted tensor. Tensor parallel ranks have slices along one dimension: then
elements are counted slice by slice. Tensors have paths:

    model/<name>                          a parameter or buffer, by the module's own name
    master/<name>                         the master of a parameter of fewer bits
    optimizer/<number>/<parameter>/<key>  a tensor of an optimizer's state

So have values that are no tensors: what modules return from get_extra_state(), and other state of optimizers. These,
options and the user's `extra` are JSON's own, or an object with the member "$", which names their type:

    {"$": "tuple", "items": [...]}
    {"$": "complex", "items": [real, imaginary]}
    {"$": "dict" or "Counter", "items": [[key, value], ...]}            with keys that are no strings, or "$" among them
    {"$": "tensor" or "array", "dtype": "F32", "shape": [...], "value": number or "base64": bytes}
    {"$": "tensor", "number": 0}            in optimizer state: the tensor that is stored at <this path>/0

What a resumed run needs besides its model and optimizer is in entries of `extra`, too:

    resume/0/StepLR    of an object of the argument `resume`, by its position and class
    resume/random      Python's generator; the others are resume/numpy, resume/torch, and by the device's name
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.tensors import wraps_others

VERSION = 1
INDEX = "index.json"

CONFIGS = {"config.json": "config", "generation_config.json": "generation_config"}
"""Files of Hugging Face's libraries, and the attributes of a model that they are written from."""

LONGEST = 1 << 28
"""Bytes of an index, which is read into memory, at most."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""By their names in safetensors files."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

# How many names an error lists.
_LISTED = 8


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used as asked for; raised on every rank."""


@dataclass(frozen=True)
class Geometry:
    """A full tensor: its shape, its dtype, and the order in which its elements are counted.

    order: None is row-major; otherwise `tensor.permute(order)` is.
    slices: the elements of one of `tensor.split(width, dim)` are counted before those of the next: (dim, width).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] | None = None
    slices: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)  # torch.Size.numel() may overflow

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides, in elements, of a contiguous tensor whose dimensions are in this order in memory."""
        strides, step = [0] * len(self.shape), 1
        for dim in reversed(self.order or range(len(self.shape))):
            strides[dim], step = step, step * self.shape[dim]
        return tuple(strides)

    @property
    def counting(self) -> tuple[tuple[int, ...] | None, tuple[int, int] | None]:
        """Tensors of one shape with the same `counting` have their elements in the same order."""
        return self.order, self.slices

    def takes(self, stored: Geometry) -> bool:
        """Whether a stored tensor can be loaded: of this shape, and of this dtype or converted to it."""
        convertible = stored.dtype.is_floating_point and self.dtype.is_floating_point
        return stored.shape == self.shape and (convertible or stored.dtype == self.dtype)

    def part(self, shape: Sequence[int], dim: int, width: int, number: int) -> Part:
        """A tensor of this geometry as the slice of a full tensor with that number, counted from 0."""
        before = [shape[one] for one in takewhile(lambda one: one != dim, self.order or range(len(shape)))]
        in_one_run = math.prod(before) == 1 or width >= shape[dim]  # there is nothing to count apart
        full = Geometry(tuple(shape), self.dtype, self.order, None if in_one_run else (dim, width))
        start = min(number * width, shape[dim]) * (full.numel // max(shape[dim], 1))
        return Part(full, start, start + self.numel)

    def counted(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Views of a full tensor, one for each slice, whose elements are counted row by row, and how many precede."""
        low = 0
        for one in (tensor,) if self.slices is None else tensor.split(self.slices[1], self.slices[0]):
            yield low, one if self.order is None else one.permute(self.order)
            low += one.numel()


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a full tensor, counted in its order."""

    full: Geometry
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * self.full.dtype.itemsize

    @property
    def is_full(self) -> bool:
        return self.numel == self.full.numel


def all_of(full: Geometry) -> Part:
    return Part(full, 0, full.numel)


def geometry_of(tensor: Tensor) -> Geometry:
    """A tensor's geometry, with its dimensions in the order that they have in memory."""
    return Geometry(tuple(tensor.shape), tensor.dtype, memory_order(tensor.shape, tensor.stride()))


def memory_order(shape: Iterable[int], stride: Iterable[int]) -> tuple[int, ...] | None:
    """The dimensions ordered by stride, the largest first; None for row-major."""
    sizes, steps = tuple(shape), tuple(stride)
    long = [dim for dim, size in enumerate(sizes) if size > 1]
    ordered = sorted(long, key=lambda dim: -steps[dim])
    if ordered == long or 0 in sizes:
        return None
    return (*(dim for dim in range(len(sizes)) if dim not in long), *ordered)


def refuse_unstorable(name: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor that cannot be stored. name: in the error."""
    if wraps_others(tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, which wraps other tensors (DTensor, quantised). Store plain tensors."
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}. Store dense tensors.")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values. Give it values first.")
    if tensor.dtype not in NAMES:
        raise ValueError(f"{name} has dtype {tensor.dtype}, which safetensors files cannot hold.")


@dataclass(frozen=True)
class ParamShard:
    """Elements [start, stop) of a tensor, stored under `key` in a file, from byte `at` on."""

    file: str
    key: str
    at: int
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """A stored tensor. Its shards are in order and cover all elements."""

    geometry: Geometry
    shards: tuple[ParamShard, ...]

    def to_json(self) -> dict[str, Any]:
        full = self.geometry
        counting = {"order": full.order, "slices": full.slices}
        given = {key: value for key, value in counting.items() if value is not None}
        shards = [vars(shard) for shard in self.shards]
        return {"dtype": NAMES[full.dtype], "shape": full.shape, **given, "shards": shards}

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Entry:
        order, slices = (tuple(entry[key]) if key in entry else None for key in ("order", "slices"))
        full = Geometry(tuple(entry["shape"]), DTYPES[entry["dtype"]], order, slices)
        known = [one.name for one in fields(ParamShard)]
        return Entry(full, tuple(ParamShard(*(shard[name] for name in known)) for shard in entry["shards"]))

    def refuse_unsound(self, what: str) -> None:
        """Raises ValueError if it cannot be read. what: begins the text."""
        shape, (order, slices) = self.geometry.shape, self.geometry.counting
        sound = all(isinstance(size, int) and size >= 0 for size in shape)
        if order is not None:
            sound = sound and sorted(order) == list(range(len(shape)))
        if slices is not None:
            dim, width = slices  # every slice has a shard
            sound = sound and isinstance(width, int) and dim >= 0 and width * len(self.shards) >= shape[dim]
        if not sound:
            raise ValueError(f"{what} is described as {self.geometry!r}")
        end = 0
        for shard in self.shards:
            if shard.start != end or shard.stop < end:
                break
            end = shard.stop
        else:
            if end == self.geometry.numel and self.shards:
                return
        raise ValueError(f"{what} lacks elements from {end}")


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


def under(prefix: str, table: dict[str, Any]) -> dict[str, Any]:
    """What a table has at the paths that begin so, by the rest of each path."""
    return {path.removeprefix(prefix): one for path, one in table.items() if path.startswith(prefix)}


@dataclass
class Index:
    """`index.json`.

    stage, world: the stage and the number of ranks at saving.
    tensors, values: by path; values, which are what else modules and optimizers hold, as JSON.
    tied: for each further name of a tensor that several names share, the name that it is stored under.
    left_out: the frozen parameters that were not stored, by name.
    optimizers: of each its class, "kind", and "groups", {"params": [name, ...], "options": {name: value, as JSON}}.
    files: by name, of each the size, "bytes", and a checksum of every 4 MiB, "crc32".
    extra, extra_by_rank: the user's values, as JSON: those that were the same on all ranks, and the others, by rank.
    configs: what from_pretrained of the model's class reads besides weights, by the names of files in CONFIGS.
    saved: "by" which version of zero, "torch", and "at" what time.
    """

    stage: int
    world: int
    tensors: dict[str, Entry] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, Geometry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    extra_by_rank: list[dict[str, Any]] = field(default_factory=list)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)

    def stored_as(self) -> dict[str, str]:
        """The name that each of the model's names is stored under, or would be if it were not left out."""
        return {name: name for name in [*self.left_out, *under("model/", self.tensors)]} | self.tied

    def state(self, number: int) -> Iterator[tuple[str, str, Any, list[Entry]]]:
        """Of an optimizer's state the name of the parameter, the key, what is stored there, an Entry or JSON, and the
        tensors within that."""
        found = under(f"optimizer/{number}/", {**self.values, **self.tensors})
        for path, value in found.items():
            name, _, key = path.rpartition("/")
            if name not in found:  # else it is within that
                inside = takewhile(found.__contains__, (f"{path}/{position}" for position in count()))
                yield name, key, value, [found[one] for one in inside]

    def weight(self, name: str, dtype: torch.dtype) -> Entry:
        """What a parameter or buffer is read from that shall have a dtype: if it is stored in another, its master."""
        entry = self.tensors[f"model/{name}"]
        return entry if entry.geometry.dtype == dtype else self.tensors.get(f"master/{name}", entry)

    def dumps(self) -> str:
        """As JSON, with a checksum of itself."""
        entries = {
            "format": "zero",
            "version": VERSION,
            **vars(self),
            "tensors": {path: entry.to_json() for path, entry in self.tensors.items()},
            "left_out": {
                name: {"dtype": NAMES[full.dtype], "shape": full.shape} for name, full in self.left_out.items()
            },
        }
        return json.dumps({**entries, "sha256": _digest(entries)})

    @staticmethod
    def loads(text: str) -> Index:
        """Leaves out entries that this zero does not know: a later one may add some that a reader need not know."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is incomplete, or not JSON ({error})") from None
        if not isinstance(given, dict) or given.get("format") != "zero":
            raise ValueError("is not the index of a checkpoint of zero")
        if given.get("version") != VERSION:
            raise ValueError(f"is of another version than {VERSION}, the one that this zero reads")
        digest = given.pop("sha256", None)
        if digest != _digest(given):
            raise ValueError("does not have the checksum that it was written with: it was altered")
        try:
            given["tensors"] = {path: Entry.from_json(entry) for path, entry in given["tensors"].items()}
            given["left_out"] = {
                name: Geometry(tuple(entry["shape"]), DTYPES[entry["dtype"]])
                for name, entry in given.get("left_out", {}).items()
            }
            index = Index(**{one.name: given[one.name] for one in fields(Index) if one.name in given})
            if not all(isinstance(told, str) for told in index.saved.values()):
                raise ValueError(f"says that it was saved {index.saved!r}")
            if not all(isinstance(config, dict) for config in index.configs.values()):
                raise ValueError("has a configuration of the model that is none")
            room = {name: file["bytes"] for name, file in index.files.items() if "/" not in name}
            for path, entry in index.tensors.items():
                entry.refuse_unsound(f"says that {path}")
                for shard in entry.shards:
                    if shard.file not in room:
                        raise ValueError(f"names {shard.file!r}, which is none of its files")
                    nbytes = (shard.stop - shard.start) * entry.geometry.dtype.itemsize
                    room[shard.file] -= nbytes  # tensors in the same bytes could fill any disk from a small file
                    if room[shard.file] < 0 or not 0 <= shard.at <= index.files[shard.file]["bytes"] - nbytes:
                        raise ValueError(f"says that {path} is stored where nothing is, or another tensor")
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"has an entry that this zero cannot read ({error!r})") from None
        return index


def _digest(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


RESUMED = "resume/"
"""Begins the names of such entries of `extra`."""

# numpy's names for the dtypes that a checkpoint can hold.
_ARRAYS = {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}

_TAG = "$"

_MOST_BITS = 1 << 13  # of an integer: Python does not convert those of more than some thousand digits to text


def encode(value: Any, where: str, apart: list[Tensor] | None = None) -> Any:
    """A value as JSON. where: its name in errors. apart: gets the tensors with dimensions, which then are there by
    number. Raises ValueError for anything but the above and numpy's numbers."""
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"{where} is an integer of {value.bit_length()} bits. Save at most {_MOST_BITS}.")
    for plain in (int, float):  # also of subclasses
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, str):
        return str.__str__(value)  # an enum's member becomes its value
    if isinstance(value, complex):
        return {_TAG: "complex", "items": [value.real, value.imag]}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{i}]", apart) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: encode(item, f"{where}[{key!r}]", apart) for key, item in value.items()}
        items = [[encode(key, where), encode(item, f"{where}[{key!r}]", apart)] for key, item in value.items()]
        return {_TAG: "Counter" if isinstance(value, Counter) else "dict", "items": items}
    if isinstance(value, np.ndarray) and value.dtype.name in _ARRAYS and not isinstance(value, np.ma.MaskedArray):
        return {
            **encode(torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), ndmin=1)), where),
            "shape": list(value.shape),
            _TAG: "array",
        }
    if isinstance(value, Tensor):
        refuse_unstorable(where, value)
        if apart is not None and value.dim():
            apart.append(value)
            return {_TAG: "tensor", "number": len(apart) - 1}
        encoded = {_TAG: "tensor", "dtype": NAMES[value.dtype], "shape": list(value.shape)}
        if value.dim() == 0 and not value.dtype.is_complex and value.dtype.itemsize != 1:
            return {**encoded, "value": value.item()}
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return {**encoded, "base64": base64.b64encode(flat.numpy().tobytes()).decode()}
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold. Save numbers, "
        "strings, lists, tuples, dictionaries and plain tensors of them, such as a state_dict()."
    )


def decode(encoded: Any, apart: Callable[[int], Tensor] | None = None) -> Any:
    """The value that was encoded. apart: returns the tensors that are there by number."""
    if isinstance(encoded, list):
        return [decode(item, apart) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    kind = encoded.get(_TAG)
    if kind is None:
        return {key: decode(item, apart) for key, item in encoded.items()}
    if kind == "tuple":
        return tuple(decode(item, apart) for item in encoded["items"])
    if kind == "complex":
        return complex(*encoded["items"])
    if kind in ("dict", "Counter"):
        items = {decode(key): decode(item, apart) for key, item in encoded["items"]}
        return Counter(items) if kind == "Counter" else items
    if kind == "array":
        return decode({**encoded, _TAG: "tensor"}).numpy()
    if apart is not None and "number" in encoded:
        return apart(encoded["number"])
    dtype = DTYPES[encoded["dtype"]]
    if "value" in encoded:
        return torch.tensor(encoded["value"], dtype=dtype, device="cpu")
    data = bytearray(base64.b64decode(encoded["base64"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.view(encoded["shape"])


def label(name: str) -> str:
    """What an entry of `extra` is called in messages."""
    return name if name.startswith(RESUMED) else f"extra[{name!r}]"


def resumed(resume: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How to get and how to set each state of a resumed run, by the name of the entry of `extra`."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
    if resume is None:
        return found
    for number, one in enumerate(resume if isinstance(resume, list | tuple) else [resume]):
        name = f"{RESUMED}{number}/{type(one).__name__}"
        if isinstance(one, torch.Generator):
            found[name] = one.get_state, one.set_state
            continue
        has_state = callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))
        if isinstance(one, nn.Module | Optimizer) or not has_state:
            raise ValueError(
                f"resume[{number}] is a {type(one).__name__}. Pass objects with state_dict() and load_state_dict(), as "
                "schedulers and GradScalers have, and torch.Generators; model and optimizer have arguments of their "
                "own, and anything else belongs into extra"
            )
        found[name] = one.state_dict, one.load_state_dict
    # The generators last, because setting others may draw.
    found[f"{RESUMED}random"] = random.getstate, random.setstate
    found[f"{RESUMED}numpy"] = np.random.get_state, np.random.set_state
    found[f"{RESUMED}torch"] = torch.get_rng_state, torch.set_rng_state
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        module = torch.get_device_module(device)
        found[f"{RESUMED}{device.type}"] = module.get_rng_state, module.set_rng_state
    return found
