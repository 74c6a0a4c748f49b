"""Saving.

    every rank       streams what it owns into a file of its own, in a directory that no reader looks at yet
    the first rank   when all files are on disk, writes the index from their parts of it, which makes it a checkpoint

With wait=False a rank first copies what it owns, and a thread does this while training goes on. What fails there is
raised by `wait`, which the run's next save or load calls first, or told when the program ends.
"""

from __future__ import annotations

import atexit
import errno
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.checkpoint import directory
from zero.checkpoint.files import checksum
from zero.checkpoint.format import CheckpointError, Index
from zero.checkpoint.rank_files import SavePlan, part_of, plan_save, rank_file, seal, staged, write_rank_file
from zero.checkpoint.ranks import Ranks, described
from zero.checkpoint.resume import PREFIX, Resumed, label
from zero.checkpoint.shards import Training
from zero.checkpoint.source import Source
from zero.checkpoint.storage import Place, place
from zero.checkpoint.values import encode
from zero.comm.waiting import calling

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
    path: str | os.PathLike[str], model: nn.Module, optimizer: Sequence[Optimizer], keep: int | None = None
) -> Saving:
    """Collective. As `save`, also where the latest is of another model: for libraries to which a path is that of one
    checkpoint, which the next replaces."""
    return _save(path, Training(model, optimizer, None), None, None, keep, in_place=True)


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
    ranks = training.ranks
    with ranks.together("the arguments of zero.checkpoint.save", writing=path) as lines:
        training.look(stores_frozen=frozen)
        run, plan = place(path), _plan(training, extra, resume, keep, frozen)
        lines += [f"keep {keep}, frozen {frozen}, wait {wait}", f"path {run}", *_compared(training, plan, frozen)]
    finish(run, ranks)
    with ranks.together(writing=run):
        if ranks.first and not in_place:
            _refuse_another(run, training)
        if not wait:
            plan.held, plan.release = staged(training.module, plan.held)
    saving = Saving(ranks, _begin(run, plan.index, ranks), plan.index, keep)
    saving._start(plan, wait)
    return saving


def _refuse_another(run: Place, training: Training) -> None:
    """Raises ValueError where the run's latest checkpoint is of another model: this one's would take its place, and
    `load` would not find what it looks for."""
    model, problem = repr([training.parts, training.tied, [*training.values]]), None
    if _models.get(run) == model:
        return
    with suppress(ValueError, OSError), Source(directory.resolve(run)) as latest:  # which may be none, or damaged
        try:
            training.names_in(latest.index)
        except ValueError as error:
            problem = f"{latest.directory}, the latest there, does not fit: {error}. Save this one to another path."
    if problem is not None:
        raise ValueError(problem)
    _models[run] = model


def _begin(run: Place, index: Index, ranks: Ranks) -> Place:
    """Collective. A new directory to write into. The index gets the `extra` of all ranks."""
    with ranks.together(writing=run):
        begun = directory.begin(run).name if ranks.first else ""
    names, extras = zip(*ranks.gather([begun, index.extra]), strict=True)
    index.take_extras(extras)
    return run / str(names[0])


def finish(path: Place, ranks: Ranks) -> None:
    """Collective. Waits for the save of a run, or of the run that a checkpoint is in, that a thread still writes."""
    for run in (path, path.parent):
        saving = _unfinished.get(run)
        if saving is None or saving._thread is None:
            continue
        if saving._ranks.all == ranks.all:
            saving.wait()
        elif saving._thread.is_alive():
            raise CheckpointError(
                f"{run} is still being saved by {saving._ranks.all} ranks, of which {ranks.all} ask for it. Call "
                "wait() of that save first, on all of them."
            )


class Saving:
    """A save that is being written, or is complete."""

    def __init__(self, ranks: Ranks, checkpoint: Place, index: Index, keep: int | None) -> None:
        self._ranks, self._place, self._index, self._keep = ranks, checkpoint, index, keep
        self._thread: threading.Thread | None = None
        self._written, self._given_up = threading.Event(), threading.Event()
        # Whether all ranks have written, as `wait` finds out.
        self._all_written = False
        self._problem: str | None = None
        # On the first rank, once the checkpoint has its index; on every rank, once `wait` has told all.
        self._published = self._complete = False
        self._failure: CheckpointError | None = None

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
                self._thread.join()
            elif self._ranks.first:
                self._publish()
            self._agree()
        except BaseException as error:
            # Interrupted here it raises from then on: the other ranks may have come to either end.
            unknown = f"wait() was interrupted ({error!r}): nobody knows whether it is complete. Save again."
            self._failure = error if isinstance(error, CheckpointError) else CheckpointError(unknown)
            self._given_up.set()
            if self._thread is not None:
                self._thread.join()
            if self._ranks.first and not self._published:
                self._place.remove()  # with wait=False again, now that no rank writes there any more
            raise
        self._complete = True

    def _start(self, plan: SavePlan, wait: bool) -> None:
        """Collective. Writes, without `wait` on a thread."""
        if wait:
            self._write(plan)
            self.wait()
        else:
            self._thread = threading.Thread(target=self._write_behind, args=(plan,), name="zero.checkpoint")
            self._thread.start()
            _unfinished[self._place.parent] = self

    def _write_behind(self, plan: SavePlan) -> None:
        if sys.platform == "linux":  # there threads have priorities: training comes first where cores are few
            with suppress(OSError):  # which a container may forbid to set
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        self._write(plan)
        if self._ranks.first:
            self._publish()

    def _write(self, plan: SavePlan) -> None:
        """This rank's file."""
        file = rank_file(self._place, self._ranks.rank)
        try:
            if self._ranks.writes:
                write_rank_file(file, plan, shown=self._ranks.first)
            plan.release()
        except Exception as error:
            self._problem = described(error, file)
        finally:
            self._written.set()  # from now on only the first rank writes to the directory, and can remove it

    def _publish(self) -> None:
        """On the first rank, after it has tried to write its own file."""
        try:
            if self._problem is None:
                if self._thread is not None:
                    self._wait_for_files()
                seal(self._place, self._index, keep=self._keep)
                self._published = True
        except Exception as error:
            self._problem = described(error, self._place)

    def _wait_for_files(self) -> None:
        """On a thread, where other ranks may still write theirs."""
        # Threads send nothing, because training uses the process group. Files appear when they are complete.
        files = {part_of(rank_file(self._place, rank)).name for rank in range(self._ranks.world)}
        own, ended, pause = part_of(rank_file(self._place, self._ranks.rank)), math.inf, 0.01
        while missing := files - {one.name for one in self._place.inside()}:
            if own.name in missing:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(own))
            if self._all_written or not threading.main_thread().is_alive():
                ended = min(ended, time.monotonic())
            if time.monotonic() - ended > _LAST_WAIT:
                if self._all_written:
                    raise ValueError(
                        f"{self._place} has no {min(missing)}, which another rank has written: all ranks must see the "
                        "same files"
                    )
                raise ValueError("other ranks have not written their files before the program ended")
            if self._given_up.wait(pause):
                raise ValueError("another rank could not write its file")
            pause = min(2 * pause, _LONGEST_PAUSE)


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


def _compared(training: Training, plan: SavePlan, frozen: bool) -> Iterator[str]:
    """What ranks must have the same to save together."""
    yield f"stage {training.stage}"
    yield from (name for name in plan.index.extra if name.startswith(PREFIX))
    yield from (f"optimizer {one.kind}" for one in training.shards)
    left_out = set[str]() if frozen else training.frozen
    yield from (f"{name}{', frozen' * (name in left_out)}: {training.parts[name].full!r}" for name in training.tensors)
    for held in plan.common:
        if not held.kept:
            yield f"{held.name}, which no wrapper keeps the same, with checksum {checksum(held.flat()):08x}"


def _plan(training: Training, extra: dict[str, Any] | None, resume: Any, keep: int | None, frozen: bool) -> SavePlan:
    """What this rank writes, with its own extra. Raises ValueError, with a message for the user."""
    extra = {} if extra is None else extra
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep={keep!r}: it is how many checkpoints stay, at least 1, or None for all")
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
        raise ValueError(f"extra={extra!r}: it is a dictionary with strings for keys, such as {{'step': 100}}")
    if any(key.startswith(PREFIX) for key in extra):
        raise ValueError(f"extra={extra!r}: names that begin with {PREFIX} are those of resume. Choose others")
    plan = plan_save(training, frozen=frozen)
    values = {**extra, **Resumed(resume).states()}
    plan.index.extra = {key: encode(value, label(key)) for key, value in values.items()}
    return plan
