"""torch's distributed checkpoints, read without loading a pickle.

    .metadata       a pickle: for each key a tensor's dtype, size and chunks, or that it is a value; and their places
    *.distcp        files of torch.save, one after another: a chunk or a value each

The pickle is never loaded. Its instructions are read one by one. An instruction that would make an object makes a
record of it instead, and an instruction that torch does not write is refused: nothing is imported, looked up or called
by a name from a file. Chunks and values are read by torch.load(weights_only=True).
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero._torch import warn_user
from zero.checkpoint.format import is_extra_state

METADATA = ".metadata"

_OWN = "torch.distributed.checkpoint.metadata."
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"

_MOST_METADATA = 1 << 28
"""The most bytes that are read into memory."""

_DEEPEST = 100
"""The most levels of dictionaries and lists."""


class _NotPlain(ValueError):
    """Neither a tensor nor a plain value: torch.load(weights_only=True) refuses it."""


@dataclass
class _Made:
    """A record of an object that the pickle makes: its class, the class's arguments, and the state set afterwards."""

    kind: str
    arguments: Any
    state: Any = None


class _Pairs(list[Any]):
    """A dictionary as a list of keys and values in turn. Keys may be anything, and are not hashed."""

    def as_dict(self) -> dict[str, Any]:
        """The dictionary. Raises ValueError for a key that is no string."""
        keys = self[::2]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is no string")
        return dict(zip(keys, self[1::2], strict=True))


class _Instructions:
    """Runs the instructions of torch's metadata pickles on records instead of objects."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: list[Any] = []

    def follow(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._follow(opcode.name, argument)
        raise ValueError("it has no end")

    def _follow(self, name: str, argument: Any) -> None:
        match name:
            case "PROTO" | "FRAME":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
                self._stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self._stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                self._stack.append({"EMPTY_DICT": _Pairs, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
            case "MARK":
                self._below.append(self._stack)
                self._stack = []
            case "TUPLE":
                items = self._since_mark()
                self._stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._stack.append(tuple(self._last(int(name[-1]))))
            case "APPENDS" | "SETITEMS":
                self._extend(list if name == "APPENDS" else _Pairs, self._since_mark())
            case "APPEND" | "SETITEM":
                self._extend(*((list, self._last(1)) if name == "APPEND" else (_Pairs, self._last(2))))
            case "MEMOIZE":
                self._memo.append(self._stack[-1])
            case "BINGET" | "LONG_BINGET":
                self._stack.append(self._memo[argument])
            case "STACK_GLOBAL":
                self._stack.append(_Made(".".join(self._last(2)), None))
            case "NEWOBJ" | "REDUCE":
                made, arguments = self._last(2)
                self._stack.append(_Made(made.kind, arguments))
            case "BUILD":
                made, state = self._last(2)
                made.state = state
                self._stack.append(made)
            case _:
                raise ValueError(f"{name} among its instructions, which torch does not write")

    def _last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("an instruction without its operands")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        taken, self._stack = self._stack, self._below.pop()
        return taken

    def _extend(self, kind: type[list[Any]], items: list[Any]) -> None:
        if type(self._stack[-1]) is not kind or (kind is _Pairs and len(items) % 2):
            raise ValueError("an instruction without its operands")
        self._stack[-1].extend(items)


@dataclass(frozen=True)
class _Slice:
    """A file of torch.save within a file."""

    file: Path
    start: int
    length: int

    def load(self) -> Any:
        with self.file.open("rb") as file:
            file.seek(self.start)
            return torch.load(io.BytesIO(file.read(self.length)), map_location="cpu", weights_only=True)


@dataclass(frozen=True)
class _Stored:
    """A tensor, or (dtype None) a value. path: its keys in the dictionary that was saved."""

    path: tuple[str | int, ...]
    dtype: torch.dtype | None
    size: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], _Slice]]

    def read(self) -> Any:
        try:
            if self.dtype is None:
                return self.chunks[0][2].load()
            full = torch.empty(self.size, dtype=self.dtype, device="cpu")
            for low, size, where in self.chunks:
                chunk = where.load()
                if not isinstance(chunk, Tensor) or chunk.dtype != self.dtype or chunk.shape != size:
                    raise ValueError(f"it has no {self.dtype} of size {size} where its metadata says so")
                full[tuple(slice(a, a + b) for a, b in zip(low, size, strict=True))] = chunk
            return full
        except Exception as error:
            name = f"{'.'.join(map(str, self.path))!r} of {self.chunks[0][2].file.parent}"
            raise _NotPlain(f"{name} is no tensor or plain value, and was not read ({error}).") from None


def read_nested(path: Path, needed: Set[str | int]) -> tuple[Any, dict[Tensor, Callable[[], Tensor]]]:
    """The dictionary that was saved, and how to read its tensors on the meta device. needed: keys that must be read."""
    nested: dict[str | int, Any] = {}
    readers: dict[Tensor, Callable[[], Tensor]] = {}
    for stored in _read_metadata(path):
        if stored.dtype is None or not stored.size or any(is_extra_state(str(atom)) for atom in stored.path):
            try:
                value = stored.read()
            except _NotPlain as error:
                if not needed.isdisjoint(stored.path[:2]):  # at the top, or in the one entry of a Stateful
                    raise
                warn_user(f"left out: {error}")
                continue
        else:
            value = torch.empty(stored.size, dtype=stored.dtype, device="meta")
            readers[value] = stored.read
        _insert(nested, stored.path, value)
    return _with_lists(nested), readers


def _insert(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for atom in path[:-1]:
        nested = nested.setdefault(atom, {})
        if not isinstance(nested, dict):
            raise ValueError(f"{'.'.join(map(str, path))} is inside something that is no dictionary.")
    nested[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """The value, with dictionaries whose keys are 0, 1, ... turned back into lists, which torch saves so."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and all(isinstance(key, int) for key in items) and sorted(items) == list(range(len(items))):
        return [items[number] for number in range(len(items))]
    return items


def _read_metadata(path: Path) -> list[_Stored]:
    file = path / METADATA
    if file.stat().st_size > _MOST_METADATA:
        raise ValueError(f"{file} has more than the {_MOST_METADATA} bytes that metadata may have.")
    try:
        metadata = _fields(_Instructions().follow(file.read_bytes()), "Metadata")
        paths = metadata["planner_data"].as_dict() if metadata["planner_data"] else {}
        slices: dict[tuple[str, tuple[int, ...]], _Slice] = {}
        pairs = metadata["storage_data"]
        for index, where in zip(pairs[::2], pairs[1::2], strict=True):
            key = _fields(index, "MetadataIndex")
            low = () if key.get("offset") is None else _sizes(key["offset"])
            slices[str(key["fqn"]), low] = _slice(_made(where, _STORED).state.as_dict(), path)
        described = metadata["state_dict_metadata"].as_dict()
        return [_stored(key, paths.get(key, (key,)), one, slices) for key, one in described.items()]
    except Exception as error:
        raise ValueError(
            f"{file} is not what torch.distributed.checkpoint writes, and was not read ({error})."
        ) from None


def _stored(key: str, path: Any, described: Any, slices: dict[tuple[str, tuple[int, ...]], _Slice]) -> _Stored:
    plain = isinstance(path, tuple) and all(type(atom) in (str, int) for atom in path)
    if not plain or not 0 < len(path) <= _DEEPEST:
        raise ValueError(f"no path for {key!r}")
    if isinstance(described, _Made) and described.kind == _OWN + "BytesStorageMetadata":
        return _Stored(path, None, (), [((), (), slices[key, ()])])
    fields = _fields(described, "TensorStorageMetadata")
    dtype, size = _dtype(_made(fields["properties"], _OWN + "TensorProperties").state[0]), _sizes(fields["size"])
    chunks = []
    for chunk in fields["chunks"]:
        place = _fields(chunk, "ChunkStorageMetadata")
        low, sizes = _sizes(place["offsets"]), _sizes(place["sizes"])
        if not len(low) == len(sizes) == len(size) or any(a + b > c for a, b, c in zip(low, sizes, size, strict=True)):
            raise ValueError(f"a chunk of {key!r} that is outside of it")
        where = slices[key, low]
        if math.prod(sizes) * dtype.itemsize > where.length:
            raise ValueError(f"more of {key!r} than its file holds")
        chunks.append((low, sizes, where))
    distinct = len({low for low, _, _ in chunks}) == len(chunks)
    if not distinct or sum(math.prod(sizes) for _, sizes, _ in chunks) != math.prod(size):
        raise ValueError(f"chunks that do not make up {key!r}")
    return _Stored(path, dtype, size, chunks)


def _made(value: Any, kind: str) -> _Made:
    if not isinstance(value, _Made) or value.kind != kind:
        found = value.kind if isinstance(value, _Made) else type(value).__name__
        raise ValueError(f"{found} where {kind} should be")
    return value


def _fields(value: Any, kind: str) -> dict[str, Any]:
    return _made(value, _OWN + kind).state.as_dict()  # type: ignore[no-any-return]


def _sizes(value: Any) -> tuple[int, ...]:
    (sizes,) = _made(value, "torch.Size").arguments
    if not isinstance(sizes, tuple) or not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise ValueError("a torch.Size that is none")
    return sizes


def _dtype(value: Any) -> torch.dtype:
    module, _, name = value.kind.rpartition(".") if isinstance(value, _Made) else ("", "", "")
    dtype = vars(torch).get(name) if module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name or type(value).__name__} where a dtype should be")
    return dtype


def _slice(stored: dict[str, Any], path: Path) -> _Slice:
    name, start, length = stored["relative_path"], stored["offset"], stored["length"]
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r}, which is no name of a file beside it")
    if stored.get("transform_descriptors"):
        raise ValueError("values that were transformed, such as compressed: save the checkpoint again without that")
    if type(start) is not int or type(length) is not int or not 0 <= start <= start + length:
        raise ValueError("a place in a file that is none")
    if start + length > (path / name).stat().st_size:
        raise ValueError(f"more of {name} than there is")
    return _Slice(path / name, start, length)
