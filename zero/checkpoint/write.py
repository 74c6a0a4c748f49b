"""Saving.

    every rank       streams what it owns into a file of its own, in a directory that no reader looks at yet
    the first rank   when all files are on disk, writes the index from their headers, and gives the directory its name

This is the same with wait=True and wait=False. With wait=False a rank first copies what it owns, and a thread does the
rest while training goes on. These threads send nothing, because training uses the process group: the thread of every
other rank writes a report to disk when it is done, and the first rank's thread waits for these reports. What fails on a
thread is raised by `wait`, which the run's next save or load calls first, or told when the program ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.checkpoint import directory
from zero.checkpoint.agree import Ranks, attempt
from zero.checkpoint.files import FileProblem, checksum
from zero.checkpoint.format import CheckpointError, Index
from zero.checkpoint.rank_files import SavePlan, plan_save, rank_file, seal, staged, write_rank_file
from zero.checkpoint.resume import PREFIX, Resumed, label
from zero.checkpoint.shards import Training, kind
from zero.checkpoint.storage import Place, place
from zero.checkpoint.values import encode
from zero.comm.waiting import calling

# Seconds that the first rank's thread waits for other ranks' files after the main thread has ended.
_WAIT_AFTER_EXIT = 60.0

# By run, the save that a thread is writing.
_unfinished: dict[Place, Saving] = {}


@calling("zero.checkpoint.save")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: dict[str, Any] | None = None,
    resume: Any = None,
    keep: int | None = None,
    wait: bool = True,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Saving:
    """Collective. Writes a checkpoint that loads at any stage, on any number of ranks.

        zero.checkpoint.save("run", model, optimizer, resume=schedule, extra={"step": 100})

    path: the run's directory, on a file system that all ranks see, or an fsspec URL ("s3://bucket/run"). Each save
        makes a numbered checkpoint in it, and `run/latest` names the newest that is complete and on disk.
    model, optimizer: at any stage, as they are trained; several optimizers as a list.
    extra: JSON values, tuples, small tensors, numpy arrays and numbers (which come back as Python's). An entry that
        is the same on all ranks is stored once, otherwise once a rank.
    resume: what else a resumed run needs: a scheduler, a GradScaler, anything with state_dict() and load_state_dict(),
        a torch.Generator; one, or a list, which may be empty. With it the random generators of random, numpy.random and
        torch, on the CPU and on the current device, are saved, each rank's own.
    keep: how many checkpoints of the run to keep; the oldest are removed. None keeps all.
    wait: False copies what this rank owns, and a thread writes the copy while training goes on. The next such save
        reuses the copy's memory. `wait()` of the returned Saving is collective; the run's next save or load calls it
        first. If the program ends without it and the save has failed, standard error says so, and the status is 120.
    process_group: of a plain model; a wrapped one knows its own.

    Memory: none from the memory of the CPU, BUFFER (16 MiB) at a time from other devices; with wait=False a copy of
    what this rank owns. fsspec's file systems have buffers of their own.

    Raises CheckpointError, on every rank, where models or paths differ between ranks, for what cannot be stored, and
    where a rank cannot write; earlier checkpoints stay. Also where parameters that no wrapper synchronises (a plain
    module's, or those that FSDP ignores) differ between ranks: make them the same, or save a plain module of each rank
    by a `process_group` of that rank alone, to a path of its own.
    """
    training = Training(model, optimizer, process_group)
    planned = attempt(lambda: (place(path), _plan(training, extra, resume, keep)), writing=path)
    run, plan = _agree(training, f"keep {keep}, wait {wait}", *planned)
    finish(run, training.ranks)
    copied = None if wait else training.ranks.together(lambda: staged(model, plan.held), before="no copy to write: ")
    saving = Saving(training.ranks, _begin(run, training.ranks), plan.index, keep)
    if copied is None:
        saving._write(plan)
        saving.wait()
    else:
        saving._write_behind(replace(plan, held=copied[0]), release=copied[1])
    return saving


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


def _begin(run: Place, ranks: Ranks) -> Place:
    """Collective. A new directory to write into."""
    begun, problem = attempt(lambda: directory.begin(run), writing=run) if ranks.first else (None, None)
    name: str = ranks.exchange(begun and begun.name, problem)[0]
    return run / name


class Saving:
    """A save that is being written, or is complete."""

    def __init__(self, ranks: Ranks, partial: Place, index: Index, keep: int | None) -> None:
        self._ranks, self._partial, self._index, self._keep = ranks, partial, index, keep
        self._thread: threading.Thread | None = None
        self._written, self._given_up = threading.Event(), threading.Event()
        self._problem: str | None = None
        # On the first rank, once the checkpoint has its name; on every rank, once `wait` has told all.
        self._published: Place | None = None
        self._final: Place | None = None
        self._failure: CheckpointError | None = None

    @property
    def path(self) -> Path | str:
        """The checkpoint's path, for `load`; a URL if the run's was one. Raises RuntimeError until it is complete."""
        if self._failure is not None:
            raise RuntimeError(f"there is no checkpoint to name: {self._failure}")
        if self._final is None:
            raise RuntimeError("the checkpoint is still being written. Call wait() first.")
        return self._final.public

    def wait(self) -> None:
        """Collective. Returns when the checkpoint is complete, on disk, and the run's latest.

        Raises CheckpointError, on every rank, if it could not be written. Interrupted by Ctrl-C while this rank's file
        is being written it can be called again. Interrupted later it raises from then on: the other ranks may have
        come to either end.
        """
        if self._failure is not None:
            raise self._failure
        if self._final is not None:
            return
        self._written.wait()
        if _unfinished.get(self._partial.parent) is self:
            del _unfinished[self._partial.parent]
        try:
            self._ranks.exchange(None, self._problem)  # first: a rank that cannot write cannot write a report either
            if self._thread is not None:
                self._thread.join()
            elif self._ranks.first:
                self._publish()
            names = self._ranks.exchange(self._published and self._published.name, self._problem)
        except BaseException as error:
            unknown = f"wait() was interrupted ({error!r}): nobody knows whether it is complete. Save again."
            self._failure = error if isinstance(error, CheckpointError) else CheckpointError(unknown)
            self._given_up.set()
            if self._thread is not None:
                self._thread.join()
            if self._published is None and self._ranks.first:
                self._partial.remove()  # with wait=False again, now that no rank writes there any more
            raise
        self._final = self._partial.parent / names[0]

    def _write_behind(self, plan: SavePlan, release: Callable[[], None]) -> None:
        """Writes on a thread. release: called when the tensors are written."""

        def work() -> None:
            if sys.platform == "linux":  # there threads have priorities: training comes first where cores are few
                with suppress(OSError):  # which a container may forbid to set
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            self._write(plan, release)
            if self._ranks.first:
                self._publish()

        self._thread = threading.Thread(target=work, name="zero.checkpoint")
        self._thread.start()
        _unfinished[self._partial.parent] = self

    def _write(self, plan: SavePlan, release: Callable[[], None] = lambda: None) -> None:
        """This rank's file. From the end on only the first rank writes to the directory, and can remove it."""
        partial, rank, first = self._partial, self._ranks.rank, self._ranks.first

        def work() -> None:
            if self._ranks.writes:
                write_rank_file(partial, rank, plan, shown=first)
            release()

        try:
            _, self._problem = attempt(work, writing=rank_file(partial, rank))
            if self._thread is not None and self._ranks.writes and not first:
                report = rank_file(partial, rank, "report")
                attempt(lambda: report.put((self._problem or "").encode()), writing=report)  # empty if all is well
        finally:
            self._written.set()

    def _publish(self) -> None:
        """On the first rank, after it has tried to write its own file."""
        if self._problem is None:
            self._published, self._problem = attempt(self._seal, writing=self._partial)
        if self._problem is not None:
            self._partial.remove()

    def _seal(self) -> Place:
        """On a thread, first waits until all ranks have reported. Raises FileProblem if one has failed."""
        ended, pause = None, 0.01
        others = range(1, self._ranks.world) if self._thread is not None else ()
        missing = {rank_file(self._partial, rank, "report").name for rank in others}
        while missing:
            for report in [one for one in self._partial.inside() if one.name in missing]:
                missing.remove(report.name)
                if problem := report.read().decode():
                    raise FileProblem(problem.removesuffix("."))
                report.remove()
            if not threading.main_thread().is_alive():
                ended = ended or time.monotonic()
                if time.monotonic() - ended > _WAIT_AFTER_EXIT:
                    raise FileProblem("other ranks have not written their files before the program ended")
            if missing and self._given_up.wait(pause):
                raise FileProblem("another rank could not write its file")
            pause = min(2 * pause, self._partial.poll_every)
        return seal(self._partial, self._index, keep=self._keep)


@atexit.register  # by then Python has waited for the threads
def _tell_failures() -> None:
    """Says which saves have failed that nobody waits for any more."""
    for run, saving in _unfinished.items():
        if saving._problem is not None:
            sys.stderr.write(f"zero: a save of {run} has failed, and wait() of it was not called: {saving._problem}\n")
            sys.stderr = _Failed(sys.stderr)


class _Failed:
    """In place of standard error at the very end. Python exits with status 120 where its last flush fails, and has no
    other way to exit with an error after it has left the script."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a save has failed")


def _agree(
    training: Training, options: str, planned: tuple[Place, SavePlan] | None, problem: str | None
) -> tuple[Place, SavePlan]:
    """Collective. The run's directory, and what this rank writes. Raises where ranks do not save the same."""
    ranks = training.ranks
    lines, encoded = [options, f"stage {training.stage}"], planned[1].index.extra if planned else {}
    lines += [name for name in encoded if name.startswith(PREFIX)]
    lines += [f"path {planned[0]}"] if planned else []
    lines += [f"optimizer {kind(one)}" for one in training.optimizers]
    if not training.problem:
        lines += [f"{name}: {training.full_geometry(name)!r}" for name in training.tensors]
    extras = ranks.compare("the arguments of zero.checkpoint.save", lines, problem, encoded)
    assert planned is not None
    run, plan = planned
    if training.unsynchronised:
        lines = [f"{held.name} with checksum {checksum(held.flat()):08x}" for held in plan.common]
        ranks.compare("parameters, or their optimizer state, that no wrapper synchronises", lines)
    plan.index.take_extras(extras)
    return run, plan


def _plan(training: Training, extra: dict[str, Any] | None, resume: Any, keep: int | None) -> SavePlan:
    """What this rank writes, with its own extra. Raises ValueError, with a message for the user."""
    extra = {} if extra is None else extra
    if training.problem:
        raise ValueError(training.problem)
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep={keep!r}: it is how many checkpoints stay, at least 1, or None for all")
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
        raise ValueError(f"extra={extra!r}: it is a dictionary with strings for keys, such as {{'step': 100}}")
    if any(key.startswith(PREFIX) for key in extra):
        raise ValueError(f"extra={extra!r}: names that begin with {PREFIX} are those of resume. Choose others")
    plan = plan_save(training)
    values = {**extra, **Resumed(resume).states()}
    plan.index.extra = {key: encode(value, label(key)) for key, value in values.items()}
    return plan
