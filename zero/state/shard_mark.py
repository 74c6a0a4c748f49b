"""The mark of a state_dict() that is one rank's shard, so that no other rank loads it, and none saves it unawares.

It is in each group, state_dict["param_groups"][i]["zero_shard"], at every stage: any optimizer that loads it gets the
mark, too, also one that does not know of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from zero._torch.optimizers import takes_state_hooks
from zero._torch.telling import warn_user
from zero.measure.param_groups import SHARD_MARK


class ShardMark(frozenset[str]):
    """Names the shard: rank, ranks and layout; one text for each OSS or FSDP.

    Pickling it warns: torch.save on one rank alone loses the other shards, which otherwise shows only when the state is
    loaded. The pickle holds a plain set, which torch.load(weights_only=True) reads.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        warn_user(
            f"this state_dict() is only one rank's shard of the optimizer's state ({', '.join(sorted(self))}), and no "
            "other rank can load it. To save the full state, save what zero.full_optimizer_state_dict(model, "
            "optimizer) returns, which every rank calls; or call zero.checkpoint.save(). If every rank saves its own "
            "shard in a file of its own, ignore this warning."
        )
        return set, (sorted(self),)

    def __copy__(self) -> ShardMark:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardMark:
        return self


class ShardedState(dict[Any, Any]):
    """The "state" of a state_dict() that is one rank's shard, by numbers of parameters.

    torch.distributed.checkpoint.state_dict gives them names, and saves what one rank has: that is refused, on each
    rank that has state of any parameter. Copies and pickles are plain dictionaries.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str):
            raise RuntimeError(
                "torch.distributed.checkpoint.state_dict would take this rank's shard of the optimizer's state for the "
                f"full state of {key!r}. Call zero.full_optimizer_state_dict(model, optimizer) and "
                "zero.load_full_optimizer_state_dict(model, optimizer, state), or zero.checkpoint.save and load."
            )
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # a class that torch.load(weights_only=True) reads


def texts_of(mark: Iterable[str] | None) -> set[str]:
    """The texts of a mark, also of one that was loaded; none for a full state."""
    return {*(mark or ())}


def marks_of(state_dict: Mapping[str, Any]) -> set[str]:
    """The texts of all marks in a state_dict(); none for a full state."""
    return {text for group in state_dict["param_groups"] for text in texts_of(group.get(SHARD_MARK))}


def mark(state_dict: dict[str, Any], text: str) -> None:
    """Marks the state as the shard of which `text` says which one it is."""
    made = ShardMark([*marks_of(state_dict), text])  # one, which warns once
    for group in state_dict["param_groups"]:
        group[SHARD_MARK] = made
    state_dict["state"] = ShardedState(state_dict["state"])


def refuse_shards(optimizer: Optimizer) -> None:
    """Makes the optimizer, which steps full parameters, refuse a shard in load_state_dict()."""
    if takes_state_hooks(optimizer):
        optimizer.register_load_state_dict_pre_hook(_refuse_shard)


def _refuse_shard(_: Optimizer, state_dict: Mapping[str, Any]) -> None:
    if found := marks_of(state_dict):
        raise ValueError(
            f"the state is one rank's shard ({', '.join(sorted(found))}), but this optimizer steps full parameters. "
            "Load full state, such as zero.full_optimizer_state_dict returns."
        )
