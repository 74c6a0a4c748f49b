"""Plain state_dicts of a model and its optimizer, taken apart into what an index names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zero._torch import name_without_compile
from zero.checkpoint.format import Index, OptimizerIndex, tensor_problem
from zero.checkpoint.values import encode

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optim", "optimizer", "optimizer_state_dict", "optim_state_dict")
MASTER = "master/"
_WRAPPER = "module."
_EXTRA_STATE = "_extra_state"


@dataclass
class Found:
    """What a foreign checkpoint holds.

    tensors: by path; they may be on the meta device, and `load` then reads the values of a path.
    index: of all that is no tensor.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    index: Index = field(default_factory=lambda: Index(None, 1))
    load: Callable[[str], Tensor] | None = None

    def value(self, path: str) -> Tensor:
        return self.tensors[path].detach() if self.load is None else self.load(path)


def found_in(loaded: dict[str, Any], where: str) -> Found:
    """What a state_dict, or a dictionary of several, holds. where: the file, for errors.

    Raises ValueError for other dictionaries.
    """
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
    found = Found()
    _take_model(found, weights, where)
    optimizer_key = next((key for key in OPTIMIZER_KEYS if isinstance(loaded.get(key), dict)), None)
    if model_key is not None and optimizer_key is not None:
        _take_optimizer(found, loaded[optimizer_key], where)
    for key, value in loaded.items() if model_key is not None else ():
        if key not in (model_key, optimizer_key):
            try:
                found.index.extra[str(key)] = encode(value, f"{key!r} of {where}")
            except ValueError as error:
                warnings.warn(f"left out: {error}", stacklevel=4)
    return found


def is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def _take_model(found: Found, weights: dict[str, Any], where: str) -> None:
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


# ---------------------------------------------------------------------------------------------------------- optimizer


def _take_optimizer(found: Found, saved: dict[str, Any], where: str) -> None:
    """Takes an optimizer's plain state_dict, by number or by name."""
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
                found.tensors[MASTER + name] = value
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
    groups: list[dict[str, Any]], state: dict[Any, dict[str, Any]], found: Found, where: str
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
                warnings.warn(
                    f"the optimizer in {where} numbers its parameters, and their shapes do not distinguish them: it is "
                    "taken to have been built from model.parameters(), in the model's order. If it was not, state goes "
                    "to the wrong parameters: build the optimizer again as it was, but from (name, parameter) pairs as "
                    "named_parameters() yields them, load its state_dict, save it again, now with names, and import "
                    "that.",
                    stacklevel=6,
                )
            return dict(zip(params, names, strict=True))
    raise ValueError(
        f"the optimizer in {where} numbers its {len(params)} parameters, and these cannot be matched with the model's "
        f"{len(names)} tensors by order and shape. Save it from an optimizer that was built with "
        "model.named_parameters()."
    )


def _name_in_model(found: Found, name: str) -> str:
    """The model's name of a parameter that the optimizer may name through a wrapper, or by a tied name."""
    own = name_without_compile(name)
    for known in (own, own.removeprefix(_WRAPPER)):
        stored = found.index.tied.get(known, known)
        if f"model/{stored}" in found.tensors:
            return stored
    return own
