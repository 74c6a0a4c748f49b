"""Where checkpoints are stored: in directories, or at fsspec URLs ("s3://bucket/run", "gs://...", "memory://...").

    Place    an object, or a prefix of object names. Read by ranges. An object is complete or absent, but there are no
             directories to rename and no files to sync.
    Local    a mounted directory or file. Read at offsets, directly into the target's memory. Data is on disk when the
             call that writes it returns, and a rename is atomic.

Both go through fsspec. Its LocalFileSystem has no fsync, replaces files by copying them where a rename would do, stops
at the first file that it cannot remove, and takes for missing what it may not see: these operations are Local's own.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # torch requires it

if TYPE_CHECKING:
    from typing_extensions import Self

AT_A_TIME = 1 << 24
"""Bytes that are requested from an object store at a time, or whose transfer to the disk is started at a time."""


def place(path: str | os.PathLike[str]) -> Place:
    """The Place of a path or URL. Raises ValueError or ImportError for a URL that fsspec cannot serve."""
    text = os.fspath(path)
    mounted = re.fullmatch(r"(?:file|local)://(.*)", text)
    if mounted is None and "://" in text:
        return Place(text.rstrip("/"), *url_to_fs(text.rstrip("/")))
    absolute = Path(os.path.abspath(mounted[1] if mounted else text)).as_posix()
    return Local(absolute, url_to_fs("file:///")[0], absolute)


@dataclass(frozen=True)
class Place:
    """url: the user's, with the names below it. system: the file system of fsspec. path: of the URL in that system.

    poll_every: the most seconds between two looks while waiting for a file.
    public: the path or URL from which `place` makes it.
    """

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
    def parent(self) -> Self:
        return type(self)(self.url.rpartition("/")[0], self.system, self.path.rpartition("/")[0])

    @property
    def public(self) -> Path | str:
        return self.url

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self.url}/{name}", self.system, f"{self.path}/{name}")

    def inside(self) -> list[Self]:
        try:
            found = self._fresh().ls(self.path, detail=False)
        except FileNotFoundError:  # a directory without objects
            return []
        paths = {one.strip("/") for one in found} - {self.path.strip("/")}  # some list the directory itself as well
        return [self / one.rpartition("/")[2] for one in sorted(paths)]

    def exists(self) -> bool:
        return bool(self._fresh().exists(self.path))

    def is_directory(self) -> bool:
        return bool(self._fresh().isdir(self.path))

    def make(self) -> None:
        self.system.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Removes it with its contents. What cannot be removed stays, without an error."""
        with suppress(Exception):
            self.system.rm(self.path, recursive=True)

    def read(self, most: int | None = None) -> bytes:
        """All of a small file, or its first bytes."""
        return bytes(self.system.cat_file(self.path, end=most))

    def put(self, data: bytes) -> None:
        """Creates or replaces a small file, atomically for readers."""
        self.system.pipe_file(self.path, data)

    def open(self) -> IO[bytes]:
        """The file, without a buffer: a read fills as much of the memory as one request returns."""
        return self._fresh().open(self.path, "rb", cache_type="none")  # type: ignore[no-any-return]

    def write(self) -> AbstractContextManager[Any]:
        """A context in which the file is written. When it is left, the object exists, or the data is on disk."""
        return self.system.open(self.path, "wb")  # type: ignore[no-any-return]

    def _fresh(self) -> Any:
        """The file system without its cached listings: other ranks write too."""
        self.system.invalidate_cache()
        return self.system


class Local(Place):
    """A directory or file, which may not exist yet. A rename is atomic, and files opened by `write` are seekable."""

    poll_every: ClassVar[float] = 0.02

    @property
    def public(self) -> Path:
        return Path(self.path)

    def inside(self) -> list[Local]:
        """Raises OSError where there is no directory (any more)."""
        return [self / name for name in os.listdir(self.path)]

    def exists(self) -> bool:
        """Raises OSError where this may not be looked at, of which fsspec says that it is not there."""
        return self.public.exists()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # a file
            os.unlink(self.path)

    def put(self, data: bytes) -> None:
        """File and directory entry are on disk on return."""
        temporary = self.parent / f".partial-{self.name}-{uuid.uuid4().hex[:6]}"
        with temporary.write() as file:
            file.write(data)
        temporary.public.replace(self.path)
        self.parent.sync()

    def open(self) -> IO[bytes]:
        return open(self.path, "rb", buffering=0)

    @contextmanager
    def write(self) -> Iterator[_LocalWriter]:
        with open(self.path, "wb", buffering=0) as file:
            yield _LocalWriter(file.fileno())
            os.fsync(file.fileno())

    def rename(self, name: str) -> Local:
        """Renames a directory within its parent; the new name is on disk on return. Its contents should be already."""
        renamed = self.parent / name
        self.public.rename(renamed.path)
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
