"""What `optimizer.state` is for an OSS: the inner optimizer's state, by the user's parameters; and the mark that says
which rank's shard a state_dict() is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any
from weakref import ReferenceType

from torch import nn
from torch.optim import Optimizer

from zero._torch.optimizers import takes_state_hooks
from zero.measure.kinds import SINGLE
from zero.shards.owned_shards import OwnedShards
from zero.shards.sharded_parameter import mark_held, plain_state, unmark_all
from zero.state import optimizer_state as state
from zero.state.shard_mark import mark

State = dict[str, Any]


class StateView(MutableMapping[nn.Parameter, State]):
    """Reads and writes the state of the inner optimizer, which has that of this rank's shards.

    Once any of it was read, tensors of a shard's shape answer as full ones (sharded_parameter.py) until the next step.
    As with torch's optimizers, reading the entry of a parameter that has none makes an empty one. Raises KeyError for
    what is no parameter of the optimizer.
    """

    def __init__(self, inner: Optimizer, shards: OwnedShards) -> None:
        self._inner, self._shards, self._answers = inner, shards, False

    def show(self) -> None:
        """Has it answer as full state."""
        if not self._answers:
            self._answers, state, shards = True, self._inner.state, self._shards
            several = [group for group in shards.shard_groups if group.layout.world > 1]
            cuts = [pair for group in several for pair in zip(group.params, group.cuts, strict=True)]
            held = [(shards[param], cut, state[shards[param]]) for param, cut in cuts if shards[param] in state]
            mark_held(held, type(self._inner))

    def hide(self) -> None:
        """Has it be plain again, as the inner optimizer needs it. What was assigned in full is cut."""
        if self._answers:
            self._answers, state = False, self._inner.state
            unmark_all(state.values())
            for param, shard in self._shards.items():
                entry, cut = state.get(shard, {}), partial(self._shards.cut_to_shard, param)
                entry.update({key: cut(value) for key, value in entry.items() if key not in SINGLE})

    def __getitem__(self, param: nn.Parameter) -> State:
        self._shards.place(param)  # raises
        self.show()
        entry: State = self._inner.state.setdefault(self._shards[param], {})
        return entry

    def __setitem__(self, param: nn.Parameter, state: State) -> None:
        """state: tensors have the shape of the shard, or of the full parameter, which are cut."""
        own = {name: self._shards.cut_to_shard(param, value) for name, value in state.items()}
        self.hide()
        unmark_all([own])
        self._inner.state[self._shards[param]] = own

    def __delitem__(self, param: nn.Parameter) -> None:
        del self._inner.state[self._shards[param]]

    def __contains__(self, param: object) -> bool:
        return isinstance(param, nn.Parameter) and self._shards.get(param) in self._inner.state

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


def mark_shards(inner: Optimizer, of: ReferenceType[Any]) -> None:
    """Has the state_dict() of the optimizer inside of an OSS say which shard it is: no other rank must load it."""

    def marked(_: Optimizer, state_dict: dict[str, Any]) -> None:
        outer = of()
        if outer is not None and outer.comm.world > 1:
            state_dict["state"] = {number: plain_state(of_one) for number, of_one in state_dict["state"].items()}
            mark(state_dict, state.fingerprint(outer.stepped_shards))

    if takes_state_hooks(inner):
        inner.register_state_dict_post_hook(marked)
