"""The kind of an optimizer that the user has built, and other optimizers that work with it."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from zero.measure.kinds import Finding, _assumed, finding_of, known, narrow_among
from zero.measure.param_groups import Alike, called, nearest, options, params_of
from zero.measure.probe import single_step, undisturbed


def finding_of_built(optimizer: Optimizer, group: dict[str, Any] | None = None) -> Finding:
    """The kind of an optimizer, measured on another like it. group: of which it is asked; by default the worst."""
    found = known(type(optimizer))
    if found is not None:
        return found
    groups = [options(one) for one in (optimizer.param_groups if group is None else [group])]
    return finding_of(_alike(optimizer), None, groups, narrow_among(params_of(optimizer)))


def state_made_by(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, *, of_torchs: bool = False
) -> dict[str, Any]:
    """The state that the first step makes for a matrix of this dtype; empty where it cannot be measured, and for
    torch's own optimizers, whose state has the dtype of the parameter, unless asked for."""
    if known(type(optimizer)) is not None and not of_torchs:
        return {}
    return single_step(_alike(optimizer), options(group), dtype)[1]


def _alike(optimizer: Optimizer) -> Callable[..., Optimizer]:
    """Builds optimizers like this one, by copying it; or, where it keeps something of its parameters or what cannot be
    copied, by its constructor, from the arguments that it keeps."""
    alike, kind = Alike(optimizer), cast("Callable[..., Optimizer]", type(optimizer))
    if alike.has_tensors is None:
        with suppress(Exception):
            alike([])
            return alike
    kept = {**{name.lstrip("_"): value for name, value in vars(optimizer).items()}, **optimizer.defaults}
    names = [name for name in argument_names(type(optimizer)) if name in kept]
    given = {name: _alike(one) if isinstance(one := kept[name], Optimizer) else one for name in names}
    inner = kept.get(next(iter(inspect.signature(type(optimizer)).parameters)))
    if not isinstance(inner, Optimizer):
        return partial(kind, **given)
    return lambda groups: kind(_alike(inner)(groups), **deepcopy(given))


def refuse_arguments(optim: Any, given: Iterable[str], own: Iterable[str]) -> None:
    """Raises ValueError for an option that an optimizer does not take. own: what the caller takes beside it."""
    while isinstance(optim, partial):
        optim, given = optim.func, [*given, *optim.keywords]
    try:
        known = [*argument_names(optim)] if isinstance(optim, type) else [*inspect.signature(optim).parameters][1:]
        inspect.signature(optim).bind(None, **dict.fromkeys(given))
    except TypeError:
        unknown = next((name for name in sorted(given) if name not in known), None)
    except ValueError:  # it has no signature
        return
    else:
        return
    if unknown is not None:
        near = nearest(unknown, [*own, *known]) or f" It takes {', '.join(known)}."
        raise ValueError(f"{called(optim)} has no option {unknown}=.{near}")


def refuse_unbuilt(optim: Callable[..., Optimizer], groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Raises ValueError if an optimizer cannot be built of these groups, of which it keeps nothing."""

    def of_one(given: Any) -> Any:
        if isinstance(given, tuple):
            return given[0], of_one(given[1])
        kept = torch.empty((1,) * given.dim(), dtype=given.dtype, device="cpu" if given.is_meta else given.device)
        return nn.Parameter(kept, given.requires_grad)

    # torch's own gets parameters of one element in place of these, alike in all else that it looks at.
    of = of_one if known(optim) is not None else lambda given: given
    groups = [{**group, "params": [*map(of, group["params"])]} for group in groups]
    with undisturbed() as collectives:
        try:
            optim(groups, **defaults)
        except Exception as error:
            if not collectives.called:
                problem = f"{called(optim)} could not be built: {type(error).__name__}: {error}"
                raise ValueError(problem) from None


def argument_names(kind: type[Optimizer]) -> Iterator[str]:
    """The names of the constructor's arguments after the parameters, also of base classes that get **kwargs."""
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        arguments = [*inspect.signature(vars(base)["__init__"]).parameters.values()]
        named = [one for one in arguments[2:] if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        yield from [one.name for one in named]  # but self and the parameters
        if not any(one.kind is one.VAR_KEYWORD for one in arguments):
            return


def around(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Other optimizers with this one's groups. No hook of torch shows what they do besides its step. Takes 70 ms with
    300,000 objects in the process, and is left out in a rehearsal."""
    for each in () if _assumed else gc.get_objects():
        if issubclass(type(each), Optimizer) and each is not optimizer:
            groups = vars(each).get("param_groups", ())
            if any(one is other for one in groups for other in optimizer.param_groups):
                yield each
