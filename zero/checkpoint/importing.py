"""Checkpoints of other libraries, made into one of zero's.

Read are plain files of torch.save, safetensors and torch's distributed checkpoints. Nothing is unpickled but by
torch.load(weights_only=True). The pickle in torch's distributed checkpoints is not loaded either
(torch_distributed.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero._torch import load_plain_values, name_without_compile, warn_user
from zero.checkpoint import directory
from zero.checkpoint.files import SafeFile
from zero.checkpoint.format import Index, OptimizerIndex, is_extra_state, tensor_problem
from zero.checkpoint.rank_files import SavePlan, seal, write_rank_file
from zero.checkpoint.shards import Held, whole
from zero.checkpoint.storage import Local, mounted, place
from zero.checkpoint.torch_distributed import METADATA, read_nested
from zero.checkpoint.values import encode

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optim", "optimizer", "optimizer_state_dict", "optim_state_dict")
_MASTER = "master/"
_WRAPPER = "module."


def import_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path | str:
    """Makes a checkpoint in the run's directory `path` of another library's. Returns its path, or its URL.

    source: a file of torch.save (read with weights_only=True): a state_dict, or a dictionary of one ("model",
        "state_dict") and perhaps the optimizer's ("optim", "optimizer") and values, which become `extra`; a safetensors
        file, or a directory of them; or the directory of a torch distributed checkpoint. The dictionary may itself be
        an entry of another, such as "app" in PyTorch's tutorial; the other entries become `extra`.

    An optimizer that knows its parameters by number only is taken to have been built from model.parameters(). A warning
    says so where the shapes cannot confirm it.

    Masters are imported if they round to the imported parameters. Others are out of date: an optimizer that does not
    know them has carried them along. One tensor is in memory at a time, or a master and its parameter.
    Raises ValueError for any other file or directory.
    """
    given = mounted(source, "what is imported")
    if given.is_dir() and (given / METADATA).is_file():
        found = _found_in(*read_nested(given, {*MODEL_KEYS, *OPTIMIZER_KEYS}), str(given))
    elif given.is_dir() or given.suffix == ".safetensors":
        found = _read_safetensors(given)
    elif given.is_file():
        found = _found_in(_loaded(given), {}, str(given))
    else:
        raise ValueError(f"{given} is not there.")
    for stored_at, tensor in found.tensors.items():
        if problem := tensor_problem(tensor.new_empty(0, device="cpu") if tensor in found.readers else tensor):
            raise ValueError(f"{stored_at} {problem}.")
    _remove_outdated_masters(found)
    held: list[Held] = [_Foreign(**vars(whole(path, tensor)), found=found) for path, tensor in found.tensors.items()]
    folder = directory.begin(place(path))
    try:
        write_rank_file(folder, 0, SavePlan(found.index, held), shown=True)
        return seal(folder, found.index, keep=None).public
    except BaseException:
        folder.remove()
        raise


@dataclass
class _Found:
    """What a foreign checkpoint holds.

    tensors: by path. readers: how to read the values of those that are on the meta device.
    index: of all that is no tensor.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    readers: dict[Tensor, Callable[[], Tensor]] = field(default_factory=dict)
    index: Index = field(default_factory=lambda: Index(None, 1))

    def value(self, path: str) -> Tensor:
        tensor = self.tensors[path]
        return self.readers[tensor]() if tensor in self.readers else tensor.detach()


@dataclass(frozen=True, kw_only=True)
class _Foreign(Held):
    """A tensor whose values are read when it is written."""

    found: _Found

    def flat(self) -> Tensor:
        return self.full.flat(self.found.value(self.name))


def _remove_outdated_masters(found: _Found) -> None:
    for path in [path for path in found.tensors if path.startswith(_MASTER)]:
        name = path.removeprefix(_MASTER)
        param_path = f"model/{found.index.tied.get(name, name)}"
        if param_path in found.tensors:
            param = found.value(param_path)
            if torch.equal(found.value(path).to(param.dtype), param):
                continue
        del found.tensors[path]


def _read_safetensors(path: Path) -> _Found:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has neither safetensors files nor the .metadata of a torch distributed checkpoint.")
    file_of: dict[str, Path] = {}
    found = _Found()
    for one in files:
        with SafeFile(Local(one)) as file:
            for key, (dtype, shape, _) in file.tensors.items():
                if key in file_of:
                    raise ValueError(f"{key!r} is in {file_of[key]} and in {one}: give one model's files only.")
                file_of[key] = one
                if is_extra_state(key):
                    found.index.values[key] = encode(_read_tensor(one, key), key)
                else:
                    tensor = found.tensors[f"model/{key}"] = torch.empty(shape, dtype=dtype, device="meta")
                    found.readers[tensor] = partial(_read_tensor, one, key)
    _refuse_missing(path, file_of)
    return found


def _read_tensor(path: Path, key: str) -> Tensor:
    with SafeFile(Local(path)) as file:
        dtype, shape, low = file.tensors[key]
        flat = torch.empty(torch.Size(shape).numel(), dtype=dtype, device="cpu")
        file.check([(low, low + flat.nbytes)], lambda _: None)
        file.read(flat, low)
        return flat.view(shape)


def _refuse_missing(path: Path, file_of: dict[str, Path]) -> None:
    """Raises ValueError where a tensor is not in the file that Hugging Face's index of shards names for it."""
    for index in path.glob("*.safetensors.index.json"):
        try:
            wanted = {key: path / str(name) for key, name in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files, or it is incomplete ({error!r}).") from None
        for key, file in wanted.items():
            if file_of.get(key) != file:
                lacks = f"has no {key!r}" if file.exists() else "is not there"
                raise ValueError(f"{file} {lacks}, but {index.name} names it. Bring the whole model there.")


def _loaded(path: Path) -> Any:
    try:
        return load_plain_values(path)
    except Exception as error:
        raise ValueError(
            f"{path} is no file of torch.save that holds weights and plain values only, and was not read ({error})."
        ) from None


def _found_in(loaded: Any, readers: dict[Tensor, Callable[[], Tensor]], where: str) -> _Found:
    """What a state_dict, or a dictionary of several, holds. where: the file, for errors."""
    if not isinstance(loaded, dict):
        raise ValueError(f"{where} holds a {type(loaded).__name__}, not a state_dict or a dictionary of them.")
    loaded = _opened(loaded)
    model_key = next((key for key in MODEL_KEYS if isinstance(loaded.get(key), dict)), None)
    weights = loaded if model_key is None else loaded[model_key]
    unknown = [
        name
        for name, value in weights.items()
        if not isinstance(name, str) or not (isinstance(value, Tensor) or is_extra_state(name))
    ]
    if unknown or not weights:
        what = f"{unknown[0]!r}, which is no name of a tensor" if unknown else "nothing"
        raise ValueError(f"{where} holds {what}. Expected a state_dict, or one under {' or '.join(MODEL_KEYS)}.")
    found = _Found(readers=readers)
    _take_model(found, weights, where)
    optimizer_key = next((key for key in OPTIMIZER_KEYS if isinstance(loaded.get(key), dict)), None)
    if model_key is not None and optimizer_key is not None:
        _take_optimizer(found, loaded[optimizer_key], where)
    for key, value in loaded.items() if model_key is not None else ():
        if key not in (model_key, optimizer_key):
            try:
                found.index.extra[str(key)] = encode(value, f"{key!r} of {where}")
            except ValueError as error:
                warn_user(f"left out: {error}")
    return found


def _opened(loaded: dict[Any, Any]) -> dict[Any, Any]:
    """The dictionary, with the entries of the one dictionary in it that holds the weights, as a Stateful saves them."""
    within = [key for key, value in loaded.items() if isinstance(value, dict) and _holds_weights(value)]
    if _holds_weights(loaded) or len(within) != 1:
        return loaded
    return {**{key: value for key, value in loaded.items() if key != within[0]}, **loaded[within[0]]}


def _holds_weights(saved: dict[Any, Any]) -> bool:
    return any(isinstance(saved.get(key), dict) for key in MODEL_KEYS)


def _take_model(found: _Found, weights: dict[str, Any], where: str) -> None:
    weights = {name_without_compile(name): value for name, value in weights.items()}
    wrapped = all(name.startswith(_WRAPPER) for name in weights)  # saved through DistributedDataParallel
    seen: dict[tuple[Any, ...], str] = {}
    for given, value in weights.items():
        name = given.removeprefix(_WRAPPER) if wrapped else given
        if is_extra_state(name):
            found.index.values[name] = encode(value, f"{name!r} of {where}")
            continue
        if value.numel() and tensor_problem(value) is None:  # others have no memory to share, or are refused
            same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if same in seen:
                found.index.tied[name] = seen[same]
                continue
            seen[same] = name
        found.tensors[f"model/{name}"] = value


def _take_optimizer(found: _Found, saved: dict[str, Any], where: str) -> None:
    saved_groups, saved_state = _groups_and_state(saved, where)
    name_of = _parameter_names(saved_groups, saved_state, found, where)
    index = OptimizerIndex("", [])
    for group in saved_groups:
        given = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        encoded = {key: encode(value, f"option {key!r}") for key, value in given.items()}
        index.groups.append({"params": [name_of[param] for param in group["params"]], "options": encoded})
    for param, state in saved_state.items():
        name = name_of[param]
        for key, value in state.items():
            path = f"optimizer/0/{name}/{key}"
            if isinstance(value, Tensor) and key == "master":
                found.tensors[_MASTER + name] = value
            elif isinstance(value, Tensor) and value.dim():
                found.tensors[path] = value
            else:
                index.values.setdefault(name, {})[key] = encode(value, path)
    found.index.optimizers.append(index)


def _groups_and_state(saved: dict[str, Any], where: str) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """An optimizer's groups, and its state by the groups' keys of parameters. Raises ValueError for anything else."""
    # torch's distributed checkpoints leave out what is empty, and make strings of a dictionary's keys: of numbers too.
    groups, state = saved.get("param_groups"), saved.get("state", {})
    if isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups):
        params = {str(param): param for group in groups for param in group["params"]}
        if isinstance(state, dict) and all(str(key) in params and isinstance(state[key], dict) for key in state):
            return groups, {params[str(key)]: entries for key, entries in state.items()}
    raise ValueError(
        f"the optimizer in {where} is not what an optimizer's state_dict() returns. Expected 'param_groups', each with "
        "'params', and 'state' of these."
    )


def _parameter_names(
    groups: list[dict[str, Any]], state: dict[Any, dict[str, Any]], found: _Found, where: str
) -> dict[Any, str]:
    """The names of an optimizer's parameters. Plain state_dicts have them if the optimizer was built with names."""
    params = [param for group in groups for param in group["params"]]
    given = [name for group in groups for name in group.get("param_names", ())]
    if all(isinstance(param, str) for param in params):
        given = params
    if len(given) == len(params):
        return {param: _name_in_model(found, name) for param, name in zip(params, given, strict=True)}
    names = [path.removeprefix("model/") for path in found.tensors]
    if len(names) == len(params):
        shapes = {param: found.tensors[f"model/{name}"].shape for param, name in zip(params, names, strict=True)}
        shapes_of_state = {
            param: {value.shape for value in entries.values() if isinstance(value, Tensor) and value.dim()}
            for param, entries in state.items()
        }
        if all(some <= {shapes[param]} for param, some in shapes_of_state.items()):
            confirmed = all(map(shapes_of_state.get, params)) and len({*shapes.values()}) == len(params)
            if not confirmed and (state or len(groups) > 1):
                warn_user(
                    f"the optimizer in {where} numbers its parameters, and their shapes do not distinguish them: it is "
                    "taken to have been built from model.parameters(), in the model's order. If it was not, state goes "
                    "to the wrong parameters: build the optimizer again as it was, but from (name, parameter) pairs as "
                    "named_parameters() yields them, load its state_dict, save it again, now with names, and import "
                    "that."
                )
            return dict(zip(params, names, strict=True))
    raise ValueError(
        f"the optimizer in {where} numbers its {len(params)} parameters, and these cannot be matched with the model's "
        f"{len(names)} tensors by order and shape. Save it from an optimizer that was built with "
        "model.named_parameters()."
    )


def _name_in_model(found: _Found, name: str) -> str:
    """The model's name of a parameter that the optimizer may name through a wrapper, or by a tied name."""
    own = name_without_compile(name)
    for known in (own, own.removeprefix(_WRAPPER)):
        stored = found.index.tied.get(known, known)
        if f"model/{stored}" in found.tensors:
            return stored
    return own
