"""A run's directory: its checkpoints, which of them is the latest, and how one comes to be seen.

run/00000001/      a checkpoint, whole: it got this name when everything in it was on disk
run/latest         the name of the newest
run/.partial-...   one that is being written, or whose writing was interrupted; the next save removes it
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from zero.checkpoint.format import INDEX

LATEST = "latest"
_NAME = re.compile(r"\d{8}")
_PARTIAL = ".partial-"


def checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = [one for one in run.iterdir() if _NAME.fullmatch(one.name) and (one / INDEX).exists()]
    return sorted(found, key=lambda one: one.name)


def begin(run: Path) -> Path:
    """A new directory to write into, beside the run's checkpoints. Removes what interrupted saves have left."""
    run.mkdir(parents=True, exist_ok=True)
    for left in run.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
    partial = run / f"{_PARTIAL}{uuid.uuid4().hex[:12]}"
    partial.mkdir()
    return partial


def discard(partial: Path) -> None:
    """Removes a directory that came to nothing."""
    shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, keep: int | None) -> Path:
    """Gives a directory whose files are on disk its name, makes it the latest, and removes all but the last `keep`."""
    run = partial.parent
    numbers = [int(one.name) for one in run.iterdir() if _NAME.fullmatch(one.name)]
    final = run / f"{max(numbers, default=0) + 1:08d}"
    sync(partial)
    partial.rename(final)
    sync(run)
    _point(run, final.name)
    if keep is not None:
        for old in checkpoints(run)[:-keep]:
            # Under another name first: half removed, it must not pass for a checkpoint.
            doomed = run / f"{_PARTIAL}{old.name}-{uuid.uuid4().hex[:6]}"
            old.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    return final


def _point(run: Path, name: str) -> None:
    beside = run / f"{_PARTIAL}{LATEST}"
    with open(beside, "w") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(run / LATEST)
    sync(run)


def sync(directory: Path) -> None:
    """Puts on disk which files a directory has."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolve(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the latest of the run. Raises ValueError where there is none."""
    if (path / INDEX).is_file():
        return path
    try:
        name = (path / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if not name:
        raise ValueError(f"{path} {_what_is_there(path)}")
    found = path / name
    if not _NAME.fullmatch(name) or not (found / INDEX).is_file():
        raise ValueError(f"{path / LATEST} names {name!r}, which is no checkpoint; {path} {_what_is_there(path)}")
    return found


def _what_is_there(path: Path) -> str:
    if not path.is_dir():
        return "is not there" if not path.exists() else "is no directory"
    names = [one.name for one in checkpoints(path)]
    if names:
        return f"has the checkpoints {', '.join(names)}: choose one of these by its full path"
    if any(path.glob("*.safetensors")):
        return f"has no {INDEX}: it is half a checkpoint, or another library's (`python -m zero.checkpoint import`)"
    return "has no checkpoint in it: nothing was saved there, or its first save was interrupted"
