"""A checkpoint for other libraries: its weights in Hugging Face's files, or all of it in those of
torch.distributed.checkpoint (dcp.py).

Weights are streamed, BUFFER bytes at a time, so a model larger than any memory can be exported. A tensor that several
names share is written once for each, because `load_state_dict(strict=True)` requires all names, and safetensors has no
aliases.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zero._torch.telling import warn_user
from zero.checkpoint import storage
from zero.checkpoint.files import Chunk, Source, progress, write
from zero.checkpoint.format import CONFIGS, Entry, all_of, decode, listed, under
from zero.checkpoint.storage import place

SHARD_INDEX = "model.safetensors.index.json"
SHARD_SIZE = 5 * 10**9


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Literal["hf", "dcp"] = "hf",
    max_shard_size: int = SHARD_SIZE,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Writes the weights as `model.safetensors`, or as shards with `model.safetensors.index.json`, and the
    configuration of a model of transformers, so that `from_pretrained(out)` loads it. Returns the files.

    to: "dcp" writes a checkpoint of torch.distributed.checkpoint in their place, such as FSDP2 loads, with the state of
        the optimizers and `extra`, under the names of its `get_state_dict`: {"model": ..., "optimizer": ..., ...}.
    path: a run's directory, or one checkpoint's, or its URL. out: a mounted directory without files of these names.
    max_shard_size: bytes, for "hf"; a larger tensor gets a file of its own.
    dtype: of floating-point tensors, by default as they are stored. Another than the parameter's takes the master, if
        one was stored.

    Extra state (get_extra_state) is exported if it is a tensor; a warning names what is left out.

    Raises ValueError where the checkpoint is damaged or `out` has weights already, and leaves no files there.
    """
    target = place(out)
    if not target.mounted:
        raise ValueError(f"{target} is a URL: export to a mounted file system, and copy the files from there.")
    with Source(storage.resolve(place(path))) as source:
        index = source.index
        if without := [*index.left_out]:
            raise ValueError(
                f"{source.directory} was saved by frozen=False, without {listed(without)}. Load it beside these by "
                "zero.checkpoint.load, and write what zero.full_tensors(model, to=0) yields, or save once with all."
            )
        patterns = ("model*.safetensors*", *(name for name in CONFIGS if name in index.configs))
        patterns = patterns if to == "hf" else (storage.METADATA, "*.distcp")
        if present := [one.name for pattern in patterns for one in Path(target.path).glob(pattern)]:
            raise ValueError(f"{target} has {present[0]} already. Choose another directory, or remove what it has.")

        # For every name of the model the stored tensor to read (it, or its master), and the dtype to write.
        weights: dict[str, tuple[Entry, torch.dtype]] = {}
        for name, stored_as in sorted(index.stored_as().items()):
            stored = index.tensors[f"model/{stored_as}"].geometry.dtype
            wanted = dtype if dtype is not None and stored.is_floating_point else stored
            weights[name] = index.weight(stored_as, wanted), wanted
        read = [entry for entry, _ in weights.values()]
        if to == "dcp":
            read += under("optimizer/", index.tensors).values()
        source.check(((entry, all_of(entry.geometry)) for entry in read), shown=True)
        chunks = {
            name: Chunk(name, dtype, entry.geometry.shape, partial(source.stream, entry, dtype))
            for name, (entry, dtype) in weights.items()
        }
        others = []
        for name, encoded in under("model/", index.values).items():
            if isinstance(value := decode(encoded), Tensor):
                values = partial(iter, [value.reshape(-1)])
                chunks.setdefault(name, Chunk(name, value.dtype, tuple(value.shape), values))
            else:
                others.append(name)
        if others and to == "hf":
            warn_user(
                f"safetensors files hold tensors only, and {listed(sorted(others))} of get_extra_state() is none: left "
                "out. Load these weights with strict=False."
            )

        # Shards of `max_shard_size` bytes at most, unless one tensor has more.
        shards: list[list[Chunk]] = [[]]
        size = 0
        for _, chunk in sorted(chunks.items()):
            if shards[-1] and size + chunk.nbytes > max_shard_size:
                shards.append([])
                size = 0
            shards[-1].append(chunk)
            size += chunk.nbytes
        files = {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards)}
        if len(shards) == 1:
            files = {"model.safetensors": shards[0]}
        total = sum(chunk.nbytes for chunk in chunks.values())

        # What else from_pretrained reads. It makes the model in the dtype that the configuration says: that of most of
        # the weights, which may have been cast since it was made.
        jsons: dict[str, Any] = {name: index.configs[name] for name in CONFIGS if name in index.configs}
        elements = Counter[torch.dtype]()
        for entry, one in weights.values():
            elements[one] += entry.geometry.numel * one.is_floating_point
        if "config.json" in jsons and elements:
            config = jsons["config.json"]
            key = "torch_dtype" if "torch_dtype" in config else "dtype"  # the first before transformers 4.56
            most = str(elements.most_common(1)[0][0]).removeprefix("torch.")
            jsons["config.json"] = {**config, key: most}
        target.make()
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.path) as folder:
            if to == "dcp":
                from zero.checkpoint import dcp  # only who needs it waits a second for torch's part

                dcp.write(source, place(folder), weights)
                files, jsons = {}, {}
            with progress("exporting", total) as tick:
                for name, shard in files.items():
                    write(place(folder) / name, shard, tick)
            for name, config in jsons.items():
                (place(folder) / name).put(f"{json.dumps(config, indent=2, sort_keys=True)}\n".encode())
            if len(files) > 1:
                file_of = {chunk.key: name for name, shard in files.items() for chunk in shard}
                shard_index = {"metadata": {"total_size": total}, "weight_map": file_of}
                (place(folder) / SHARD_INDEX).put(json.dumps(shard_index, indent=2).encode())
            for name in (written := sorted(one.name for one in Path(folder).iterdir())):
                Path(folder, name).rename(Path(target.path, name))
            target.sync()
    return [Path(target.path, name) for name in written]
