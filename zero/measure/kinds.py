"""Which optimizers may be sharded, and how: known for torch's own; others are measured, once a class and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.measure.param_groups import Alike, called, described_options, opaque
from zero.measure.probe import Finding as Finding
from zero.measure.probe import Kind as Kind
from zero.measure.probe import probe, single_step

ELEMENTWISE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""torch's optimizers whose step of one element reads no other element: a shard is stepped as in the full parameter."""

SINGLE = frozenset({"step", "mu_product", "eta", "mu"})
"""The entries of their state that are one value a parameter. All other tensors have the parameter's shape."""

# By what is built; then by options, the dtype of narrow parameters, and the identities of what no text describes.
_found: WeakKeyDictionary[Any, dict[tuple[Any, ...], tuple[Finding, list[ReferenceType[Any]]]]] = WeakKeyDictionary()

_assumed: list[Finding] = []


def known(optim: Callable[..., object] | None) -> Finding | None:
    """The kind of torch's own optimizers; None for others. Measures nothing."""
    optim = unwrapped(optim)
    if not isinstance(optim, type):
        return None
    if optim in ELEMENTWISE:
        return Finding(Kind.ELEMENTWISE)
    if optim in (torch.optim.Adafactor, torch.optim.Muon):
        return Finding(Kind.TENSORWISE, "it computes with whole matrices or their rows")
    if issubclass(optim, torch.optim.LBFGS):
        return Finding(Kind.COUPLED, "its directions are made of all parameters")
    return None


def unwrapped(optim: Any) -> Any:
    """The class or function inside a partial, or inside nested ones, or of one that is built."""
    while isinstance(optim, (partial, Alike)):
        optim = optim.func
    return optim


def title(optim: Callable[..., object]) -> str:
    """The optimizer's name in errors, with its module if it is not torch's: several classes are called AdamW."""
    kind = unwrapped(optim)
    module = getattr(kind, "__module__", "")
    return called(kind) if module.split(".")[0] == "torch" else f"{called(kind)} ({module})"


def finding_of(
    optim: Callable[..., Optimizer],
    defaults: Mapping[str, Any] | None = None,
    groups: Sequence[Mapping[str, Any]] = ({},),
    narrow: torch.dtype | None = None,
) -> Finding:
    """The kind of an optimizer that `optim(params, **defaults)` builds. narrow: see narrow_among."""
    given = dict(defaults or {})
    while isinstance(optim, partial) and not optim.args:  # which would take the place of the groups
        given, optim = {**optim.keywords, **given}, optim.func
    found = known(optim)
    if found is not None:
        return found

    def build(groups: list[dict[str, Any]]) -> Optimizer:
        names = [f"parameter{number}.weight" for number in range(len(groups[0]["params"]))]
        return optim([{**groups[0], "param_names": names}], **deepcopy(given))

    if _assumed:
        return _assumed[-1]
    asked = optim.attributes if isinstance(optim, Alike) else given
    try:
        remembered = _found.setdefault(unwrapped(optim), {})
    except TypeError:  # without weak references it is measured each time
        remembered = {}
    each = list[Finding]()
    for group in groups:
        sorts = dict(group)
        for name, value in group.items():  # only the sign of a fraction counts: groups that differ in rates share a key
            if isinstance(value, Tensor) and value.is_floating_point() and not value.dim():
                value = value.item()
            if isinstance(value, float):
                sorts[name] = f"a number, {(value > 0) - (value < 0)}"
        others = opaque([asked, group])  # two functions of one name may do different things
        key = (f"{described_options(asked)}; {described_options(sorts)}", narrow, *map(id, others))
        if key not in remembered or not all(other() is not None for other in remembered[key][1]):
            finding = probe(build, group)
            if narrow and finding.kind is not Kind.COUPLED and single_step(build, group, narrow)[0]:
                reason = f"it draws random numbers, for one {narrow} tensor after another"
                finding = replace(finding, kind=Kind.COUPLED, reason=reason)
            with suppress(TypeError):  # of what has no weak references
                remembered[key] = finding, [ref(other) for other in others]
        else:
            finding = remembered[key][0]
        each.append(finding)
    worst = max(each, key=lambda one: [*Kind].index(one.kind))
    return replace(worst, writes_frozen=any(one.writes_frozen for one in each))


@contextmanager
def assumed(found: Finding) -> Iterator[None]:
    """In this context no optimizer is measured, which would step tensors without values where zero.plan rehearses."""
    _assumed.append(found)
    try:
        yield
    finally:
        _assumed.pop()


def narrow_among(params: Iterable[Tensor]) -> torch.dtype | None:
    """The dtype of parameters that are stepped in fewer bits than float32, if there are any."""
    return next((param.dtype for param in params if param.is_floating_point() and param.itemsize < 4), None)
