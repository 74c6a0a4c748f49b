"""Saving.

    every rank       streams what it owns into a file of its own in a directory that no one looks at yet
    the first rank   when all files are on disk, writes the index from their headers, and gives the directory its name

Waiting or behind training, it is the same; behind training, what is owned is copied first, and a thread does the rest,
which sends nothing: the first rank's sees on disk when the others are done.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.checkpoint import directory
from zero.checkpoint.files import Chunk, FileProblem, SafeFile, checksum, write
from zero.checkpoint.format import CheckpointError, Entry, Geometry, Index, OptimizerIndex, Piece
from zero.checkpoint.parts import Held, Training, kind
from zero.checkpoint.progress import Progress
from zero.checkpoint.storage import Place, place
from zero.checkpoint.values import encode

_PATIENCE = 60.0
"""Seconds that the first rank's thread goes on waiting for other ranks' files once the program has come to its end."""

_unfinished: dict[Place, Saving] = {}
_staging: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = True,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Saving:
    """Collective. Writes a checkpoint that loads at any stage, on any number of ranks.

        zero.checkpoint.save("run", model, optimizer, extra={"step": 100})

    path: the run's directory, on a file system that all ranks see, or a URL of fsspec's ("s3://bucket/run"). Each save
        makes a numbered checkpoint in it, and `run/latest` names the newest once it is whole and on disk; until then
        the one before is the latest.
    model, optimizer: at any stage, as they are trained; several optimizers as a list.
    extra: JSON values, tuples, small tensors and numpy arrays, such as a scheduler's or GradScaler's state_dict(),
        torch.get_rng_state(), numpy.random.get_state() or random.getstate(). Each entry is kept once if it is the same
        on all ranks, otherwise one a rank.
    keep: how many of the run's checkpoints stay, the oldest go; None keeps all.
    wait: False copies what this rank owns to memory and writes behind training. The copy's memory is kept for the next
        such save. `wait()` of what is returned is collective; so is the next save, which does it first.
    process_group: of a plain model; a wrapped one knows its own.

    Memory: what this rank owns is written from where it lies, BUFFER (16 MiB) at a time from devices; with wait=False
    there is one copy of it besides. fsspec's file systems have buffers of their own.

    Raises CheckpointError, on every rank, where the ranks' models or paths differ, for what cannot be stored, and where
    a rank cannot write; checkpoints that are there stay. Also where parameters that no wrapper synchronises (a plain
    module's, or those that FSDP ignores) differ between ranks: make them the same, or save a plain module of each rank
    by a `process_group` of that rank alone, to a path of its own.
    """
    training = Training(model, optimizer, process_group)
    ranks = training.ranks
    run, unknown = _attempt(path, lambda: place(path))
    share, told, problem = _share(training, {} if extra is None else extra, keep)
    lines = _told(training, run, keep, wait)
    extras = ranks.compare("the arguments of zero.checkpoint.save", lines, unknown or problem, told)
    if training.trusts:
        ranks.compare("parameters, or their optimizer state, that no wrapper synchronises", _sums(training.common))
    earlier = _unfinished.get(run)
    if earlier is not None:
        earlier.wait()
    begun, problem = _attempt(run, lambda: directory.begin(run)) if ranks.first else (None, None)
    partial = run / ranks.exchange(begun.name if begun else None, problem)[0]
    saving = Saving(training, share, partial, extras, keep)
    if wait:
        saving._write_now()
    else:
        saving._write_behind(model)
    return saving


class Share:
    """What this rank writes: tensors, and other state of each optimizer as JSON."""

    def __init__(self, held: list[Held], values: list[dict[str, dict[str, Any]]]) -> None:
        self.held, self.values = held, values

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(held) for held in self.held)

    def metadata(self) -> dict[str, str]:
        """What the first rank needs to know of this rank's file, apart from what safetensors says."""
        pieces = {_key(held): [held.path, held.start, held.stop] for held in self.held}
        wholes = {
            held.path: [list(held.whole.shape), held.whole.order and list(held.whole.order)] for held in self.held
        }
        return {"zero": json.dumps({"pieces": pieces, "wholes": wholes, "values": self.values})}

    def chunks(self, flat: Callable[[Held], Tensor]) -> list[Chunk]:
        return [_chunk(held, flat) for held in self.held]


def _chunk(held: Held, flat: Callable[[Held], Tensor]) -> Chunk:
    as_it_is = held.whole.order is None and held.stop - held.start == held.whole.numel
    shape = held.whole.shape if as_it_is else (held.stop - held.start,)

    def values() -> Iterator[Tensor]:
        yield flat(held)

    return Chunk(_key(held), held.whole.dtype, shape, values)


def _key(held: Held) -> str:
    """The name of a piece in its file: the tensor's own where it is whole."""
    return held.path if held.stop - held.start == held.whole.numel else f"{held.path}@{held.start}"


def _nbytes(held: Held) -> int:
    return (held.stop - held.start) * held.whole.dtype.itemsize


def write_file(partial: Place, rank: int, share: Share, flat: Callable[[Held], Tensor], *, shown: bool) -> None:
    """Writes a rank's file, to disk. flat: gives what is held."""
    with Progress("saving", share.nbytes, shown) as progress:
        write(partial / _file(rank), share.chunks(flat), share.metadata(), progress.advance)


class Saving:
    """A save, under way or done."""

    def __init__(
        self, training: Training, share: Share, partial: Place, extras: list[dict[str, Any]], keep: int | None
    ) -> None:
        self._ranks, self._share, self._partial, self._keep = training.ranks, share, partial, keep
        self._head = _head(training, extras) if self._ranks.first else None
        self._thread: threading.Thread | None = None
        self._written, self._given_up = threading.Event(), threading.Event()
        self._final: Place | None = None
        self._problem: str | None = None
        self._done = False

    @property
    def path(self) -> Path | str:
        """The checkpoint, for `load`; a URL where the run's was one. Raises RuntimeError before it is whole."""
        if self._final is None:
            raise RuntimeError("the checkpoint is still being written. Call wait() first.")
        return self._final.public

    def wait(self) -> None:
        """Collective. Returns when the checkpoint is whole and on disk, and the latest.

        Raises CheckpointError, on every rank, if it came to nothing.
        """
        if self._done:
            return
        self._done = True
        if _unfinished.get(self._partial.parent) is self:
            del _unfinished[self._partial.parent]
        try:
            if self._thread is not None:
                self._join(self._thread)
            told = self._ranks.exchange(self._final.name if self._final else None, self._problem)
        except CheckpointError:
            self._discard()  # again, now that no rank writes there any more
            raise
        self._final = self._partial.parent / told[0]

    def _join(self, thread: threading.Thread) -> None:
        """Collective. Ranks tell how they fared before, for one that can write nothing cannot report, either."""
        self._written.wait()
        try:
            self._ranks.exchange(None, self._problem)
        except CheckpointError:
            self._given_up.set()
            raise
        finally:
            thread.join()

    # --------------------------------------------------------------------------------------------- the two ways

    def _write_now(self) -> None:
        self._write_file(lambda held: held.flat())
        try:
            self._ranks.exchange(None, self._problem)
        except BaseException:
            self._done = True
            self._discard()
            raise
        if self._ranks.first:
            self._publish()
        self.wait()

    def _write_behind(self, model: nn.Module) -> None:
        copies = self._staged(model)
        _unfinished[self._partial.parent] = self

        def work() -> None:
            _give_way()
            self._write_file(lambda held: copies[_key(held)])
            self._written.set()
            if not self._ranks.first:
                self._tell()
            else:
                if self._problem is None:
                    told, problem = _attempt(self._partial, self._await_others)
                    self._problem = told or problem
                if self._problem is None:
                    self._publish()
                else:
                    self._discard()

        self._thread = threading.Thread(target=work, name="zero.checkpoint")
        self._thread.start()

    def _staged(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of what this rank writes, in one buffer, which the model's next save uses again."""
        room, copies = _staging.get(model), {}
        padded = [-(-_nbytes(held) // 64) * 64 for held in self._share.held]
        if room is None or len(room) < sum(padded):
            _staging.pop(model, None)
            del room
            room = torch.empty(sum(padded), dtype=torch.uint8)
            _staging[model] = room
        low = 0
        for held, nbytes in zip(self._share.held, padded, strict=True):
            copy = room[low : low + _nbytes(held)].view(held.whole.dtype)
            copies[_key(held)] = copy.copy_(held.flat())
            low += nbytes
        self._share.held = [_without_tensor(held) for held in self._share.held]
        return copies

    # ------------------------------------------------------------------------------------------------- the steps

    def _write_file(self, flat: Callable[[Held], Tensor]) -> None:
        """Writes this rank's file; what goes wrong is in `_problem`."""
        rank = self._ranks.rank
        if self._ranks.writes:
            _, self._problem = _attempt(
                self._partial / _file(rank),
                lambda: write_file(self._partial, rank, self._share, flat, shown=self._ranks.first),
            )

    def _tell(self) -> None:
        """Has the first rank's thread know that this rank's file is there, or what went wrong."""
        report = self._partial / _report(self._ranks.rank)
        if self._ranks.writes:
            _attempt(report, lambda: report.put((self._problem or "").encode()))

    def _await_others(self) -> str | None:
        """Until all ranks have reported; the problem of one that has failed. Removes the reports."""
        ended, pause = None, 0.01
        missing = {_report(rank) for rank in range(1, self._ranks.world)}
        while missing and not self._given_up.is_set():
            for report in [one for one in self._partial.inside() if one.name in missing]:
                missing.remove(report.name)
                problem = report.read().decode()
                if problem:
                    return problem
                report.remove()
            if not threading.main_thread().is_alive():
                ended = ended or time.monotonic()
                if time.monotonic() - ended > _PATIENCE:
                    return "other ranks have not written their files before the program ended."
            if missing:
                self._given_up.wait(pause)
                pause = min(2 * pause, self._partial.look_every)
        return "another rank could not write its file." if missing else None

    def _publish(self) -> None:
        def work() -> Place:
            assert self._head is not None
            return seal(self._partial, self._head, keep=self._keep)

        self._final, self._problem = _attempt(self._partial, work)
        if self._problem is not None:
            self._discard()

    def _discard(self) -> None:
        if self._ranks.first:
            self._partial.remove()


# ---------------------------------------------------------------------------------------------------------- the index


def _head(training: Training, extras: list[dict[str, Any]]) -> Index:
    """All of the index but what is in the files."""
    index = Index(training.stage, training.ranks.world, tied=training.tied)
    index.values = {name: encode(value, name) for name, value in training.values.items()}
    index.optimizers = [OptimizerIndex(kind(one), _groups(training, one)) for one in training.optimizers]
    shared = {key for key in extras[0] if all(key in one and one[key] == extras[0][key] for one in extras)}
    index.extra = {key: value for key, value in extras[0].items() if key in shared}
    index.extra_by_rank = [{key: value for key, value in one.items() if key not in shared} for one in extras]
    if not any(index.extra_by_rank):
        index.extra_by_rank = []
    return index


def _groups(training: Training, optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {
            "params": names,
            "options": {
                key: encode(value, f"option {key!r} of group {position}")
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
        }
        for position, (names, group) in enumerate(
            zip(training.group_names(optimizer), optimizer.param_groups, strict=True)
        )
    ]


def seal(partial: Place, head: Index, *, keep: int | None) -> Place:
    """Writes the index, when all files are there, and publishes the checkpoint. Returns where it is then."""
    return directory.publish(partial, _complete(head, partial).dumps().encode(), keep)


def _complete(index: Index, partial: Place) -> Index:
    """Adds what the files of all ranks hold, as their headers tell."""
    wholes: dict[str, Geometry] = {}
    pieces: dict[str, list[Piece]] = {}
    for rank in range(index.world):
        name = _file(rank)
        with SafeFile(partial / name) as file:
            index.files[name] = file.identity
            told = json.loads(file.metadata["zero"])
            for key, (path, start, stop) in told["pieces"].items():
                shape, order = told["wholes"][path]
                wholes[path] = Geometry(tuple(shape), file.pieces[key][0], order and tuple(order))
                pieces.setdefault(path, []).append(Piece(name, key, start, stop))
        for number, values in enumerate(told["values"]):
            for param, state in values.items():
                index.optimizers[number].values.setdefault(param, {}).update(state)
    for path in sorted(pieces):
        ordered = sorted(pieces[path], key=lambda piece: (piece.start, piece.stop))
        index.tensors[path] = Entry(wholes[path], tuple(ordered))
        problem = index.tensors[path].problem()
        if problem:
            raise FileProblem(f"what the ranks wrote of {path} {problem}: they do not hold the same model")
    index.find_state()
    return index


# ------------------------------------------------------------------------------------------------------------- checks


def _share(training: Training, extra: dict[str, Any], keep: int | None) -> tuple[Share, dict[str, Any], str | None]:
    """What this rank writes, its extra as JSON, and what is wrong, in words for the user."""
    nothing = Share([], [])
    if training.problem:
        return nothing, {}, training.problem
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        return nothing, {}, f"keep={keep!r}: it is how many checkpoints stay, at least 1, or None for all."
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
        return nothing, {}, f"extra={extra!r}: it is a dictionary with strings for keys, such as {{'step': 100}}."
    try:
        told = encode({**extra}, "extra")
        _head(training, [{}])
        held, values = training.share()
    except ValueError as error:
        return nothing, {}, str(error)
    return Share(held, values) if training.ranks.writes else nothing, told, None


def _told(training: Training, run: Place | None, keep: int | None, wait: bool) -> list[str]:
    lines = [f"path {run}", f"keep {keep}, wait {wait}", f"stage {training.stage}"]
    lines += [f"optimizer {kind(one)}" for one in training.optimizers]
    if not training.problem:
        lines += [f"{name}: {training.whole(name)}" for name in training.tensors]
    return lines


def _sums(common: Sequence[Held]) -> list[str]:
    return [f"{held.path} with checksum {checksum(held.flat()):08x}" for held in common]


def _attempt(path: Any, work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What the work returned, or what went wrong with the disk, in words for the user."""
    try:
        return work(), None
    except FileProblem as error:
        return None, f"{error}."
    except OSError as error:
        return None, f"{error.filename or path} could not be written ({error.strerror or error}). Nothing was changed."
    except Exception as error:  # the other ranks must hear of it
        return None, f"{path} could not be written ({type(error).__name__}: {error})."


def _give_way() -> None:
    """Has training go before this thread where there are not cores for both. On Linux threads have priorities."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _without_tensor(held: Held) -> Held:
    return Held(held.path, held.whole, held.start, held.stop, held.tensor.new_empty(0))


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _report(rank: int) -> str:
    return f"rank-{rank:05d}.report"
