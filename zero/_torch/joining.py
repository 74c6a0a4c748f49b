"""torch.distributed.algorithms.join: what it joins can be read only from private attributes."""

from __future__ import annotations

import gc
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel


def join_mark(joinable: Joinable) -> Any:
    """How a Join last marked the object: `enable`, whether it may end early; `is_first_joinable`. Stays afterwards."""
    return joinable._join_config


def living_joins_of(joinable: Joinable) -> list[Join]:
    """The Joins that the object is in. Goes through every object of the process."""
    joins = [one for one in gc.get_objects() if type(one) is Join]
    return [one for one in joins if any(joinable is other for other in one._joinables)]


def averaged_by(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters whose gradients DistributedDataParallel averages: those of its module when it was built."""
    return list(ddp._module_parameters)


def divides_by_ranks_with_data(model: nn.Module | None) -> bool:
    """Whether DistributedDataParallel does so, as after Join(divide_by_initial_world_size=False)."""
    return not getattr(model, "_divide_by_initial_world_size", True)
