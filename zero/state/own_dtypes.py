"""State in a dtype of its own, such as moments in 16 bits of float32 parameters.

torch's `load_state_dict` casts state to the dtype of the parameter, because that of torch's optimizers has it. State of
other optimizers gets the dtype back that it was saved in, if that is the dtype in which the optimizer makes it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero.measure.built import state_made_by
from zero.state import leaves


def keep_dtypes(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """Call it after `optimizer.load_state_dict(loaded)`."""
    for group, given in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        for param, number in zip(group["params"], given["params"], strict=True):
            saved = leaves.opened(loaded["state"].get(number, {}))
            held = leaves.opened(dict(optimizer.state.get(param, {})))
            cast = [key for key, value in held.items() if _differ(value, saved.get(key))]
            made = leaves.opened(state_made_by(optimizer, group, param.dtype)) if cast else {}
            kept = [key for key in cast if isinstance(made.get(key), Tensor) and made[key].dtype == saved[key].dtype]
            if kept:
                own = {key: saved[key].to(held[key].device) for key in kept}
                optimizer.state[param].update(leaves.closed({**held, **own}))


def _differ(one: object, other: object) -> bool:
    """Whether they are tensors of two dtypes. A number that became a tensor was converted by the optimizer's class."""
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype != other.dtype
