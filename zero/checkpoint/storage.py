"""Where checkpoints are stored: in mounted directories, or at fsspec URLs ("s3://bucket/run", "gs://...", "memory://...").

A Place is a path in one of fsspec's file systems, of which LocalFileSystem serves the mounted ones. A file appears when
it is complete. In a run's directory are its checkpoints:

run/00000001/      a checkpoint, if it has an index, which is written when all else in it is on disk
run/latest         the name of the newest

A numbered directory without an index is a save that goes on or was interrupted. The next save removes it.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # torch requires it

from zero.checkpoint.format import INDEX, listed

AT_A_TIME = 1 << 24
"""Bytes that are requested from an object store at a time, or whose transfer to the disk is started at a time."""


def place(path: str | os.PathLike[str]) -> Place:
    """The Place of a path, where ~ is the home directory and links are followed, or of a URL that fsspec serves."""
    text = os.fspath(path)
    mounted = re.fullmatch(r"(?:file|local)://(.*)", text)
    if mounted is None and "://" in text:
        return Place(text.rstrip("/"), *url_to_fs(text.rstrip("/")))
    absolute = Path(os.path.realpath(os.path.expanduser(mounted[1] if mounted else text))).as_posix()
    return Place(absolute, url_to_fs("file:///")[0], absolute)


@dataclass(frozen=True)
class Place:
    """url: the user's, with the names below it; the absolute path of what is mounted. system: the file system of
    fsspec. path: of the URL in that system."""

    url: str
    system: Any = field(compare=False)
    path: str

    def __str__(self) -> str:
        return self.url

    @property
    def mounted(self) -> bool:
        """Whether files are written where they lie, and can be renamed and synced."""
        return "://" not in self.url

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Place:
        return Place(self.url.rpartition("/")[0], self.system, self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.url}/{name}", self.system, f"{self.path}/{name}")

    def inside(self) -> list[Place]:
        try:
            found = self._fresh().ls(self.path, detail=False)
        except FileNotFoundError:  # a directory without objects
            return []
        paths = {one.strip("/") for one in found} - {self.path.strip("/")}  # some list the directory itself as well
        return [self / one.rpartition("/")[2] for one in sorted(paths)]

    def exists(self) -> bool:
        try:  # not fsspec's own `exists`, which says of what may not be looked at that it is not there
            self._fresh().info(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_file(self) -> bool:
        return bool(self._fresh().isfile(self.path))

    def make(self, *, new: bool = False) -> None:
        """new: raises FileExistsError for a mounted directory that is there."""
        self.system.makedirs(self.path, exist_ok=not (new and self.mounted))

    def move(self, to: Place) -> None:
        """Gives it, with its contents, the name of another place, where nothing is."""
        if self.mounted:
            os.rename(self.path, to.path)
            return
        for file in self._fresh().find(self.path):
            self.system.cp_file(file, to.path + file.removeprefix(self.path))
        self.remove()

    def remove(self) -> None:
        """Removes it with its contents. What cannot be removed stays, without an error."""
        with suppress(Exception):
            if self.mounted:
                self.system.rm(self.path, recursive=True)
                return
            # Not by `rm`, which takes the paths of stores for patterns: that of "lr[1]" is also "lr1".
            for file in self._fresh().find(self.path):
                self.system.rm_file(file)
            for folder in sorted(self._fresh().find(self.path, withdirs=True), reverse=True):
                self.system.rmdir(folder)  # where a store has directories

    def read(self, most: int | None = None) -> bytes:
        """All of a small file, or its first bytes."""
        return bytes(self.system.cat_file(self.path, end=most))

    def open(self) -> IO[bytes]:
        # Without a cache a read fills as much of the memory as one request returns.
        return self._fresh().open(self.path, "rb", cache_type="none")  # type: ignore[no-any-return]

    def put(self, data: bytes) -> None:
        """Creates or replaces a small file. Its name, and all others in its directory, are on disk then."""
        with self.write() as file:
            file.write(data)
        self.parent.sync()

    @contextmanager
    def write(self) -> Iterator[Any]:
        """A context in which a file is written. When it is left, the file is on disk, perhaps without its name."""
        if not self.mounted:  # objects appear when they are complete
            with self.system.open(self.path, "wb") as file:
                yield file
            return
        partial = f"{self.path}.partial"  # fsspec does not sync
        with io.BufferedWriter(_EarlyWriter(partial, "w")) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)

    def sync(self) -> None:
        """Writes a mounted directory's names to disk, where the system has a way to: Windows opens no directory."""
        if self.mounted and os.name == "posix":
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _fresh(self) -> Any:
        self.system.invalidate_cache()  # of listings: other ranks write too
        return self.system


@contextmanager
def beside(path: Place, *, moves: bool) -> Iterator[Place]:
    """A context in which a place beside a path is written to, as a file or a directory. When it is left, that takes the
    path's name, and what had it is removed, of whichever kind; if anything was raised, that stays. moves: whether this
    rank sees to that."""
    new, old = (Place(f"{path.url}.{end}", path.system, f"{path.path}.{end}") for end in ("new", "old"))
    if not moves:
        yield new
        return
    new.remove()  # what an interrupted save has left
    try:
        yield new
        old.remove()
        path.move(old)
        try:
            new.move(path)
        except BaseException:
            old.move(path)
            raise
    except BaseException:
        new.remove()
        raise
    old.remove()


class _EarlyWriter(io.FileIO):
    """Starts the transfer to the disk while more is being written, so that the final sync has little left."""

    _started = 0

    def write(self, data: Any) -> int:
        count, at = super().write(data), self.tell()
        if at - self._started >= AT_A_TIME and sys.platform == "linux":
            # Linux starts to write such pages, and drops only pages that are on disk already: none of these are.
            os.posix_fadvise(self.fileno(), self._started, at - self._started, os.POSIX_FADV_DONTNEED)
            self._started = at
        return count


@contextmanager
def reading(place: Place) -> Iterator[None]:
    """In this context OSErrors become ValueErrors that name the place; those of object stores do not."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{place} cannot be read ({error.strerror or error})") from None


LATEST = "latest"
METADATA = ".metadata"
"""The file that makes a directory a checkpoint of torch.distributed.checkpoint."""
_NAME, _GONE = re.compile(r"\d{8}"), ".gone"
_PART = re.compile(r"rank-\d+\.safetensors\.json")
# What other libraries save, and what is in a checkpoint itself; not what a script logs before its first save.
_OF_OTHERS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|distcp|metadata)|(checkpoint-|global_step)\d+")
_UNFINISHED = re.compile(r"rank-\d+\.safetensors(\.json)?(\.partial)?|index\.json\.partial")


def checkpoints(run: Place) -> list[Place]:
    """The finished checkpoints of a run, oldest first."""
    return [one for one in run.inside() if _NAME.fullmatch(one.name) and (one / INDEX).exists()]


def begin(run: Place) -> Place:
    """A new directory to write into, with a number after all that are there. Removes interrupted saves."""
    if (run / INDEX).exists():
        raise ValueError(f"{run} is a checkpoint, and a new one is saved beside it: pass the run's path, {run.parent}")
    run.make()
    found = [one for one in run.inside() if _NAME.fullmatch(one.name)]
    number = max((int(one.name) for one in found), default=0)
    for one in found:
        if all(_UNFINISHED.fullmatch(file.name) for file in one.inside()):  # no index, and no files of others
            if run.mounted:  # another program, which may be about to write the index, does not find it any more
                with suppress(OSError):
                    one.move(run / f"{one.name}{_GONE}")
            else:
                one.remove()
    for gone in [one for one in run.inside() if one.name.endswith(_GONE)] if run.mounted else ():
        if (gone / INDEX).exists():  # it has written that just before
            gone.move(run / gone.name.removesuffix(_GONE))
        else:
            gone.remove()
    while True:
        number += 1
        try:
            (new := run / f"{number:08d}").make(new=True)
        except FileExistsError:  # of another program, which was faster
            continue
        run.sync()
        return new


def publish(checkpoint: Place, index: bytes, keep: int | None) -> None:
    """Makes a directory whose files are on disk the run's latest checkpoint; removes all but the last `keep`."""
    run = checkpoint.parent
    (checkpoint / INDEX).put(index)
    # This one, but where another program saves to the run, too, whose newer one may be complete already.
    (run / LATEST).put(f"{checkpoints(run)[-1].name}\n".encode())
    if keep is not None:
        with suppress(Exception):  # the new checkpoint is complete, and the next save tries again to remove the old
            for old in checkpoints(run)[:-keep]:
                (old / INDEX).remove()  # what is half removed must not be read as a complete checkpoint
                old.remove()


class NothingSaved(ValueError):
    """Nothing was saved at a path yet, or its first save was interrupted."""


def resolve(path: Place) -> Place:
    """The checkpoint at a path: itself, or the latest of the run. Raises NothingSaved where a run may begin."""
    with reading(path):
        if (path / INDEX).exists():
            return path
    try:
        name = (path / LATEST).read(64).decode(errors="replace").strip()  # however long it may be
    except (FileNotFoundError, NotADirectoryError):
        found_all = checkpoints(path)
        if len(found_all) == 1 and any(_PART.fullmatch(one.name) for one in found_all[0].inside()):
            return found_all[0]  # the run's first, whose save was killed when all of it was there but `latest`
        others = found_all or path.is_file() or any(_OF_OTHERS.fullmatch(one.name) for one in path.inside())
        raise (ValueError if others else NothingSaved)(f"{path} {_description(path)}") from None
    found = path / name
    if re.fullmatch(r"global_step\d+", name):
        raise ValueError(f"{path} is a checkpoint of DeepSpeed: convert it by the zero_to_fp32.py in it, and {_PLAIN}")
    if not _NAME.fullmatch(name) or not (found / INDEX).exists():
        raise ValueError(f"{path / LATEST} names {name!r}, which is no checkpoint; {path} {_description(path)}")
    return found


_PLAIN = "load what that wrote by zero.load_full_state_dict(model, weights)"


def _description(path: Place) -> str:
    """What is at a path that is no checkpoint, and how it is loaded."""
    if not path.exists():
        return "is not there"
    at, run = repr(path.url), path.parent
    if path.is_file():
        if path.name == LATEST and checkpoints(run):
            return f"is the file that names the run's latest checkpoint: pass the run's path, {run}"
        if (run / INDEX).exists():
            return f"is a file of a checkpoint: pass the checkpoint's path, {run}"
        if path.name.endswith(".safetensors"):
            return f"is a file of weights: zero.load_full_state_dict(model, safetensors.torch.load_file({at})) loads it"
        return (
            f"is a file: weights that torch.save wrote are loaded by zero.load_full_state_dict(model, torch.load({at}, "
            "weights_only=True)), an optimizer's state by zero.load_full_optimizer_state_dict"
        )
    if names := [one.name for one in checkpoints(path)]:
        return f"has the checkpoints {', '.join(names)}: choose one of these by its full path"
    names = [one.name for one in path.inside()]
    if METADATA in names:
        return f"is a checkpoint of torch.distributed.checkpoint: zero.checkpoint.load({at}, model, optimizer) loads it"
    weights = [name for name in names if re.fullmatch(r".*\.safetensors|pytorch_model.*\.bin", name)]
    if "config.json" in names and weights:
        return f"is a model of transformers: build it by from_pretrained({at}), and wrap that"
    if any(map(_UNFINISHED.fullmatch, weights)):
        return f"has no {INDEX}: it is an incomplete checkpoint"
    if weights:
        return (
            f"has files of weights, and no {INDEX}: zero.load_full_state_dict(model, weights) loads them, such as "
            f"safetensors.torch.load_file({str(path / weights[0])!r})"
        )
    if others := [name for name in names if not _NAME.fullmatch(name)]:
        return f"has no checkpoint of zero in it, but {listed(others)}"
    return "has no checkpoint in it: nothing was saved there, or its first save was interrupted"
