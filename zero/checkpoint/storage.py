"""Where checkpoints are stored: in mounted directories, or at fsspec URLs ("s3://bucket/run", "gs://...", "memory://...").

A Place is a path in one of fsspec's file systems, of which LocalFileSystem serves the mounted ones. A file appears when
it is complete.
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

AT_A_TIME = 1 << 24
"""Bytes that are requested from an object store at a time, or whose transfer to the disk is started at a time."""


def place(path: str | os.PathLike[str]) -> Place:
    """The Place of a path, where ~ is the home directory, or of a URL. Raises ValueError or ImportError for a URL that
    fsspec cannot serve."""
    text = os.fspath(path)
    mounted = re.fullmatch(r"(?:file|local)://(.*)", text)
    if mounted is None and "://" in text:
        return Place(text.rstrip("/"), *url_to_fs(text.rstrip("/")))
    absolute = Path(os.path.abspath(os.path.expanduser(mounted[1] if mounted else text))).as_posix()
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

    def make(self) -> None:
        self.system.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Removes it with its contents. What cannot be removed stays, without an error."""
        with suppress(Exception):
            if self.mounted:
                self.system.rm(self.path, recursive=True)
                return
            # Not by `rm`, which takes the paths of stores for patterns: that of "lr[1]" is also "lr1".
            for file in self._fresh().find(self.path):
                self.system.rm_file(file)
            self.system.rmdir(self.path)  # where a store has directories

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
        """A context in which a file is written. When it is left, the file is there, whole, in place of an earlier one.
        What is in a mounted one is on disk then, but perhaps not its name."""
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
