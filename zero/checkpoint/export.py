"""A checkpoint's weights for other libraries: in Hugging Face's files, or as torch's distributed checkpoint.

Weights are streamed, BUFFER bytes at a time, so a model larger than any memory can be exported. A tensor that several
names share is written once for each, because `load_state_dict(strict=True)` requires all names, and safetensors has no
aliases.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero._torch import warn_user
from zero.checkpoint import directory
from zero.checkpoint.files import Chunk, SafeFile, progress, write
from zero.checkpoint.format import Entry, Index, all_of, listed
from zero.checkpoint.source import Source
from zero.checkpoint.storage import Local, mounted, place
from zero.checkpoint.values import decode

SHARD_INDEX = "model.safetensors.index.json"
SHARD_SIZE = 5 * 10**9


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_size: int = SHARD_SIZE,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Writes the weights as `model.safetensors`, or as shards with `model.safetensors.index.json`. Returns the files.

    path: a run's directory, or one checkpoint's, or its URL. out: a mounted directory without files of these names.
    max_shard_size: bytes; a larger tensor gets a file of its own.
    dtype: of floating-point tensors, by default as they are stored. Where masters were stored, a dtype of more bits
        than the parameter's takes the master.

    Extra state (get_extra_state) is exported if it is a tensor; a warning names what is left out.

    Raises ValueError where the checkpoint is damaged or `out` has weights already, and leaves no files there.
    """
    target = _vacant(out, "model*.safetensors*")
    with Source(directory.resolve(place(path))) as source:
        chunks = _chunks(source, _weights(source.index, dtype)) | _extra_states(source.index)
        shards = _shards([chunk for _, chunk in sorted(chunks.items())], max_shard_size)
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            names = ["model.safetensors"]
        with _written(target, dict(zip(names, shards, strict=True))) as folder:
            if len(shards) > 1:
                file_of = {chunk.key: file for file, shard in zip(names, shards, strict=True) for chunk in shard}
                index = {"metadata": {"total_size": sum(one.nbytes for one in chunks.values())}, "weight_map": file_of}
                (folder / SHARD_INDEX).write_text(json.dumps(index, indent=2))
                names.append(SHARD_INDEX)
            for file in names:
                (folder / file).rename(target / file)
            Local(target).sync()
    return [target / file for file in names]


def _vacant(out: str | os.PathLike[str], *patterns: str) -> Path:
    """The directory to export to. Raises ValueError where it has files of such names already."""
    target = mounted(out, "the directory to export to")
    found = [one.name for pattern in patterns for one in target.glob(pattern)] if target.is_dir() else []
    if found:
        raise ValueError(f"{target} has {found[0]} already. Choose another directory, or remove its weights.")
    return target


@contextmanager
def _written(target: Path, files: dict[str, list[Chunk]]) -> Iterator[Path]:
    """A directory inside the target, with files of these names and tensors. Is removed in the end."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target) as folder:
        with progress("exporting", sum(chunk.nbytes for chunks in files.values() for chunk in chunks)) as tick:
            for name, chunks in files.items():
                write(Local(Path(folder, name)), chunks, {}, tick)
        yield Path(folder)


def _weights(index: Index, dtype: torch.dtype | None) -> dict[str, tuple[Entry, torch.dtype]]:
    """For every name of the model the stored tensor to read (it, or its master), and the dtype to write."""
    found = {}
    for name, stored_as in sorted(index.stored_as().items()):
        entry, master = index.entry(stored_as), index.master(stored_as)
        if master is not None and dtype is not None and dtype.itemsize > entry.geometry.dtype.itemsize:
            entry = master
        stored = entry.geometry.dtype
        found[name] = entry, dtype if dtype is not None and stored.is_floating_point else stored
    return found


def _chunks(source: Source, wanted: dict[str, tuple[Entry, torch.dtype]]) -> dict[str, Chunk]:
    """Chunks that stream stored tensors, row-major, in other dtypes. Compares all checksums first."""
    entries = [entry for entry, _ in wanted.values()]
    source.check(((entry, all_of(replace(entry.geometry, order=None))) for entry in entries), shown=True)
    return {
        key: Chunk(key, dtype, entry.geometry.shape, partial(source.stream, entry, dtype))
        for key, (entry, dtype) in wanted.items()
    }


def _extra_states(index: Index) -> dict[str, Chunk]:
    """The modules' extra state that is tensors. Warns of the rest, which safetensors cannot hold."""
    values = {name: decode(value) for name, value in index.values.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if others := sorted(values.keys() - tensors.keys()):
        warn_user(
            f"safetensors files hold tensors only, and {listed(others)} of get_extra_state() is none: left out. Load "
            "these weights with strict=False, or export --to dcp, which holds it."
        )
    return {
        name: Chunk(name, tensor.dtype, tuple(tensor.shape), partial(iter, [tensor.reshape(-1)]))
        for name, tensor in tensors.items()
    }


def _shards(chunks: list[Chunk], limit: int) -> list[list[Chunk]]:
    shards: list[list[Chunk]] = [[]]
    size = 0
    for chunk in chunks:
        if shards[-1] and size + chunk.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(chunk)
        size += chunk.nbytes
    return shards


def export_dcp(path: str | os.PathLike[str], out: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Writes model and optimizer as a checkpoint of torch.distributed.checkpoint, in the form of `get_state_dict`.

    It holds {"model": ..., "optim": ...} (of several optimizers "optim.0", ...), with state by the parameters' names.
    Needs room in `out` for a temporary file of the same size.

    out: a mounted directory without such a checkpoint.
    dtype: of the model's floating-point tensors, as in `export`; state keeps its stored dtype.

    Raises ValueError where the checkpoint is damaged or `out` has another already.
    """
    import torch.distributed.checkpoint as dcp

    target = _vacant(out, ".metadata", "*.distcp")
    with Source(directory.resolve(place(path))) as source:
        index = source.index
        model = {f"model/{name}": wanted for name, wanted in _weights(index, dtype).items()}
        state = {
            path: (one, one.geometry.dtype) for path, one in index.tensors.items() if path.startswith("optimizer/")
        }
        chunks = _chunks(source, model | state)
        with _written(target, {"all.safetensors": [*chunks.values()]}) as folder:
            dcp.save(_nested(index, _mapped(folder / "all.safetensors")), checkpoint_id=target, no_dist=True)


def _nested(index: Index, mapped: dict[str, Tensor]) -> dict[str, Any]:
    """The dictionary to save. mapped: the tensors, by path; tied ones by all of their names."""
    model = {name: mapped[f"model/{name}"] for name in sorted(index.stored_as())}
    nested: dict[str, Any] = {"model": model | decode(index.values)}
    for number, optimizer in enumerate(index.optimizers):
        state: dict[str, dict[str, Any]] = {name: {} for name in {**optimizer.tensors, **optimizer.values}}
        for name, entries in state.items():
            entries |= {key: mapped[path] for key, path in optimizer.tensors.get(name, {}).items()}
            entries |= {key: decode(value) for key, value in optimizer.values.get(name, {}).items()}
        groups = [{**decode(group["options"]), "params": group["params"]} for group in optimizer.groups]
        key = "optim" if len(index.optimizers) == 1 else f"optim.{number}"
        nested[key] = {"state": state, "param_groups": groups}
    return nested


def _mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, as views of the file mapped to memory."""
    with SafeFile(Local(path)) as file:
        data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        return {
            key: data[file.data_offset + low :][: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for key, (dtype, shape, low) in file.tensors.items()
        }
