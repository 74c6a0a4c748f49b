"""A run's directory: its checkpoints, which of them is the latest, and how a new one is published.

run/00000001/      a checkpoint, if it has an index, which is written when all else in it is on disk
run/latest         the name of the newest

A numbered directory without an index is a save that goes on or was interrupted. The next save removes it.
"""

from __future__ import annotations

import re
from contextlib import suppress

from zero.checkpoint.format import INDEX, listed
from zero.checkpoint.storage import Place, reading

LATEST = "latest"
_NAME = re.compile(r"\d{8}")
_PART = re.compile(r"rank-\d+\.safetensors\.json")
# What other libraries save, and what is in a checkpoint itself; not what a script logs before its first save.
_OF_OTHERS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|distcp|metadata)|(checkpoint-|global_step)\d+")
_UNFINISHED = re.compile(r"rank-\d+\.safetensors(\.json)?(\.partial)?|index\.json\.partial")


def checkpoints(run: Place) -> list[Place]:
    """The finished checkpoints of a run, oldest first."""
    return [one for one in run.inside() if _NAME.fullmatch(one.name) and (one / INDEX).exists()]


def begin(run: Place) -> Place:
    """A new directory to write into, with a number after all that are there. Removes interrupted saves. Raises
    ValueError for a checkpoint, at whose path `load` would go on to find it."""
    if (run / INDEX).exists():
        raise ValueError(f"{run} is a checkpoint, and a new one is saved beside it: pass the run's path, {run.parent}")
    run.make()
    found = [one for one in run.inside() if _NAME.fullmatch(one.name)]
    new = run / f"{max((int(one.name) for one in found), default=0) + 1:08d}"
    for one in found:
        if all(_UNFINISHED.fullmatch(file.name) for file in one.inside()):  # no index, and no files of others
            one.remove()
    new.make()
    run.sync()
    return new


def publish(checkpoint: Place, index: bytes, keep: int | None) -> None:
    """Makes a directory whose files are on disk the run's latest checkpoint; removes all but the last `keep`."""
    run = checkpoint.parent
    (checkpoint / INDEX).put(index)
    (run / LATEST).put(f"{checkpoint.name}\n".encode())
    if keep is not None:
        with suppress(Exception):  # the new checkpoint is complete, and the next save tries again to remove the old
            for old in checkpoints(run)[:-keep]:
                (old / INDEX).remove()  # what is half removed must not be read as a complete checkpoint
                old.remove()


class NothingSaved(ValueError):
    """Nothing was saved at a path yet, or its first save was interrupted."""


def resolve(path: Place) -> Place:
    """The checkpoint at a path: itself, or the latest of the run. Raises NothingSaved where a run may begin, and
    ValueError where one is damaged, or where something else was saved."""
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
    if ".metadata" in names:
        return (
            "is a checkpoint of torch.distributed.checkpoint: convert it by torch.distributed.checkpoint.format_utils."
            f"dcp_to_torch_save({at}, file), if you trust the pickles in it, and {_PLAIN}"
        )
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
