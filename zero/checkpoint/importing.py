"""Checkpoints of others, made into one of zero's: plain files of torch.save, safetensors, torch's distributed ones.

Nothing is unpickled but by torch.load(weights_only=True). The pickle in torch's distributed checkpoints is not loaded
either (torch_distributed.py).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero._torch import load_plain_values, name_without_compile
from zero.checkpoint import directory
from zero.checkpoint.files import SafeFile
from zero.checkpoint.format import Index, OptimizerIndex, geometry_of, tensor_problem
from zero.checkpoint.rank_files import seal, write_rank_file
from zero.checkpoint.save_plan import SavePlan
from zero.checkpoint.shards import Held
from zero.checkpoint.storage import Local, Place, mounted, place
from zero.checkpoint.torch_distributed import METADATA, NotPlain, Stored, read_directory
from zero.checkpoint.values import encode

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optim", "optimizer", "optimizer_state_dict", "optim_state_dict")
_WRAPPER = "module."
_MASTER = "master/"
_EXTRA_STATE = "_extra_state"


@dataclass
class Found:
    """What was found, as an index has it.

    tensors: by path; they may be on the meta device, and `load` then gives the values of a path.
    tied: further names of the model's tensors, and the name that each is stored under.
    values: what modules gave by get_extra_state(), by name, as JSON.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    optimizers: list[OptimizerIndex] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    load: Callable[[str], Tensor] | None = None

    def value(self, path: str) -> Tensor:
        return self.tensors[path].detach() if self.load is None else self.load(path)


def import_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path | str:
    """Makes a checkpoint in the run's directory `path` of another library's. Returns it.

    source: a file of torch.save (read with weights_only=True): a state_dict, or a dictionary of one ("model",
        "state_dict") and perhaps the optimizer's ("optim", "optimizer") and values, which become `extra`; a safetensors
        file, or a directory of them; or the directory of a torch distributed checkpoint.

    An optimizer that knows its parameters by number only is taken to have been built from model.parameters(); a warning
    says so where shapes cannot tell.

    Of masters, those are taken that round to the imported parameters. Others are older than these: an optimizer that
    does not know them has carried them along. One tensor is in memory at a time, or a master and its parameter.
    Raises ValueError for what is none of these.
    """
    given = mounted(source, "what is imported")
    if given.is_dir() and (given / METADATA).is_file():
        found = _of_dcp(given)
    elif given.is_dir() or given.suffix == ".safetensors":
        found = _of_safetensors(given)
    elif given.is_file():
        found = _of_torch(given)
    else:
        raise ValueError(f"{given} is not there.")
    _refuse_what_cannot_be_stored(found)
    _leave_old_masters(found)
    return _write(found, place(path)).public


def _refuse_what_cannot_be_stored(found: Found) -> None:
    for path, tensor in found.tensors.items():
        problem = tensor_problem(tensor if found.load is None else tensor.new_empty(0, device="cpu"))
        if problem:
            raise ValueError(f"{path} {problem}.")


def _leave_old_masters(found: Found) -> None:
    for path in [path for path in found.tensors if path.startswith(_MASTER)]:
        name = path.removeprefix(_MASTER)
        of = f"model/{found.tied.get(name, name)}"
        if of in found.tensors:
            param = found.value(of)
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


# --------------------------------------------------------------------------------------------------------- torch.save


def _of_torch(path: Path) -> Found:
    try:
        told = load_plain_values(path)
    except Exception as error:
        raise ValueError(
            f"{path} is no file of torch.save that holds weights and plain values only, and was not read ({error})."
        ) from None
    if not isinstance(told, dict):
        raise ValueError(f"{path} holds a {type(told).__name__}, not a state_dict or a dictionary of them.")
    return _of_dictionary(told, str(path))


def _of_dictionary(told: dict[str, Any], where: str) -> Found:
    model_key = next((key for key in _MODEL_KEYS if isinstance(told.get(key), dict)), None)
    weights = told if model_key is None else told[model_key]
    strangers = [name for name, value in weights.items() if not _is_of_model(name, value)]
    if strangers or not weights:
        what = f"{strangers[0]!r}, which is no name of a tensor" if strangers else "nothing"
        raise ValueError(f"{where} holds {what}. Expected a state_dict, or one under {' or '.join(_MODEL_KEYS)}.")
    found = Found()
    _take_model(found, weights, where)
    optimizer_key = next((key for key in _OPTIMIZER_KEYS if isinstance(told.get(key), dict)), None)
    if model_key is not None and optimizer_key is not None:
        _take_optimizer(found, told[optimizer_key], where)
    for key, value in told.items() if model_key is not None else ():
        if key not in (model_key, optimizer_key):
            try:
                found.extra[str(key)] = encode(value, f"{key!r} of {where}")
            except ValueError as error:
                warnings.warn(f"left out: {error}", stacklevel=4)
    return found


def _is_of_model(name: Any, value: Any) -> bool:
    return isinstance(name, str) and (isinstance(value, Tensor) or _is_extra_state(name))


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def _take_model(found: Found, weights: dict[str, Any], where: str) -> None:
    weights = {name_without_compile(name): value for name, value in weights.items()}
    wrapped = all(name.startswith(_WRAPPER) for name in weights)  # saved through DistributedDataParallel
    seen: dict[tuple[Any, ...], str] = {}
    for given, value in weights.items():
        name = given.removeprefix(_WRAPPER) if wrapped else given
        if _is_extra_state(name):
            found.values[name] = encode(value, f"{name!r} of {where}")
            continue
        if value.numel() and tensor_problem(value) is None:  # others have no memory to share, or are refused
            same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if same in seen:
                found.tied[name] = seen[same]
                continue
            seen[same] = name
        found.tensors[f"model/{name}"] = value


def _take_optimizer(found: Found, told: dict[str, Any], where: str) -> None:
    """An optimizer's plain state_dict, by number or by name."""
    groups_told, state_told = _groups_and_state(told, where)
    called = _called(groups_told, state_told, found, where)
    number = len(found.optimizers)
    groups = [
        {
            "params": [called[param] for param in group["params"]],
            "options": {
                key: encode(value, f"option {key!r}")
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
        }
        for group in groups_told
    ]
    index = OptimizerIndex("", groups)
    for param, state in state_told.items():
        name = called[param]
        for key, value in state.items():
            path = f"optimizer/{number}/{name}/{key}"
            if isinstance(value, Tensor) and key == "master":
                found.tensors[_MASTER + name] = value
            elif isinstance(value, Tensor) and value.dim():
                found.tensors[path] = value
            else:
                index.values.setdefault(name, {})[key] = encode(value, path)
    found.optimizers.append(index)


def _groups_and_state(told: dict[str, Any], where: str) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """An optimizer's groups, and its state by what these call the parameters. Raises ValueError for anything else."""
    # torch's distributed checkpoints leave out what is empty, and make strings of a dictionary's keys: of numbers too.
    groups, state = told.get("param_groups"), told.get("state", {})
    if isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups):
        params = {str(param): param for group in groups for param in group["params"]}
        if isinstance(state, dict) and all(str(key) in params and isinstance(state[key], dict) for key in state):
            return groups, {params[str(key)]: entries for key, entries in state.items()}
    raise ValueError(
        f"the optimizer in {where} is not what an optimizer's state_dict() returns. Expected 'param_groups', each with "
        "'params', and 'state' of these."
    )


def _called(groups: list[dict[str, Any]], state: dict[Any, dict[str, Any]], found: Found, where: str) -> dict[Any, str]:
    """The names of an optimizer's parameters. Plain state_dicts have them only where it was built with names."""
    params = [param for group in groups for param in group["params"]]
    if all(isinstance(param, str) for param in params):
        return {param: _own_name_in(found, param) for param in params}
    given = [name for group in groups for name in group.get("param_names", ())]
    if len(given) == len(params):
        return {param: _own_name_in(found, name) for param, name in zip(params, given, strict=True)}
    names = [path.removeprefix("model/") for path in found.tensors]
    if len(names) == len(params):
        shapes = {param: found.tensors[f"model/{name}"].shape for param, name in zip(params, names, strict=True)}
        shown = {
            param: {value.shape for value in entries.values() if isinstance(value, Tensor) and value.dim()}
            for param, entries in state.items()
        }
        if all(some <= {shapes[param]} for param, some in shown.items()):
            settled = all(map(shown.get, params)) and len({*shapes.values()}) == len(params)
            if not settled and (state or len(groups) > 1):
                warnings.warn(_by_order(where), stacklevel=6)
            return dict(zip(params, names, strict=True))
    raise ValueError(
        f"the optimizer in {where} numbers its {len(params)} parameters, and which of the model's {len(names)} tensors "
        "each is cannot be told. Save it from an optimizer that was built with model.named_parameters()."
    )


def _own_name_in(found: Found, name: str) -> str:
    """What the model's weights call a parameter that the optimizer may know through a wrapper, or by a further name."""
    own = name_without_compile(name)
    for known in (own, own.removeprefix(_WRAPPER)):
        if known in found.tied or f"model/{known}" in found.tensors:
            return found.tied.get(known, known)
    return own


def _by_order(where: str) -> str:
    return (
        f"the optimizer in {where} numbers its parameters, and their shapes do not tell one from another: it is taken "
        "to have been built from model.parameters(), in the model's order. If it was not, state goes to the wrong "
        "parameters: build it again as it was, but of pairs as named_parameters() gives them, load its state_dict, "
        "save that, which then has the names, and import it."
    )


# -------------------------------------------------------------------------------------------------------- safetensors


def _of_safetensors(path: Path) -> Found:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has neither safetensors files nor the .metadata of a torch distributed checkpoint.")
    homes: dict[str, Path] = {}

    def read(key: str) -> Tensor:
        with SafeFile(Local(homes[key])) as file:
            dtype, shape, low = file.pieces[key]
            flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
            file.check([(low, low + flat.nbytes)], lambda _: None)
            file.read(flat, low)
            return flat.view(shape)

    found = Found(load=lambda path: read(path.removeprefix("model/")))
    for one in files:
        with SafeFile(Local(one)) as file:
            for key, (dtype, shape, _) in file.pieces.items():
                if key in homes:
                    raise ValueError(f"{key!r} is in {homes[key]} and in {one}: give one model's files only.")
                homes[key] = one
                if _is_extra_state(key):
                    found.values[key] = encode(read(key), key)
                else:
                    found.tensors[f"model/{key}"] = torch.empty(shape, dtype=dtype, device="meta")
    for index in path.glob("*.safetensors.index.json"):
        for key, name in _weight_map(index).items():
            if homes.get(key) != path / name:
                lacks = f"has no {key!r}" if (path / name).exists() else "is not there"
                raise ValueError(f"{path / name} {lacks}, but {index.name} names it. Bring the whole model there.")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as Hugging Face's index of shards tells."""
    try:
        return {key: str(name) for key, name in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files, or not a whole one ({error!r}).") from None


# ------------------------------------------------------------------------------------- torch's distributed checkpoint


def _of_dcp(path: Path) -> Found:
    """Its tensors by the paths that they had in the dictionary that was saved: ("model", name), ("optim", ...)."""
    nested: dict[str, Any] = {}
    homes: dict[Tensor, Stored] = {}
    for stored in read_directory(path):
        if stored.dtype is None or not stored.size or any(_is_extra_state(str(atom)) for atom in stored.path):
            try:
                _place(nested, stored.path, stored.read())
            except NotPlain as error:
                if stored.path[0] in (*_MODEL_KEYS, *_OPTIMIZER_KEYS):
                    raise
                warnings.warn(f"left out: {error}", stacklevel=4)
        else:
            value = torch.empty(stored.size, dtype=stored.dtype, device="meta")
            homes[value] = stored
            _place(nested, stored.path, value)
    found = _of_dictionary(_listed(nested), str(path))

    def load(path: str) -> Tensor:
        tensor = found.tensors[path]
        return homes[tensor].read() if tensor in homes else tensor

    found.load = load
    return found


def _place(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for atom in path[:-1]:
        nested = nested.setdefault(atom, {})
        if not isinstance(nested, dict):
            raise ValueError(f"{'.'.join(map(str, path))} lies in what is no dictionary.")
    nested[path[-1]] = value


def _listed(value: Any) -> Any:
    """Dictionaries whose keys are 0, 1, ... are the lists that they were made of."""
    if not isinstance(value, dict):
        return value
    items = {key: _listed(item) for key, item in value.items()}
    if items and all(isinstance(key, int) for key in items) and sorted(items) == list(range(len(items))):
        return [items[number] for number in range(len(items))]
    return items
