"""The mark of a state_dict() that is one rank's shard, so that no other rank loads it, and none saves it unawares.

OSS         state_dict["zero_shard"]
stage 3     group["zero_shard"] in each of state_dict["param_groups"], as the user's own optimizer writes its
            state_dict() itself; an optimizer that loads it gets the mark, too
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero._torch import warn_user


class ShardMark(frozenset[str]):
    """Names the shard: rank, ranks and layout; one text for each OSS or FSDP.

    Pickling it warns: torch.save on one rank alone loses the other shards, which otherwise shows only when the state is
    loaded. The pickle holds a plain set, which torch.load(weights_only=True) reads.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        warn_user(
            f"this state_dict() is only one rank's shard of the optimizer's state ({', '.join(sorted(self))}), and no "
            "other rank can load it. To save the full state, call OSS's consolidate_state_dict() on every rank before "
            "state_dict(), or save what FSDP's optim_state_dict(optimizer) returns; or call zero.checkpoint.save(). If "
            "every rank saves its own shard in a file of its own, ignore this warning."
        )
        return set, (sorted(self),)

    def __copy__(self) -> ShardMark:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardMark:
        return self


def texts_of(mark: str | Iterable[str] | None) -> set[str]:
    """The texts of a mark, also of one that was loaded; none for a full state. Earlier versions saved one text."""
    return {mark} if isinstance(mark, str) else {*(mark or ())}
