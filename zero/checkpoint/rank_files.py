"""The files that the ranks write, one each, and the index that the first rank makes of them.

The header of a file has, under "zero", which elements of which full tensor each shard is, and the optimizers' state
that is no tensor. So the index is made from headers on disk, and no rank sends another what it has written.
"""

from __future__ import annotations

import json

from zero.checkpoint import directory
from zero.checkpoint.files import LONGEST_HEADER, Chunk, FileProblem, SafeFile, progress, write
from zero.checkpoint.format import Entry, Geometry, Index, ParamShard
from zero.checkpoint.save_plan import SavePlan
from zero.checkpoint.shards import Held
from zero.checkpoint.storage import Place


def rank_file(partial: Place, rank: int, kind: str = "safetensors") -> Place:
    return partial / f"rank-{rank:05d}.{kind}"


def write_rank_file(partial: Place, rank: int, plan: SavePlan, *, shown: bool) -> None:
    """Writes a rank's file; it is on disk when this returns. shown: show progress."""
    pieces = {_key(held): [held.name, held.start, held.stop] for held in plan.held}
    full_tensors = {held.name: [held.full.shape, held.full.order] for held in plan.held}
    metadata = {"zero": json.dumps({"pieces": pieces, "full_tensors": full_tensors, "values": plan.values})}
    with progress("saving", sum(held.nbytes for held in plan.held), shown) as tick:
        write(rank_file(partial, rank), [_chunk(held) for held in plan.held], metadata, tick)


def _chunk(held: Held) -> Chunk:
    readable = held.is_full and held.full.order is None  # by other libraries, under the tensor's own name and shape
    shape = held.full.shape if readable else (held.numel,)
    return Chunk(_key(held), held.full.dtype, shape, lambda: iter([held.flat()]))


def _key(held: Held) -> str:
    """The name of a shard in its file: the tensor's own path where the shard is the full tensor."""
    return held.name if held.is_full else f"{held.name}@{held.start}"


def seal(partial: Place, index: Index, *, keep: int | None) -> Place:
    """Turns a directory that has all ranks' files into a checkpoint, and returns its new place.

    index: of the checkpoint, without what the files hold. keep: how many of the run's checkpoints stay; None for all.
    """
    _complete(index, partial)
    text = index.dumps().encode()
    if len(text) > LONGEST_HEADER:
        raise FileProblem(f"the index would have {len(text)} bytes, more than the {LONGEST_HEADER} that are read")
    return directory.publish(partial, text, keep)


def _complete(index: Index, partial: Place) -> None:
    """Adds to the index what the files of all ranks hold, by their headers."""
    full_tensors: dict[str, Geometry] = {}
    shards: dict[str, list[ParamShard]] = {}
    for rank in range(index.world):
        place = rank_file(partial, rank)
        with SafeFile(place) as file:
            index.files[place.name] = file.identity
            header = json.loads(file.metadata["zero"])
            for key, (path, start, stop) in header["pieces"].items():
                shape, order = header["full_tensors"][path]
                full_tensors[path] = Geometry(tuple(shape), file.tensors[key][0], order and tuple(order))
                shards.setdefault(path, []).append(ParamShard(place.name, key, start, stop))
        for number, values in enumerate(header["values"]):
            for param, state in values.items():
                index.optimizers[number].values.setdefault(param, {}).update(state)
    for path, unordered in sorted(shards.items()):
        ordered = sorted(unordered, key=lambda shard: (shard.start, shard.stop))
        index.tensors[path] = Entry(full_tensors[path], tuple(ordered))
        if problem := index.tensors[path].problem():
            raise FileProblem(f"{path}, as the ranks wrote it, {problem}: they do not hold the same model")
    index.find_state()
