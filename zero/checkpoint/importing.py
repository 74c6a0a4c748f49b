"""Checkpoints of other libraries, made into one of zero's.

Read are plain files of torch.save, safetensors and torch's distributed checkpoints. Nothing is unpickled but by
torch.load(weights_only=True). The pickle in torch's distributed checkpoints is not loaded either
(torch_distributed.py).
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero._torch import load_plain_values
from zero.checkpoint import directory
from zero.checkpoint.files import SafeFile
from zero.checkpoint.format import tensor_problem
from zero.checkpoint.rank_files import SavePlan, seal, write_rank_file
from zero.checkpoint.shards import Held, whole
from zero.checkpoint.state_dicts import MASTER, MODEL_KEYS, OPTIMIZER_KEYS, Found, found_in, is_extra_state
from zero.checkpoint.storage import Local, Place, mounted, place
from zero.checkpoint.torch_distributed import METADATA, NotPlain, Stored, read_directory
from zero.checkpoint.values import encode


def import_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path | str:
    """Makes a checkpoint in the run's directory `path` of another library's. Returns its path, or its URL.

    source: a file of torch.save (read with weights_only=True): a state_dict, or a dictionary of one ("model",
        "state_dict") and perhaps the optimizer's ("optim", "optimizer") and values, which become `extra`; a safetensors
        file, or a directory of them; or the directory of a torch distributed checkpoint.

    An optimizer that knows its parameters by number only is taken to have been built from model.parameters(). A warning
    says so where the shapes cannot confirm it.

    Masters are imported if they round to the imported parameters. Others are out of date: an optimizer that does not
    know them has carried them along. One tensor is in memory at a time, or a master and its parameter.
    Raises ValueError for any other file or directory.
    """
    given = mounted(source, "what is imported")
    if given.is_dir() and (given / METADATA).is_file():
        found = _read_dcp(given)
    elif given.is_dir() or given.suffix == ".safetensors":
        found = _read_safetensors(given)
    elif given.is_file():
        found = _read_torch(given)
    else:
        raise ValueError(f"{given} is not there.")
    for stored_at, tensor in found.tensors.items():
        if problem := tensor_problem(tensor if found.load is None else tensor.new_empty(0, device="cpu")):
            raise ValueError(f"{stored_at} {problem}.")
    _remove_outdated_masters(found)
    return _write(found, place(path)).public


def _remove_outdated_masters(found: Found) -> None:
    for path in [path for path in found.tensors if path.startswith(MASTER)]:
        name = path.removeprefix(MASTER)
        param_path = f"model/{found.index.tied.get(name, name)}"
        if param_path in found.tensors:
            param = found.value(param_path)
            if torch.equal(found.value(path).to(param.dtype), param):
                continue
        del found.tensors[path]


@dataclass(frozen=True, kw_only=True)
class _Foreign(Held):
    """A tensor whose values are read when it is written. tensor: may be on the meta device."""

    found: Found

    def flat(self) -> Tensor:
        return self.full.flat(self.found.value(self.name))


def _write(found: Found, run: Place) -> Place:
    held: list[Held] = [_Foreign(**vars(whole(path, tensor)), found=found) for path, tensor in found.tensors.items()]
    values = [optimizer.values for optimizer in found.index.optimizers]
    partial = directory.begin(run)
    try:
        write_rank_file(partial, 0, SavePlan(found.index, held, values), shown=True)
        return seal(partial, found.index, keep=None)
    except BaseException:
        partial.remove()
        raise


# -------------------------------------------------------------------------------------------------- files of torch.save


def _read_torch(path: Path) -> Found:
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


def _read_safetensors(path: Path) -> Found:
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
                    found.index.values[key] = encode(read(key), key)
                else:
                    found.tensors[f"model/{key}"] = torch.empty(shape, dtype=dtype, device="meta")
    _refuse_missing(path, file_of)
    return found


def _refuse_missing(path: Path, file_of: dict[str, Path]) -> None:
    """Raises ValueError where a tensor is not in the file that Hugging Face's index of shards names for it."""
    for index in path.glob("*.safetensors.index.json"):
        try:
            wanted = {key: path / str(name) for key, name in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files, or it is incomplete ({error!r}).") from None
        for key, file in wanted.items():
            if file_of.get(key) != file:
                lacks = f"has no {key!r}" if file.exists() else "is not there"
                raise ValueError(f"{file} {lacks}, but {index.name} names it. Bring the whole model there.")


# ------------------------------------------------------------------------------------- torch's distributed checkpoint


def _read_dcp(path: Path) -> Found:
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
