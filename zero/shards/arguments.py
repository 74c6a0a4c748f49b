"""What users pass, looked at while nothing is changed yet: parameter groups, converted to torch's form and described
for comparing ranks; and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero.measure.param_groups import alike_options, options
from zero.shards.shapes import refuse_shared, refuse_unusable
from zero.tensor_parallel import parts


def as_groups(
    params: Iterable[Any], seen: set[nn.Parameter] | None = None, *, call: str = "OSS"
) -> list[dict[str, Any]]:
    """Returns parameter groups in torch's form. Raises ValueError if they cannot be used. call: to what the user gave
    them."""
    _refuse_unordered(call, params, one=False)
    given: list[Any] = list(params)
    in_dicts = [isinstance(entry, dict) for entry in given]
    if any(in_dicts) and not all(in_dicts):
        raise ValueError(
            f"{call} was given parameters and groups (dicts) in one list. Pass either the one or the other."
        )
    groups: list[dict[str, Any]] = given if any(in_dicts) else [{"params": given}]
    for position, group in enumerate(groups):
        _refuse_unordered(f"group {position}", group.get("params", ()))
    given_in = [group.get("params") for group in groups]
    listed = [[params] if isinstance(params, Tensor) else list(params or ()) for params in given_in]
    groups = [{**group, "params": params} for group, params in zip(groups, listed, strict=True)]
    if any("param_names" in group or isinstance(entry, tuple) for group in groups for entry in group["params"][:1]):
        # torch has all groups named or none, and an empty one shows no names.
        groups = [group if group["params"] else {**group, "param_names": []} for group in groups]
    seen = set(seen or ())
    found: dict[nn.Parameter, str] = {}
    for position, group in enumerate(groups):
        for index, entry in enumerate(group["params"]):
            named = isinstance(entry, tuple)
            param = entry[1] if named else entry
            name = repr(entry[0]) if named else f"parameter {index} of group {position}"
            refuse_unusable(param, name)
            if param in found or param in seen:
                raise ValueError(
                    f"{name} was given before{f' as {found[param]}' if param in found else ''}: each parameter must "
                    "be in exactly one group, once. Tied weights are one parameter; model.parameters() lists it once."
                )
            found[param] = name
    if not found:
        raise ValueError(
            f"{call} was given no parameters. Pass model.parameters() (a generator is used up after one pass)."
        )
    refuse_shared((name, param) for param, name in found.items())
    return groups


def _refuse_unordered(given_to: str, params: object, *, one: bool = True) -> None:
    """Raises ValueError where the order may differ between ranks, as that of a set does. one: whether a tensor alone
    stands for a list of it."""
    if (
        isinstance(params, (set, frozenset))
        or not isinstance(params, Iterable)
        or (isinstance(params, Tensor) and not one)
    ):
        raise ValueError(
            f"{given_to} was given a {type(params).__name__} for parameters. Pass an iterable that has an order, such "
            "as model.parameters()."
        )


def describe(groups: Sequence[dict[str, Any]], names: Mapping[Any, str] | None = None) -> list[str]:
    """The signature of the groups: what must be the same on every rank. names: of parameters, in place of their own."""
    lines = []
    if names is not None:
        named = [
            [(names.get(param, "a parameter of no model"), param) for param in parameters_in(group)] for group in groups
        ]
        groups = [{**group, "params": params} for group, params in zip(groups, named, strict=True)]
    for position, group in enumerate(groups):
        lines.append(f"group {position} with {alike_options(options(group))}")
        for name, param in _named(group, position):
            if isinstance(param, Tensor):
                kind = "trained" if param.requires_grad else "frozen"
                lines.append(f"{name}: {str(param.dtype).removeprefix('torch.')} {list(param.shape)}, {kind}")
    return lines


def _named(group: dict[str, Any], position: int) -> Iterator[tuple[str, Any]]:
    for index, entry in enumerate(group["params"]):
        yield entry if isinstance(entry, tuple) else (f"parameter {index} of group {position}", entry)


def named_params(groups: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the parameters of groups that `as_groups` returned, with their names."""
    for position, group in enumerate(groups):
        yield from _named(group, position)


def parts_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups with what is sharded in place of the user's parameters (zero/tensor_parallel)."""

    def part(entry: Any) -> Any:
        return (entry[0], parts.of(entry[1])) if isinstance(entry, tuple) else parts.of(entry)

    return [{**group, "params": [*map(part, group["params"])]} for group in groups]


def parameters_in(group: dict[str, Any]) -> list[Any]:
    return [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]


def devices_of(groups: list[dict[str, Any]]) -> list[torch.device]:
    """The devices of the parameters, each once."""
    params = [param for group in groups for param in parameters_in(group)]
    return [*{param.device: None for param in params if isinstance(param, Tensor)}]


def refuse_two_devices(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError if trained parameters are on several devices."""
    # autograd runs a thread for each device, so ranks might launch their operations in different orders.
    devices: dict[torch.device, str] = {}
    for name, param in named:
        if param.requires_grad and not param.is_meta:
            devices.setdefault(param.device, name)
    if len(devices) < 2:
        return
    (device, name), (other, further), *_ = devices.items()
    raise ValueError(
        f"{name!r} is on {device}, but {further!r} on {other}: parameters that are trained at stages 2 and 3 must be "
        "on one device. Move the model there by model.to(device), or train at stage 1."
    )


def names(group: dict[str, Any]) -> list[str]:
    return group.get("param_names") or [
        f"parameter {i} of shape {list(p.shape)}" for i, p in enumerate(group["params"])
    ]
