"""An object store for tests, at `objects:///folder`: ranks in several processes share it, and it can do no more than
object stores can. Objects are there whole or not at all, nothing is renamed or written in the middle, and listings are
remembered until they are asked for anew.
"""

import io
import os
import uuid
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

UPLOAD = ".upload-"
"""How files begin that stand for uploads that are not complete. Stores show them to nobody, and drop them in time."""

FULL = "full"
"""An object of this name beside the run's stands for a store that takes nothing larger than 1000 bytes any more."""


class Upload(io.BytesIO):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def seekable(self) -> bool:
        return False

    def seek(self, *args: Any) -> int:
        raise io.UnsupportedOperation("objects are written from front to back")

    def close(self) -> None:
        if self.closed:
            return
        store = os.path.dirname(os.path.dirname(os.path.dirname(self._path)))
        if self.tell() > 1000 and os.path.exists(os.path.join(store, FULL)):
            super().close()
            raise PermissionError(f"no more room for {os.path.basename(self._path)}")  # as stores say it: no errno
        folder = os.path.dirname(self._path)
        os.makedirs(folder, exist_ok=True)
        # Beside the folder: what a killed rank left in it would keep it from being removed, as nothing does in stores.
        hidden = os.path.join(os.path.dirname(folder), f"{UPLOAD}{uuid.uuid4().hex}")
        with open(hidden, "wb") as file:
            file.write(self.getbuffer())
        os.replace(hidden, self._path)
        super().close()


class ObjectStore(LocalFileSystem):
    protocol = "objects"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._remembered: dict[tuple[str, str], Any] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("objects://"))

    def invalidate_cache(self, path: str | None = None) -> None:
        self._remembered.clear()

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        key = ("ls", str(detail) + path)
        if key not in self._remembered:
            found = super().ls(path, detail, **options)
            shown = [one for one in found if UPLOAD not in str(one)]
            self._remembered[key] = shown
        return self._remembered[key]

    def exists(self, path: str, **options: Any) -> bool:
        key = ("exists", path)
        if key not in self._remembered:
            self._remembered[key] = super().exists(path, **options)
        return self._remembered[key]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no directories; what is there before the first object is nothing."""

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if "w" in mode:
            return Upload(path)
        return super()._open(path, mode, block_size, **options)

    def mv(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("objects are not renamed")

    mv_file = mv


fsspec.register_implementation("objects", ObjectStore, clobber=True)
