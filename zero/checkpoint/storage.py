"""Where checkpoints are stored: in directories, or at fsspec URLs ("s3://bucket/run", "gs://...", "memory://...").

    Local    a mounted directory or file. Read at offsets, directly into the target's memory. Data is on disk when the
             call that writes it returns, and a rename is atomic.
    Remote   an object, or a prefix of object names. Read by ranges. An object is complete or absent, but there are no
             directories to rename and no files to sync.

Both have the same few operations, which Local describes. fsspec's own LocalFileSystem could replace Local, but it
copies what it reads, has no fsync, and replaces files by copying them where a rename would do.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

AT_A_TIME = 1 << 24
"""Bytes that are requested from an object store at a time, or whose transfer to the disk is started at a time."""


def place(path: str | os.PathLike[str]) -> Place:
    """The Place of a path or URL. Raises ValueError or ImportError for a URL that fsspec cannot serve."""
    text = os.fspath(path)
    mounted = re.fullmatch(r"(?:file|local)://(.*)", text)
    if mounted is None and "://" in text:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # optional: only for URLs

        system, inside = url_to_fs(text)
        return Remote(text.rstrip("/"), system, inside.rstrip("/"))
    return Local(Path(os.path.abspath(mounted[1] if mounted else text)))


@dataclass(frozen=True)
class Local:
    """A directory or file, which may not exist yet. A rename is atomic, and files opened by `write` are seekable.

    poll_every: the most seconds between two looks while waiting for a file.
    public: the path or URL from which `place` makes it.
    """

    path: Path

    poll_every: ClassVar[float] = 0.02

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> Local:
        return Local(self.path.parent)

    @property
    def public(self) -> Path:
        return self.path

    def __truediv__(self, name: str) -> Local:
        return Local(self.path / name)

    def inside(self) -> list[Local]:
        return [Local(one) for one in self.path.iterdir()]

    def exists(self) -> bool:
        return self.path.exists()

    def is_directory(self) -> bool:
        return self.path.is_dir()

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        """Removes it with its contents. What cannot be removed stays, without an error."""
        with suppress(OSError):
            if self.path.is_dir():
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                self.path.unlink()

    def read(self, most: int | None = None) -> bytes:
        """All of a small file, or its first bytes."""
        with open(self.path, "rb") as file:
            return file.read(most)

    def put(self, data: bytes) -> None:
        """Creates or replaces a small file, atomically for readers. File and directory entry are on disk on return."""
        temporary = self.parent / f".partial-{self.name}-{uuid.uuid4().hex[:6]}"
        with temporary.write() as file:
            file.write(data)
        temporary.path.replace(self.path)
        self.parent.sync()

    def open(self) -> IO[bytes]:
        """The file, without a buffer: a read fills as much of the memory as one request returns."""
        return open(self.path, "rb", buffering=0)

    @contextmanager
    def write(self) -> Iterator[_LocalWriter]:
        """A context in which the file is written. When it is left, the data is on disk, or the object exists."""
        with open(self.path, "wb", buffering=0) as file:
            yield _LocalWriter(file.fileno())
            os.fsync(file.fileno())

    def rename(self, name: str) -> Local:
        """Renames a directory within its parent; the new name is on disk on return. Its contents should be already."""
        renamed = Local(self.path.rename(self.path.with_name(name)))
        self.parent.sync()
        return renamed

    def sync(self) -> None:
        """Writes the directory's entries to disk."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _LocalWriter:
    """Starts the transfer to the disk while more is being written, so that the final sync has little left."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._started = self._at = 0

    def write(self, data: memoryview | bytes) -> None:
        while data:
            count = os.write(self._descriptor, data)
            data, self._at = data[count:], self._at + count
        if self._at - self._started >= AT_A_TIME and sys.platform == "linux":
            # Linux starts to write such pages, and drops only pages that are on disk already: none of these are.
            os.posix_fadvise(self._descriptor, self._started, self._at - self._started, os.POSIX_FADV_DONTNEED)
            self._started = self._at

    def seek(self, at: int) -> None:
        self._started = self._at = os.lseek(self._descriptor, at, os.SEEK_SET)


@dataclass(frozen=True)
class Remote:
    """url: the user's, with the names below it. system: the file system of fsspec. path: of the URL in that system."""

    url: str
    system: Any = field(compare=False)
    path: str

    poll_every: ClassVar[float] = 0.5

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rpartition("/")[0], self.system, self.path.rpartition("/")[0])

    @property
    def public(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}", self.system, f"{self.path}/{name}")

    def inside(self) -> list[Remote]:
        try:
            found = self._fresh().ls(self.path, detail=False)
        except FileNotFoundError:  # a directory without objects
            return []
        names = {one.rstrip("/").rpartition("/")[2] for one in found}
        return [self / name for name in sorted(names - {self.name})]  # some list the directory itself as well

    def exists(self) -> bool:
        return bool(self._fresh().exists(self.path))

    def is_directory(self) -> bool:
        return bool(self._fresh().isdir(self.path))

    def make(self) -> None:
        self.system.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        with suppress(Exception):
            self.system.rm(self.path, recursive=True)

    def read(self, most: int | None = None) -> bytes:
        return bytes(self.system.cat_file(self.path, end=most))

    def put(self, data: bytes) -> None:
        self.system.pipe_file(self.path, data)

    def open(self) -> IO[bytes]:
        return self._fresh().open(self.path, "rb", cache_type="none")  # type: ignore[no-any-return]

    def write(self) -> IO[bytes]:
        return self.system.open(self.path, "wb")  # type: ignore[no-any-return]

    def _fresh(self) -> Any:
        """The file system without its cached listings: other ranks write too."""
        self.system.invalidate_cache()
        return self.system


Place = Local | Remote
