"""The three kinds of foreign checkpoints, each read into a Found: torch.save, safetensors, torch's distributed ones."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero._torch import load_plain_values
from zero.checkpoint.files import SafeFile
from zero.checkpoint.state_dicts import MODEL_KEYS, OPTIMIZER_KEYS, Found, found_in, is_extra_state
from zero.checkpoint.storage import Local
from zero.checkpoint.torch_distributed import NotPlain, Stored, read_directory
from zero.checkpoint.values import encode


def read_torch(path: Path) -> Found:
    try:
        loaded = load_plain_values(path)
    except Exception as error:
        raise ValueError(
            f"{path} is no file of torch.save that holds weights and plain values only, and was not read ({error})."
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, not a state_dict or a dictionary of them.")
    return found_in(loaded, str(path))


# -------------------------------------------------------------------------------------------------------- safetensors


def read_safetensors(path: Path) -> Found:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has neither safetensors files nor the .metadata of a torch distributed checkpoint.")
    file_of: dict[str, Path] = {}

    def read(key: str) -> Tensor:
        with SafeFile(Local(file_of[key])) as file:
            dtype, shape, low = file.tensors[key]
            flat = torch.empty(torch.Size(shape).numel(), dtype=dtype, device="cpu")
            file.check([(low, low + flat.nbytes)], lambda _: None)
            file.read(flat, low)
            return flat.view(shape)

    found = Found(load=lambda path: read(path.removeprefix("model/")))
    for one in files:
        with SafeFile(Local(one)) as file:
            for key, (dtype, shape, _) in file.tensors.items():
                if key in file_of:
                    raise ValueError(f"{key!r} is in {file_of[key]} and in {one}: give one model's files only.")
                file_of[key] = one
                if is_extra_state(key):
                    found.values[key] = encode(read(key), key)
                else:
                    found.tensors[f"model/{key}"] = torch.empty(shape, dtype=dtype, device="meta")
    _refuse_missing(path, file_of)
    return found


def _refuse_missing(path: Path, file_of: dict[str, Path]) -> None:
    """Raises ValueError where a tensor is not in the file that Hugging Face's index of shards names for it."""
    for index in path.glob("*.safetensors.index.json"):
        for key, name in _weight_map(index).items():
            if file_of.get(key) != path / name:
                lacks = f"has no {key!r}" if (path / name).exists() else "is not there"
                raise ValueError(f"{path / name} {lacks}, but {index.name} names it. Bring the whole model there.")


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by Hugging Face's index of shards."""
    try:
        return {key: str(name) for key, name in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files, or it is incomplete ({error!r}).") from None


# ------------------------------------------------------------------------------------- torch's distributed checkpoint


def read_dcp(path: Path) -> Found:
    """Reads tensors by their paths in the dictionary that was saved: ("model", name), ("optim", ...)."""
    nested: dict[str, Any] = {}
    stored_as: dict[Tensor, Stored] = {}
    for stored in read_directory(path):
        if stored.dtype is None or not stored.size or any(is_extra_state(str(atom)) for atom in stored.path):
            try:
                _insert(nested, stored.path, stored.read())
            except NotPlain as error:
                if stored.path[0] in (*MODEL_KEYS, *OPTIMIZER_KEYS):
                    raise
                warnings.warn(f"left out: {error}", stacklevel=3)
        else:
            value = torch.empty(stored.size, dtype=stored.dtype, device="meta")
            stored_as[value] = stored
            _insert(nested, stored.path, value)
    found = found_in(_with_lists(nested), str(path))

    def load(path: str) -> Tensor:
        tensor = found.tensors[path]
        return stored_as[tensor].read() if tensor in stored_as else tensor

    found.load = load
    return found


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
