"""Checkpoints of other libraries, made into one of zero's.

Read are plain files of torch.save, safetensors and torch's distributed checkpoints (foreign.py). Nothing is unpickled
but by torch.load(weights_only=True). The pickle in torch's distributed checkpoints is not loaded either
(torch_distributed.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from zero.checkpoint import directory
from zero.checkpoint.foreign import read_dcp, read_safetensors, read_torch
from zero.checkpoint.format import Index, geometry_of, tensor_problem
from zero.checkpoint.rank_files import seal, write_rank_file
from zero.checkpoint.save_plan import SavePlan
from zero.checkpoint.shards import Held
from zero.checkpoint.state_dicts import MASTER, Found
from zero.checkpoint.storage import Place, mounted, place
from zero.checkpoint.torch_distributed import METADATA


def import_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path | str:
    """Makes a checkpoint in the run's directory `path` of another library's. Returns its path, or its URL.

    source: a file of torch.save (read with weights_only=True): a state_dict, or a dictionary of one ("model",
        "state_dict") and perhaps the optimizer's ("optim", "optimizer") and values, which become `extra`; a safetensors
        file, or a directory of them; or the directory of a torch distributed checkpoint.

    An optimizer that knows its parameters by number only is taken to have been built from model.parameters(). A warning
    says so where the shapes cannot confirm it.

    Masters are imported if they round to the imported parameters. Others are out of date: an optimizer that does not
    know them has carried them along. One tensor is in memory at a time, or a master and its parameter.
    Raises ValueError for any other file or directory.
    """
    given = mounted(source, "what is imported")
    if given.is_dir() and (given / METADATA).is_file():
        found = read_dcp(given)
    elif given.is_dir() or given.suffix == ".safetensors":
        found = read_safetensors(given)
    elif given.is_file():
        found = read_torch(given)
    else:
        raise ValueError(f"{given} is not there.")
    _refuse_what_cannot_be_stored(found)
    _remove_outdated_masters(found)
    return _write(found, place(path)).public


def _refuse_what_cannot_be_stored(found: Found) -> None:
    for path, tensor in found.tensors.items():
        problem = tensor_problem(tensor if found.load is None else tensor.new_empty(0, device="cpu"))
        if problem:
            raise ValueError(f"{path} {problem}.")


def _remove_outdated_masters(found: Found) -> None:
    for path in [path for path in found.tensors if path.startswith(MASTER)]:
        name = path.removeprefix(MASTER)
        param_path = f"model/{found.tied.get(name, name)}"
        if param_path in found.tensors:
            param = found.value(param_path)
            if torch.equal(found.value(path).to(param.dtype), param):
                continue
        del found.tensors[path]


def _write(found: Found, run: Place) -> Place:
    held = [Held(path, geometry_of(tensor), 0, tensor.numel(), tensor) for path, tensor in found.tensors.items()]
    values = [optimizer.values for optimizer in found.optimizers]
    index = Index(None, 1, tied=found.tied, values=found.values, optimizers=found.optimizers, extra=found.extra)

    def flat(one: Held) -> Tensor:
        return one.full.flat(found.value(one.path))

    partial = directory.begin(run)
    try:
        write_rank_file(partial, 0, SavePlan(index, held, values), shown=True, flat=flat)
        return seal(partial, index, keep=None)
    except BaseException:
        partial.remove()
        raise
