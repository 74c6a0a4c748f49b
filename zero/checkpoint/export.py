"""A checkpoint's weights for other libraries: in Hugging Face's files, or as torch's distributed checkpoint.

Weights are streamed, BUFFER bytes at a time, so a model larger than any memory can be exported. A tensor that several
names share is written once for each, because `load_state_dict(strict=True)` requires all names, and safetensors has no
aliases.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint import directory
from zero.checkpoint.files import Chunk, SafeFile, write
from zero.checkpoint.format import Entry, Geometry, Index
from zero.checkpoint.load_plan import listed
from zero.checkpoint.progress import Progress
from zero.checkpoint.source import Range, Source
from zero.checkpoint.storage import Local, mounted, place
from zero.checkpoint.values import decode

SINGLE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_size: int = 5 * 10**9,
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
    directory_out = _vacant(out, "model*.safetensors*")
    with Source(directory.resolve(place(path))) as source:
        entries = weights(source.index, dtype)
        source.check((_row_major(entry) for entry in entries.values()), shown=True)
        chunks = {name: _chunk(source, name, entry, dtype) for name, entry in entries.items()}
        chunks |= _extra_states(source.index)
        shards = _shards({name: chunk.nbytes for name, chunk in sorted(chunks.items())}, max_shard_size)
        names = [SINGLE] if len(shards) == 1 else [_shard(i, len(shards)) for i in range(len(shards))]
        directory_out.mkdir(parents=True, exist_ok=True)
        total = sum(chunk.nbytes for chunk in chunks.values())
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory_out) as partial:
            with Progress("exporting", total) as progress:
                for file, members in zip(names, shards, strict=True):
                    write(Local(Path(partial)) / file, [chunks[name] for name in members], {}, progress.advance)
            if len(shards) > 1:
                file_of = {name: file for file, members in zip(names, shards, strict=True) for name in members}
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
                (Path(partial) / SHARD_INDEX).write_text(json.dumps(index, indent=2))
                names = [*names, SHARD_INDEX]
            for file in names:
                (Path(partial) / file).rename(directory_out / file)
            Local(directory_out).sync()
    return [directory_out / file for file in names]


def _vacant(out: str | os.PathLike[str], *patterns: str) -> Path:
    """The directory to export to. Raises ValueError where it has files of such names already."""
    target = mounted(out, "the directory to export to")
    found = [one.name for pattern in patterns for one in target.glob(pattern)] if target.is_dir() else []
    if found:
        raise ValueError(f"{target} has {found[0]} already. Choose another directory, or remove its weights.")
    return target


def weights(index: Index, dtype: torch.dtype | None) -> dict[str, Entry]:
    """For every name of the model the stored tensor to read: its master where `dtype` has more bits than itself."""
    entries = {}
    for name in sorted([*index.names(), *index.tied]):
        entry = index.entry(name)
        master = index.tensors.get(f"master/{index.tied.get(name, name)}")
        wide = dtype is not None and dtype.itemsize > entry.geometry.dtype.itemsize
        entries[name] = master if master is not None and wide else entry
    return entries


def _row_major(entry: Entry) -> Range:
    """The full tensor, row-major."""
    return Range(entry, replace(entry.geometry, order=None), 0, entry.geometry.numel)


def _target(geometry: Geometry, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and geometry.dtype.is_floating_point else geometry.dtype


def _extra_states(index: Index) -> dict[str, Chunk]:
    """The modules' extra state that is tensors. Warns of the rest, which safetensors cannot hold."""
    values = {name: decode(value) for name, value in index.values.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    others = sorted(values.keys() - tensors.keys())
    if others:
        warnings.warn(
            f"safetensors files hold tensors only, and {listed(others)} of get_extra_state() is none: left out. Load "
            "these weights with strict=False, or export --to dcp, which holds it.",
            stacklevel=3,
        )
    return {name: _chunk_of(name, tensor) for name, tensor in tensors.items()}


def _chunk_of(name: str, tensor: Tensor) -> Chunk:
    return Chunk(name, tensor.dtype, tuple(tensor.shape), lambda: iter([tensor.reshape(-1)]))


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, nbytes in sizes.items():
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _shard(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _chunk(source: Source, name: str, entry: Entry, dtype: torch.dtype | None) -> Chunk:
    target = _target(entry.geometry, dtype)

    def values() -> Iterator[Tensor]:
        for flat in source.stream(entry):
            yield flat.to(target)

    return Chunk(name, target, entry.geometry.shape, values)


# ------------------------------------------------------------------------------------- torch's distributed checkpoint


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
        model = weights(index, dtype)
        state = {path: entry for path, entry in index.tensors.items() if path.startswith("optimizer/")}
        source.check((_row_major(entry) for entry in [*model.values(), *state.values()]), shown=True)
        chunks = [_chunk(source, f"model/{name}", entry, dtype) for name, entry in model.items()]
        chunks += [_chunk(source, path, entry, None) for path, entry in state.items()]
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target) as partial:
            file = Path(partial) / "all.safetensors"
            with Progress("exporting", sum(chunk.nbytes for chunk in chunks)) as progress:
                write(Local(file), chunks, {}, progress.advance)
            dcp.save(_nested(index, model, _mapped(file)), checkpoint_id=target, no_dist=True)


def _nested(index: Index, names: Iterable[str], mapped: dict[str, Tensor]) -> dict[str, Any]:
    """The dictionary to save. names: all names of the model. mapped: the tensors, by path."""
    nested: dict[str, Any] = {"model": {name: mapped[f"model/{name}"] for name in names} | decode(index.values)}
    for number, optimizer in enumerate(index.optimizers):
        state: dict[str, dict[str, Any]] = {}
        for name, paths in optimizer.tensors.items():
            state.setdefault(name, {}).update({key: mapped[path] for key, path in paths.items()})
        for name, values in optimizer.values.items():
            state.setdefault(name, {}).update({key: decode(value) for key, value in values.items()})
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
