"""What state_dict() of a wrapper returns: weights that are found under their names with and without `module.`, which
DistributedDataParallel puts before them. Those that are copies of shards refuse writes (zero/shards/read_only.py)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from zero._torch.compiling import versions_in, with_versions


class Weights(OrderedDict[str, Any]):
    """A state dict. Pickled and copied it is torch's own, which needs no `zero` to be loaded."""

    def __missing__(self, name: Any) -> Any:
        if name in self:
            return self[name.removeprefix("module.")]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        own = super().__contains__
        return own(name) or (isinstance(name, str) and name.startswith("module.") and own(name.removeprefix("module.")))

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (which would call this)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_versions(OrderedDict(self), versions_in(self)).__reduce_ex__(protocol)

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        return with_versions(OrderedDict(self), versions_in(self))


def as_weights(given: Mapping[str, Any]) -> Any:
    """A state dict of torch's as Weights."""
    return with_versions(Weights(given), versions_in(given))


COPIED = (
    "{} writes into a copy that state_dict() of FSDP has made, and would not reach the model. Write into the "
    "parameters in place, under torch.no_grad(): for name, param in model.named_parameters(); buffers likewise. To "
    "keep a changed copy, clone() it first."
)
"""Of a weight in a state dict."""
