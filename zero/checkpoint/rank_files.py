"""The files that the ranks write, one each, and the index that the first rank makes of them.

A file tells in its header, under "zero", what its pieces are pieces of, and the state of optimizers that is no tensor.
So the index is made of headers on disk, and no rank sends another what it has written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from torch import Tensor

from zero.checkpoint import directory
from zero.checkpoint.files import LONGEST_HEADER, Chunk, FileProblem, SafeFile, write
from zero.checkpoint.format import Entry, Geometry, Index, ParamShard
from zero.checkpoint.progress import Progress
from zero.checkpoint.save_plan import SavePlan
from zero.checkpoint.shards import Held
from zero.checkpoint.storage import Place


def rank_file(partial: Place, rank: int) -> Place:
    return partial / f"rank-{rank:05d}.safetensors"


def write_rank_file(
    partial: Place, rank: int, plan: SavePlan, *, shown: bool, flat: Callable[[Held], Tensor] = Held.flat
) -> None:
    """Writes a rank's file; it is on disk when this returns.

    shown: show progress. flat: gives the elements of what is held, by default those of its tensor.
    """
    pieces = {_key(held): [held.path, held.start, held.stop] for held in plan.held}
    full_tensors = {held.path: [list(held.full.shape), held.full.order and list(held.full.order)] for held in plan.held}
    told = {"zero": json.dumps({"pieces": pieces, "full_tensors": full_tensors, "values": plan.values})}
    with Progress("saving", plan.nbytes, shown) as progress:
        write(rank_file(partial, rank), [_chunk(held, flat) for held in plan.held], told, progress.advance)


def _chunk(held: Held, flat: Callable[[Held], Tensor]) -> Chunk:
    readable = held.is_full and held.full.order is None  # by others, under the tensor's own name and shape
    shape = held.full.shape if readable else (held.numel,)

    def values() -> Iterator[Tensor]:
        yield flat(held)

    return Chunk(_key(held), held.full.dtype, shape, values)


def _key(held: Held) -> str:
    """The name of a piece in its file: the tensor's own where it is unsharded."""
    return held.path if held.is_full else f"{held.path}@{held.start}"


def seal(partial: Place, index: Index, *, keep: int | None) -> Place:
    """Makes a checkpoint of a directory that has all ranks' files, and returns where it is then.

    index: of the checkpoint, but for what is in the files. keep: how many of the run's checkpoints stay; None for all.
    """
    _complete(index, partial)
    text = index.dumps().encode()
    if len(text) > LONGEST_HEADER:
        raise FileProblem(f"the index would have {len(text)} bytes, more than the {LONGEST_HEADER} that are read")
    return directory.publish(partial, text, keep)


def _complete(index: Index, partial: Place) -> None:
    """Adds what the files of all ranks hold, as their headers tell."""
    full_tensors: dict[str, Geometry] = {}
    pieces: dict[str, list[ParamShard]] = {}
    for rank in range(index.world):
        place = rank_file(partial, rank)
        with SafeFile(place) as file:
            index.files[place.name] = file.identity
            told = json.loads(file.metadata["zero"])
            for key, (path, start, stop) in told["pieces"].items():
                shape, order = told["full_tensors"][path]
                full_tensors[path] = Geometry(tuple(shape), file.pieces[key][0], order and tuple(order))
                pieces.setdefault(path, []).append(ParamShard(place.name, key, start, stop))
        for number, values in enumerate(told["values"]):
            for param, state in values.items():
                index.optimizers[number].values.setdefault(param, {}).update(state)
    for path in sorted(pieces):
        ordered = sorted(pieces[path], key=lambda piece: (piece.start, piece.stop))
        index.tensors[path] = Entry(full_tensors[path], tuple(ordered))
        problem = index.tensors[path].problem()
        if problem:
            raise FileProblem(f"what the ranks wrote of {path} {problem}: they do not hold the same model")
    index.find_state()
