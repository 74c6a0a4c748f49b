"""Saving.

    every rank       streams what it owns into a file of its own, in a directory that no reader looks at yet
    the first rank   when all files are on disk, writes the index from their parts of it, which makes it a checkpoint

Beside its file a rank writes its part of the index: what is in the file, and values of optimizers that are no tensors.
The index is made from these, which are removed then, and no rank sends another what it has written.

With wait=False a rank first copies what it owns, and a thread does this while training goes on. What fails there is
raised by `wait`, which the run's next save or load calls first, or told when the program ends.
"""

from __future__ import annotations

import atexit
import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.telling import warn_user
from zero._torch.tensors import as_plain_tensors, tree_iter
from zero.checkpoint import storage
from zero.checkpoint.files import Chunk, Source, checksum, progress, write
from zero.checkpoint.format import (
    CONFIGS,
    LONGEST,
    RESUMED,
    CheckpointError,
    Entry,
    Index,
    ParamShard,
    encode,
    label,
    refuse_unstorable,
    resumed,
)
from zero.checkpoint.shards import Held, Ranks, Training, described, whole
from zero.checkpoint.storage import Place, place
from zero.comm.waiting import calling
from zero.measure.param_groups import options
from zero.state.optimizer_state import refuse_ownerless, state_held

# What a rank writes; beside it, with ".json" at the end, is its part of the index.
_FILE = "rank-{:05d}.safetensors"

# Bytes. Every copy starts at a multiple of these, so that it can be viewed as any dtype.
_ALIGNMENT = 64

# One buffer a model for its copies, to be reused: memory that is new to the process costs more than the copy.
_buffers: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()

# Seconds that the first rank's thread waits for other ranks' files after these are written, or the main thread has
# ended. By default NFS looks at a directory again after 60 (acdirmax in nfs(5)).
_LAST_WAIT = 90.0

# Seconds between two looks for them.
_LONGEST_PAUSE = 0.25

# By run, the save that a thread is writing.
_unfinished: dict[Place, Saving] = {}

# By run, the model that its latest checkpoint was compared with last: the index is not read for each save.
_models: dict[Place, str] = {}


@calling("zero.checkpoint.save")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: dict[str, Any] | None = None,
    resume: Any = None,
    keep: int | None = None,
    frozen: bool = True,
    wait: bool = True,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Saving:
    """Collective. Writes a checkpoint that loads at any stage, on any number of ranks.

        zero.checkpoint.save("run", model, optimizer, resume=schedule, extra={"step": 100})

    path: the run's directory, on a file system that all ranks see, or an fsspec URL ("s3://bucket/run"). Each save
        makes a numbered checkpoint in it, and `run/latest` names the newest that is complete and on disk. A run has one
        model: one with other names or shapes, also by a head, is saved to another path.
    model, optimizer: at any stage, as they are trained; several optimizers as a list.
    extra: JSON values, tuples, small tensors, numpy arrays and numbers (which come back as Python's). An entry that
        is the same on all ranks is stored once, otherwise once a rank.
    resume: what else a resumed run needs: a scheduler, a GradScaler, anything with state_dict() and load_state_dict(),
        a torch.Generator; one, or a list, which may be empty. With it the random generators of random, numpy.random and
        torch, on the CPU and on the current device, are saved, each rank's own.
    keep: how many checkpoints of the run to keep; the oldest are removed. None keeps all.
    frozen: False leaves frozen parameters out (requires_grad=False), such as the base of adapters: `load` then keeps
        those that the model has. One that was trained before is stored where an optimizer still has state of it, which
        SGD without momentum never has.
    wait: False copies what this rank owns, and a thread writes the copy while training goes on. The next such save
        reuses the copy's memory. `wait()` of the returned Saving is collective; the run's next save or load calls it
        first. If the program ends without it and the save has failed, standard error says so, and the status is 120.
    process_group: of a plain model; a wrapped one knows its own.

    Memory: none from the memory of the CPU, BUFFER (16 MiB) at a time from other devices; with wait=False a copy of
    what this rank owns. fsspec's file systems have buffers of their own.

    Raises CheckpointError, on every rank, where models or paths differ between ranks, where the run's latest checkpoint
    is of another model, for what cannot be stored, and where a rank cannot write; earlier checkpoints stay. Also where
    parameters that no wrapper synchronises (a plain module's, or those that FSDP ignores) differ between ranks: make
    them the same, or save a plain module of each rank by a `process_group` of that rank alone, to a path of its own.
    """
    return _save(path, Training(model, optimizer, process_group), extra, resume, keep, frozen=frozen, wait=wait)


@calling("zero.checkpoint.save")
def save_in_place(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Sequence[Optimizer],
    keep: int | None = None,
    *,
    frozen: bool = True,
) -> Saving:
    """Collective. As `save`, for libraries to which a path is that of one checkpoint, which the next replaces."""
    return _save(path, Training(model, optimizer, None), None, None, keep, frozen=frozen, in_place=True)


def _save(
    path: str | os.PathLike[str],
    training: Training,
    extra: dict[str, Any] | None,
    resume: Any,
    keep: int | None,
    *,
    frozen: bool = True,
    wait: bool = True,
    in_place: bool = False,
) -> Saving:
    ranks, extra = training.ranks, {} if extra is None else extra
    with ranks.together("the arguments of zero.checkpoint.save", writing=path) as lines:
        training.look(stores_frozen=frozen)
        run = place(path)
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep={keep!r}: it is how many checkpoints stay, at least 1, or None for all")
        if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
            raise ValueError(f"extra={extra!r}: it is a dictionary with strings for keys, such as {{'step': 100}}")
        if any(key.startswith(RESUMED) for key in extra):
            raise ValueError(f"extra={extra!r}: names that begin with {RESUMED} are those of resume. Choose others")
        index, held, common = plan_save(training, frozen=frozen)
        values = {**extra, **{name: get_state() for name, (get_state, _) in resumed(resume).items()}}
        index.extra = {key: encode(value, label(key)) for key, value in values.items()}
        lines += [f"keep {keep}, frozen {frozen}, wait {wait}", f"path {run}", f"stage {training.stage}"]
        lines += [name for name in values if name.startswith(RESUMED)]
        lines += [f"optimizer {one.kind}" for one in training.shards]
        left_out = set[str]() if frozen else training.frozen
        for name in training.tensors:
            lines.append(f"{name}{', frozen' * (name in left_out)}: {training.parts[name].full!r}")
        for one in common:
            if not one.kept:
                sum_of = f"{checksum(one.flat()):08x}"
                lines.append(f"{one.name}, which no wrapper keeps the same, with checksum {sum_of}")
    finish(run, ranks)
    release: Callable[[], object] = bool  # called when the tensors are written
    with ranks.together(writing=run):
        model = "" if in_place else repr([training.parts, training.tied, [*training.values]])
        if ranks.first and model and _models.get(run) != model:
            # Another model's checkpoint would take this one's place, and `load` would not find what it looks for.
            problem = None
            with suppress(ValueError, OSError), Source(storage.resolve(run)) as latest:  # which may be none, or damaged
                try:
                    training.names_in(latest.index)
                except ValueError as error:
                    problem = (
                        f"{latest.directory}, the latest there, does not fit: {error}. Save this one to another path."
                    )
            if problem is not None:
                raise ValueError(problem)
            _models[run] = model
        if not wait:
            held, release = staged(training.module, held)
    with ranks.together(writing=run):
        begun = storage.begin(run).name if ranks.first else ""
    names, extras = zip(*ranks.gather([begun, index.extra]), strict=True)
    # A value that is the same on all ranks is stored once. They are compared as text, where NaN equals itself.
    texts = [{key: json.dumps(value) for key, value in one.items()} for one in extras]
    shared = {key for key, text in texts[0].items() if all(one.get(key) == text for one in texts)}
    index.extra = {key: value for key, value in extras[0].items() if key in shared}
    by_rank = [{key: value for key, value in one.items() if key not in shared} for one in extras]
    index.extra_by_rank = by_rank if any(by_rank) else []
    return Saving(ranks, run / str(names[0]), index, held, release, keep, wait)


def finish(path: Place, ranks: Ranks) -> None:
    """Collective. Waits for the save of a run, or of the run that a checkpoint is in, that a thread still writes."""
    for run in (path, path.parent):
        saving = _unfinished.get(run)
        if saving is None or saving._thread is None:
            continue
        if saving._ranks.all == ranks.all:
            saving.wait()
        elif not saving._ended.is_set():
            raise CheckpointError(
                f"{run} is still being saved by {saving._ranks.all} ranks, of which {ranks.all} ask for it. Call "
                "wait() of that save first, on all of them."
            )


class Saving:
    """A save that is being written, or is complete."""

    def __init__(
        self,
        ranks: Ranks,
        checkpoint: Place,
        index: Index,
        held: list[Held],
        release: Callable[[], object],
        keep: int | None,
        wait: bool,
    ) -> None:
        """Collective. Writes, without `wait` on a thread."""
        self._ranks, self._place, self._keep = ranks, checkpoint, keep
        self._index, self._held, self._release = index, held, release
        # _ended: the thread does nothing more. A join that Ctrl-C interrupts takes it for ended, up to Python 3.12.
        self._written, self._given_up, self._ended = threading.Event(), threading.Event(), threading.Event()
        # Whether all ranks have written, and whether the checkpoint is complete, as `wait` finds out.
        self._all_written = self._complete = False
        self._problem: str | None = None
        self._failure: CheckpointError | None = None
        self._thread = None if wait else threading.Thread(target=self._write_behind, name="zero.checkpoint")
        if self._thread is None:
            self._write()
            self.wait()
        else:
            self._thread.start()
            _unfinished[checkpoint.parent] = self

    @property
    def path(self) -> Path | str:
        """The checkpoint's path, for `load`; a URL if the run's was one. Raises RuntimeError until it is complete."""
        if self._failure is not None:
            raise RuntimeError(f"there is no checkpoint to name: {self._failure}")
        if not self._complete:
            raise RuntimeError("the checkpoint is still being written. Call wait() first.")
        return Path(self._place.path) if self._place.mounted else self._place.url

    def _agree(self) -> None:
        with self._ranks.together():
            if self._problem is not None:
                raise ValueError(self._problem)

    def wait(self) -> None:
        """Collective. Returns when the checkpoint is complete, on disk, and the run's latest.

        Raises CheckpointError, on every rank, if it could not be written. Interrupted by Ctrl-C while this rank's file
        is being written it can be called again.
        """
        if self._failure is not None:
            raise self._failure
        if self._complete:
            return
        self._written.wait()
        if _unfinished.get(self._place.parent) is self:
            del _unfinished[self._place.parent]
        try:
            self._agree()  # the first's thread waits for a file that may never come
            self._all_written = True
            if self._thread is not None:
                self._ended.wait()
            elif self._ranks.first:
                self._publish()
            self._agree()
        except BaseException as error:
            # Interrupted here it raises from then on: the other ranks may have come to either end. What was written
            # stays until the next save looks on disk whether it is complete: what this rank knows may be out of date.
            unknown = f"wait() was interrupted ({error!r}): nobody knows whether it is complete. Save again."
            self._failure = error if isinstance(error, CheckpointError) else CheckpointError(unknown)
            self._given_up.set()
            if self._thread is not None:
                self._ended.wait()
            raise
        self._complete = True

    def _write_behind(self) -> None:
        """On a thread: writes this rank's file; the first rank publishes then."""
        if sys.platform == "linux":
            # There threads have priorities: training comes first where cores are few.
            with suppress(OSError):  # which a container may forbid to set
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self._write()
            if self._ranks.first:
                self._publish()
        finally:
            self._ended.set()

    def _write(self) -> None:
        """This rank's file."""
        file = self._place / _FILE.format(self._ranks.rank)
        try:
            if self._ranks.writes:
                write_rank_file(file, self._held, self._index.values, shown=self._ranks.first)
            self._release()
        except Exception as error:
            self._problem = described(error, file)
        finally:
            self._held, self._release = [], bool  # a Saving may be kept, what it has written may not
            self._written.set()  # from now on only the first rank writes to the directory

    def _publish(self) -> None:
        """On the first rank, after it has tried to write its own file; on a thread others may still write theirs."""
        try:
            if self._problem is None:
                # Threads send nothing, because training uses the process group. Files appear when they are complete.
                files = {f"{_FILE.format(rank)}.json" for rank in range(self._ranks.world)}
                own, ended, pause = self._place / f"{_FILE.format(self._ranks.rank)}.json", math.inf, 0.01
                while self._thread is not None and (missing := files - {one.name for one in self._place.inside()}):
                    if own.name in missing:
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(own))
                    if self._all_written or not threading.main_thread().is_alive():
                        ended = min(ended, time.monotonic())
                    if time.monotonic() - ended > _LAST_WAIT:
                        if self._all_written:
                            raise ValueError(
                                f"{self._place} has no {min(missing)}, which another rank has written: all ranks must "
                                "see the same files"
                            )
                        raise ValueError("other ranks have not written their files before the program ended")
                    if self._given_up.wait(pause):
                        raise ValueError("another rank could not write its file")
                    pause = min(2 * pause, _LONGEST_PAUSE)
                found, index, names = dict[str, list[Entry]](), self._index, sorted(files)
                for part in (json.loads((self._place / name).read()) for name in names):
                    index.files[part["name"]] = part["file"]
                    index.values |= part["values"]
                    for path, entry in part["tensors"].items():
                        found.setdefault(path, []).append(Entry.from_json(entry))
                for path, entries in sorted(found.items()):
                    shards = [shard for one in entries for shard in one.shards]
                    shards.sort(key=lambda one: (one.start, one.stop))
                    index.tensors[path] = Entry(entries[0].geometry, tuple(shards))
                    index.left_out.pop(path.removeprefix("model/"), None)
                    try:
                        index.tensors[path].refuse_unsound(f"{path}, as the ranks wrote it,")
                    except ValueError as error:
                        raise ValueError(f"{error}: they do not hold the same model") from None
                # The version from where it is, because no room imports the package that holds all of them.
                by, at = sys.modules["zero"].__version__, datetime.now(timezone.utc).isoformat(timespec="seconds")
                index.saved = {"by": by, "torch": torch.__version__, "at": at}
                text = index.dumps().encode()
                if len(text) > LONGEST:
                    raise ValueError(
                        f"the index would have {len(text)} bytes, more than the {LONGEST} that are read. Keep large "
                        "tensors of extra, or of get_extra_state(), in buffers of the model"
                    )
                storage.publish(self._place, text, self._keep)
                for name in names:
                    (self._place / name).remove()
        except Exception as error:
            self._problem = described(error, self._place)


@atexit.register  # by then Python has waited for the threads
def _tell_failures() -> None:
    """Says which saves have failed that nobody waits for any more."""
    failed = {run: saving._problem for run, saving in _unfinished.items() if saving._problem is not None}
    for run, problem in failed.items():
        sys.stderr.write(f"zero: a save of {run} has failed, and wait() of it was not called: {problem}\n")
    if failed:
        flush: Any = sys.stderr.flush

        def fail_at_last() -> None:
            flush()
            if sys.is_finalizing():
                raise OSError("a save has failed")

        # Python exits with status 120 where its last flush fails, and has no other way to exit with an error after it
        # has left the script.
        sys.stderr.flush = fail_at_last  # type: ignore[method-assign]


def plan_save(training: Training, *, frozen: bool = True) -> tuple[Index, list[Held], list[Held]]:
    """The index, of which the first rank's counts; what this rank writes; what all have, of which that is a share."""
    ranks, index = training.ranks, Index(training.stage, training.ranks.world, tied=training.tied)
    held_all, common = list[Held](), list[Held]()
    if ranks.rank == 0:
        index.values = {f"model/{name}": encode(value, name) for name, value in training.values.items()}
    module = training.module
    for file, attribute in CONFIGS.items() if ranks.first and hasattr(type(module), "from_pretrained") else ():
        # The module's own: adapters pass on that of the model inside, whose names are others.
        config: Any = vars(module).get(attribute)
        if hasattr(config, "to_json_string"):
            try:
                index.configs[file] = {**json.loads(config.to_json_string())}
            except (TypeError, ValueError, AttributeError) as error:
                warn_user(
                    f"{attribute}.to_json_string() of the {type(module).__name__} raised {type(error).__name__}: "
                    f"{error}. An export of this checkpoint has no {file}, which from_pretrained needs."
                )
    if "config.json" in index.configs:
        index.configs["config.json"]["architectures"] = [type(module).__name__]  # as save_pretrained does
    left_out = (
        set[str]() if frozen else training.left_out()
    )  # from which `_publish` takes what other ranks have written
    index.left_out = {name: training.parts[name].full for name in sorted(left_out)}
    for name, tensor in training.tensors.items():
        if name in left_out or (held := training.held(name, owned=True)) is None or training.repeats(name):
            continue
        if held.shared and isinstance(tensor, nn.Parameter):
            common.append(held)
        elif ranks.rank == 0 or not held.shared:
            held_all.append(held)
    for held in training.masters():
        if (name := held.name.removeprefix("master/")) not in left_out and not training.repeats(name):
            held_all.append(held)

    for number, shards in enumerate(training.shards):
        groups: list[dict[str, Any]] = []
        index.optimizers.append({"kind": shards.kind, "groups": groups})
        for position, group in enumerate(shards.param_groups):
            given = options(group).items()
            encoded = {key: encode(value, f"option {key!r} of group {position}") for key, value in given}
            groups.append({"params": [training.names[param] for param in group["params"]], "options": encoded})
        refuse_ownerless(shards.optim)
        for one in training.stepped(shards):
            for key, value in {} if training.repeats(one.name) else state_held(shards.optim, one.tensor).items():
                path = f"optimizer/{number}/{one.name}/{key}"
                if not isinstance(key, str) or "/" in key:
                    raise ValueError(f"{path}: names of state must be strings without a slash.")
                if isinstance(value, Tensor) and value.dim():
                    # Elements of a full tensor, as the parameter that this rank steps, or a full tensor itself.
                    refuse_unstorable(path, value)
                    with as_plain_tensors():
                        alike = value.shape == one.tensor.shape
                    if not alike and not one.is_full:
                        raise ValueError(
                            f"{path} has shape {list(value.shape)}, but this rank's shard of the parameter has "
                            f"{list(one.tensor.shape)}: only the optimizer knows which elements of the parameter it is "
                            "for. Build the optimizer, or FSDP, with partition='whole'."
                        )
                    full = replace(one.full, dtype=value.dtype)
                    held = replace(one, name=path, full=full, tensor=value) if alike else whole(path, value, one.kept)
                    (common if one.shared else held_all).append(held)
                elif not one.is_full and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_iter(value)):
                    raise ValueError(
                        f"{path} is a {type(value).__name__} of tensors, and the parameter is cut between ranks: only "
                        "the optimizer knows which elements of the parameter they are for. Build the optimizer, or "
                        "FSDP, with partition='whole'."
                    )
                else:  # the tensors within it are stored as others are
                    tensors = list[Tensor]()
                    encoded_value = encode(value, path, tensors)
                    parts = [whole(f"{path}/{number}", tensor, one.kept) for number, tensor in enumerate(tensors)]
                    (common if one.shared else held_all).extend(parts)
                    if one.start == 0 and (ranks.rank == 0 or not one.shared):
                        index.values[path] = encoded_value

    if not ranks.writes:
        return index, [], common
    # This rank's share of what all have is as many bytes as any other rank's.
    low, high = (sum(one.nbytes for one in common) * rank // ranks.world for rank in (ranks.rank, ranks.rank + 1))
    at = 0
    for one in common:
        # The first element that begins at a byte or after it.
        start, stop = (min(max(-((at - end) // one.full.dtype.itemsize), 0), one.numel) for end in (low, high))
        if start < stop or (one.numel == 0 and ranks.rank == 0):
            held_all.append(replace(one, start=start, stop=stop))
        at += one.nbytes
    return index, held_all, common


# Another save of the model that begins before the memory is left to it makes copies of its own.
def staged(model: nn.Module, held: Sequence[Held]) -> tuple[list[Held], Callable[[], None]]:
    """Copies of the held elements, and the function that leaves their memory to the model's next save."""
    sizes = [-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in held]
    buffer = _buffers.pop(model, None)
    if buffer is None or len(buffer) < sum(sizes):
        del buffer  # freed before the larger one is allocated
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    copies, low = [], 0
    for one, size in zip(held, sizes, strict=True):
        copy = buffer[low : low + one.nbytes].view(one.full.dtype)
        copies.append(replace(one, tensor=copy.copy_(one.flat()), written=None))
        low += size
    return copies, partial(_buffers.__setitem__, model, buffer)


def write_rank_file(file: Place, held_all: Sequence[Held], values: dict[str, Any], *, shown: bool) -> None:
    """Writes a rank's file, and its part of the index; both are on disk when this returns. shown: show progress."""
    chunks, entries = list[Chunk](), dict[str, Any]()
    for held in held_all:  # other libraries can read a full tensor, under its own name and with its shape
        key = held.name if held.is_full else f"{held.name}@{held.start}"
        shape = held.full.shape if held.is_full and held.full.counting == (None, None) else (held.numel,)
        chunks.append(Chunk(key, held.full.dtype, shape, partial(map, Held.flat, [held])))
    with progress("saving", sum(chunk.nbytes for chunk in chunks), shown) as tick:
        written, starts = write(file, chunks, tick)
    for chunk, held in zip(chunks, held_all, strict=True):
        shard = ParamShard(file.name, chunk.key, starts[chunk.key], held.start, held.stop)
        entries[held.name] = Entry(held.full, (shard,)).to_json()
    part = {"name": file.name, "file": written, "tensors": entries, "values": values}
    (file.parent / f"{file.name}.json").put(json.dumps(part).encode())
