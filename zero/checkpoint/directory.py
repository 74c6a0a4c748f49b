"""A run's directory: its checkpoints, which of them is the latest, and how one comes to be seen.

run/00000001/      a checkpoint, full: it got this name when everything in it was on disk
run/latest         the name of the newest
run/.partial-...   one that is being written, or whose writing was interrupted; the next save removes it

Where directories cannot be renamed (object stores), one that is being written has its name from the start, and its
index, without which it is no checkpoint, is put there last.
"""

from __future__ import annotations

import re
import uuid
from contextlib import suppress

from zero.checkpoint.format import INDEX
from zero.checkpoint.storage import Local, Place

LATEST = "latest"
_NAME = re.compile(r"\d{8}")
_PARTIAL = ".partial-"
_RANKS = re.compile(r"rank-\d+\.\w+")
"""The files and reports of ranks."""


def checkpoints(run: Place) -> list[Place]:
    """The finished checkpoints of a run, oldest first."""
    return [one for one in _numbered(run) if (one / INDEX).exists()]


def begin(run: Place) -> Place:
    """A new directory to write into. Removes what interrupted saves have left."""
    run.make()
    for left in run.inside():
        if left.name.startswith(_PARTIAL):
            left.remove()
    if run.renames:
        partial = run / f"{_PARTIAL}{uuid.uuid4().hex[:12]}"
    else:
        for left in _numbered(run):
            if all(_RANKS.fullmatch(one.name) for one in left.inside()):  # without an index, and nobody else's
                left.remove()
        partial = run / _next(_numbered(run))
    partial.make()
    return partial


def publish(partial: Place, index: bytes, keep: int | None) -> Place:
    """Makes a directory whose files are on disk a checkpoint, and the latest; removes all but the last `keep`."""
    run = partial.parent
    (partial / INDEX).put(index)
    final = partial.rename(_next(_numbered(run))) if isinstance(partial, Local) else partial
    (run / LATEST).put(f"{final.name}\n".encode())
    if keep is not None:
        with suppress(Exception):  # the new one is there; what cannot be removed now, the next save removes
            for old in checkpoints(run)[:-keep]:
                _retire(old)
    return final


def _numbered(run: Place) -> list[Place]:
    return sorted((one for one in run.inside() if _NAME.fullmatch(one.name)), key=lambda one: one.name)


def _next(numbered: list[Place]) -> str:
    return f"{max((int(one.name) for one in numbered), default=0) + 1:08d}"


def _retire(old: Place) -> None:
    """Half removed, it must not pass for a checkpoint."""
    if isinstance(old, Local):
        old = old.rename(f"{_PARTIAL}{old.name}-{uuid.uuid4().hex[:6]}")
    else:
        (old / INDEX).remove()
    old.remove()


def resolve(path: Place) -> Place:
    """The checkpoint that a path means: itself, or the latest of the run. Raises ValueError where there is none."""
    if (path / INDEX).exists():
        return path
    try:
        name = _start_of(path / LATEST).decode().strip()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        name = ""
    if not name:
        raise ValueError(f"{path} {_what_is_there(path)}")
    found = path / name
    if not _NAME.fullmatch(name) or not (found / INDEX).exists():
        raise ValueError(f"{path / LATEST} names {name!r}, which is no checkpoint; {path} {_what_is_there(path)}")
    return found


def _start_of(place: Place) -> bytes:
    """Of a file that should have a few bytes, no more than that."""
    reader = place.open()
    try:
        data = bytearray(min(reader.size, 64))
        return bytes(data[: reader.read_into(memoryview(data), 0)])
    finally:
        reader.close()


def _what_is_there(path: Place) -> str:
    if not path.is_directory():
        return "is not there" if not path.exists() else "is no directory"
    names = [one.name for one in checkpoints(path)]
    if names:
        return f"has the checkpoints {', '.join(names)}: choose one of these by its full path"
    if any(one.name.endswith(".safetensors") for one in path.inside()):
        return f"has no {INDEX}: it is half a checkpoint, or another library's (`python -m zero.checkpoint import`)"
    return "has no checkpoint in it: nothing was saved there, or its first save was interrupted"
