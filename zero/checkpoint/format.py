"""What a checkpoint says of its tensors: the index, to JSON and back.

A checkpoint is a directory. `index.json` names every tensor and the pieces that make it up; the pieces lie in one
safetensors file a rank. A piece is a run of a tensor's elements, counted in row-major order, or, where the tensor is
stored with its dimensions in another order, in row-major order of the permuted tensor. Tensors have paths:

    model/<name>                          a parameter or buffer, by the module's own name
    master/<name>                         the master of a parameter kept in fewer bits
    optimizer/<number>/<parameter>/<key>  a tensor of an optimizer's state
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero._torch import wraps_others

VERSION = 1
INDEX = "index.json"

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
"""By the names that safetensors gives them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used as asked for; raised on every rank."""


# ----------------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class Geometry:
    """A full tensor: its shape, its dtype, and the order of dimensions in which its elements are counted.

    order: None is row-major; otherwise `tensor.permute(order)` is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)  # which does not overflow, as torch.Size's own does

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart in the count of elements neighbours along each dimension are."""
        strides, step = [0] * len(self.shape), 1
        for dim in reversed(self.order or range(len(self.shape))):
            strides[dim], step = step, step * self.shape[dim]
        return tuple(strides)

    def flat(self, tensor: Tensor) -> Tensor:
        """A full tensor as its elements are counted: a view where memory has them in that order, else a copy."""
        return (tensor if self.order is None else tensor.permute(self.order)).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        """The full tensor, as a view, of a flat one whose elements are counted so."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())


def geometry_of(tensor: Tensor) -> Geometry:
    """A tensor's geometry, with the dimensions in the order of memory."""
    return Geometry(tuple(tensor.shape), tensor.dtype, memory_order(tensor.shape, tensor.stride()))


def memory_order(shape: Iterable[int], stride: Iterable[int]) -> tuple[int, ...] | None:
    """The dimensions as strides order them, None for row-major."""
    sizes, steps = tuple(shape), tuple(stride)
    long = [dim for dim, size in enumerate(sizes) if size > 1]
    ordered = sorted(long, key=lambda dim: -steps[dim])
    if ordered == long or 0 in sizes:
        return None
    return (*(dim for dim in range(len(sizes)) if dim not in long), *ordered)


def tensor_problem(tensor: Tensor) -> str | None:
    """Why a tensor cannot be stored, in words for the user; None if it can."""
    if wraps_others(tensor):
        return f"is a {type(tensor).__name__}, which wraps other tensors (DTensor, quantised). Store plain tensors"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}. Store dense tensors"
    if tensor.is_meta:
        return "is on the meta device and has no values. Give it values first"
    if tensor.dtype not in NAMES:
        return f"has dtype {tensor.dtype}, which safetensors files cannot hold"
    return None


@dataclass(frozen=True)
class ParamShard:
    """Elements [start, stop) of a tensor, stored under `key` in a file."""

    file: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """A stored tensor. Its pieces come in order and leave nothing out."""

    geometry: Geometry
    pieces: tuple[ParamShard, ...]

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"dtype": NAMES[self.geometry.dtype], "shape": list(self.geometry.shape)}
        if self.geometry.order is not None:
            told["order"] = list(self.geometry.order)
        told["pieces"] = [vars(piece) for piece in self.pieces]
        return told

    @staticmethod
    def from_json(told: dict[str, Any]) -> Entry:
        order = tuple(told["order"]) if "order" in told else None
        geometry = Geometry(tuple(told["shape"]), DTYPES[told["dtype"]], order)
        return Entry(geometry, tuple(ParamShard(**piece) for piece in told["pieces"]))

    def problem(self) -> str | None:
        """What is wrong with it, in words for the user."""
        shape, order = self.geometry.shape, self.geometry.order
        if any(not isinstance(size, int) or size < 0 for size in shape):
            return f"has the shape {list(shape)}"
        if order is not None and sorted(order) != list(range(len(shape))):
            return f"has its dimensions in the order {list(order)}"
        end = 0
        for piece in self.pieces:
            if piece.start != end or piece.stop < end:
                return f"lacks elements from {end}"
            end = piece.stop
        return None if end == self.geometry.numel and self.pieces else f"lacks elements from {end}"


# ------------------------------------------------------------------------------------------------------------- index


@dataclass
class OptimizerIndex:
    """One optimizer: its parameter groups, and its state by parameter and key.

    kind: the class's name; empty where it is not known.
    groups: of each {"params": [name, ...], "options": {name: value, as JSON}}.
    tensors: {parameter: {key: path}} of state that is a tensor.
    values: {parameter: {key: value, as JSON}} of all other state.
    """

    kind: str
    groups: list[dict[str, Any]]
    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def names(self) -> set[str]:
        """The parameters that have state."""
        return {*self.tensors, *self.values}


@dataclass
class Index:
    """`index.json`.

    stage, world: what it was saved at; of one that was imported the stage is None.
    tensors: by path.
    tied: of names that share a tensor, each further one and the one that it is stored under.
    values: of the module's state_dict what is no tensor, by name, as JSON.
    files: by name, the size and the header's checksum of each.
    extra, extra_by_rank: what the user gave, as JSON, and what of it differed between ranks, rank by rank.
    """

    stage: int | None
    world: int
    tensors: dict[str, Entry] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    optimizers: list[OptimizerIndex] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    extra_by_rank: list[dict[str, Any]] = field(default_factory=list)

    def names(self, kind: str = "model") -> list[str]:
        """The names that tensors of a kind are stored under."""
        return [path.removeprefix(f"{kind}/") for path in self.tensors if path.startswith(f"{kind}/")]

    def entry(self, name: str) -> Entry:
        """A parameter or buffer, by any of its names."""
        return self.tensors[f"model/{self.tied.get(name, name)}"]

    def take_extras(self, extras: Sequence[dict[str, Any]]) -> None:
        """Keeps what the ranks gave, as JSON and rank by rank: once what all of them gave alike."""
        told = [{key: json.dumps(value) for key, value in one.items()} for one in extras]  # as text NaN equals itself
        shared = {key for key, text in told[0].items() if all(one.get(key) == text for one in told)}
        self.extra = {key: value for key, value in extras[0].items() if key in shared}
        by_rank = [{key: value for key, value in one.items() if key not in shared} for one in extras]
        self.extra_by_rank = by_rank if any(by_rank) else []

    def find_state(self) -> None:
        """Has the optimizers know which tensors are their state, by the tensors' paths."""
        for path in self.tensors:
            kind, _, rest = path.partition("/")
            if kind == "optimizer":
                number, _, rest = rest.partition("/")
                param, _, key = rest.rpartition("/")
                self.optimizers[int(number)].tensors.setdefault(param, {})[key] = path

    def dumps(self) -> str:
        """As JSON, with a checksum of itself."""
        told = {
            "format": "zero",
            "version": VERSION,
            **vars(self),
            "tensors": {path: entry.to_json() for path, entry in self.tensors.items()},
            "optimizers": [vars(optimizer) for optimizer in self.optimizers],
        }
        return json.dumps({**told, "sha256": _digest(told)})

    @staticmethod
    def loads(text: str) -> Index:
        """Raises ValueError, in words for the user, where the text is not a whole index of this version."""
        try:
            told = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not whole, or not JSON ({error})") from None
        if not isinstance(told, dict) or told.pop("format", None) != "zero":
            raise ValueError("is not the index of a checkpoint of zero")
        if told.pop("version", None) != VERSION:
            raise ValueError(f"is of another version than {VERSION}, which is what this zero reads")
        digest = told.pop("sha256", None)
        if digest != _digest({"format": "zero", "version": VERSION, **told}):
            raise ValueError("does not have the checksum that it was written with: it was altered")
        try:
            told["tensors"] = {path: Entry.from_json(entry) for path, entry in told["tensors"].items()}
            told["optimizers"] = [OptimizerIndex(**optimizer) for optimizer in told["optimizers"]]
            index = Index(**told)
            index.refuse_nonsense()
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"says something that this zero does not know ({error!r})") from None
        return index

    def refuse_nonsense(self) -> None:
        """Raises ValueError, in words for the user, where tensors are not stored full, and each in a place of its own.

        If pieces could be stored at one place, a small file could be made to fill any disk.
        """
        taken: set[tuple[str, str]] = set()
        for path, entry in self.tensors.items():
            problem = entry.problem()
            if problem:
                raise ValueError(f"says that {path} {problem}")
            for piece in entry.pieces:
                if (piece.file, piece.key) in taken:
                    raise ValueError(f"says that {path} is stored where something else is")
                taken.add((piece.file, piece.key))


def _digest(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
