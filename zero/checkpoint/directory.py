"""A run's directory: its checkpoints, which of them is the latest, and how a new one is published.

run/00000001/      a complete checkpoint: it got this name when everything in it was on disk
run/latest         the name of the newest
run/.partial-...   a checkpoint that is being written, or whose save was interrupted; the next save removes it

Where directories cannot be renamed (object stores), a checkpoint has its name from the start, and its index is written
last: without an index it is no checkpoint.
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
# The files and reports of ranks.
_RANKS = re.compile(r"rank-\d+\.\w+")


def checkpoints(run: Place) -> list[Place]:
    """The finished checkpoints of a run, oldest first."""
    return [one for one in _numbered(run) if (one / INDEX).exists()]


def begin(run: Place) -> Place:
    """A new directory to write into. Removes the files of interrupted saves."""
    run.make()
    for left in run.inside():
        if left.name.startswith(_PARTIAL):
            left.remove()
    for left in () if isinstance(run, Local) else _numbered(run):
        if all(_RANKS.fullmatch(one.name) for one in left.inside()):  # no index, and no files of others
            left.remove()
    partial = run / (f"{_PARTIAL}{uuid.uuid4().hex[:12]}" if isinstance(run, Local) else _next(run))
    partial.make()
    return partial


def publish(partial: Place, index: bytes, keep: int | None) -> Place:
    """Turns a directory whose files are on disk into the run's latest checkpoint; removes all but the last `keep`."""
    run = partial.parent
    (partial / INDEX).put(index)
    final = partial.rename(_next(run)) if isinstance(partial, Local) else partial
    (run / LATEST).put(f"{final.name}\n".encode())
    if keep is not None:
        with suppress(Exception):  # the new checkpoint is complete, and the next save tries again to remove the old
            for old in checkpoints(run)[:-keep]:
                if isinstance(old, Local):  # what is half removed must not be read as a complete checkpoint
                    old = old.rename(f"{_PARTIAL}{old.name}-{uuid.uuid4().hex[:6]}")
                else:
                    (old / INDEX).remove()
                old.remove()
    return final


def _numbered(run: Place) -> list[Place]:
    return sorted((one for one in run.inside() if _NAME.fullmatch(one.name)), key=lambda one: one.name)


def _next(run: Place) -> str:
    return f"{max((int(one.name) for one in _numbered(run)), default=0) + 1:08d}"


def resolve(path: Place) -> Place:
    """The checkpoint at a path: itself, or the latest of the run. Raises ValueError where there is none."""
    if (path / INDEX).exists():
        return path
    try:
        name = (path / LATEST).read(64).decode().strip()  # however long it may be
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        name = ""
    if not name:
        raise ValueError(f"{path} {_description(path)}")
    found = path / name
    if not _NAME.fullmatch(name) or not (found / INDEX).exists():
        raise ValueError(f"{path / LATEST} names {name!r}, which is no checkpoint; {path} {_description(path)}")
    return found


def _description(path: Place) -> str:
    if not path.is_directory():
        return "is not there" if not path.exists() else "is no directory"
    names = [one.name for one in checkpoints(path)]
    if names:
        return f"has the checkpoints {', '.join(names)}: choose one of these by its full path"
    if any(one.name.endswith(".safetensors") for one in path.inside()):
        return f"has no {INDEX}: it is an incomplete checkpoint, or another library's"
    return "has no checkpoint in it: nothing was saved there, or its first save was interrupted"
