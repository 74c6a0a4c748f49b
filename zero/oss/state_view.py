"""What `optimizer.state` is for an OSS: the inner optimizer's state, by the user's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero.shards.owned_shards import OwnedShards

State = dict[str, Any]


class StateView(MutableMapping[nn.Parameter, State]):
    """Reads and writes the state of the inner optimizer, which has that of this rank's shards. A parameter of which
    this rank owns nothing has an empty entry once it was stepped.

    As with torch's optimizers, reading the entry of a parameter that has none makes an empty one. Raises KeyError for
    what is no parameter of the optimizer.
    """

    def __init__(self, inner: Optimizer, shards: OwnedShards) -> None:
        self._inner, self._shards = inner, shards
        # The entries of parameters of which this rank owns nothing.
        self._elsewhere: dict[nn.Parameter, State] = {}

    def note_stepped(self, params: Iterable[nn.Parameter]) -> None:
        """Makes the entries of parameters that were stepped, and of which this rank owns nothing."""
        for param in params:
            if not self._shards.owns(param):
                self._elsewhere.setdefault(param, {})

    def _held_in(self, param: nn.Parameter) -> tuple[MutableMapping[Any, State], nn.Parameter]:
        return (self._inner.state, self._shards[param]) if self._shards.owns(param) else (self._elsewhere, param)

    def __getitem__(self, param: nn.Parameter) -> State:
        held, key = self._held_in(param)
        return held.setdefault(key, {})

    def __setitem__(self, param: nn.Parameter, state: State) -> None:
        """state: tensors have the shape of the shard, or of the full parameter, which are cut."""
        held, key = self._held_in(param)
        own = self._shards.owns(param)
        held[key] = {name: self._shards.cut_to_shard(param, value) for name, value in state.items()} if own else {}

    def __delitem__(self, param: nn.Parameter) -> None:
        held, key = self._held_in(param)
        del held[key]

    def __contains__(self, param: object) -> bool:
        if not isinstance(param, Tensor) or param not in self._shards:
            return False
        held, key = self._held_in(param)  # type: ignore[arg-type]
        return key in held

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param for param in self._shards if param in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def replace(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Takes over the entries of another mapping, in place of its own."""
        entries = {**state}
        self.clear()
        for param, values in entries.items():
            self[param] = {**values}
