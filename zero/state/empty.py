"""The state of empty shards. torch's element-wise optimizers have as many entries there as elsewhere, and take as long
for an empty tensor as for a small one. So of those that were stepped in the same steps one is stepped, and the others
take over what it has: the single values of their state, such as the count of steps, are the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero.measure.kinds import ELEMENTWISE, SINGLE

Led = dict[nn.Parameter, list[nn.Parameter]]
"""By an empty shard that is stepped those that take over its state."""


def led(optimizer: Optimizer, empty: Collection[nn.Parameter]) -> Led:
    """Call it before a step, which is to find no gradients of those that are led. Of optimizers that are not torch's,
    which may divide by the number of elements, nobody leads. empty: the empty shards."""
    if type(optimizer) not in ELEMENTWISE:
        return {}
    found: Led = {}
    for alike in _alike(optimizer, empty, id):
        stepped = [param for param in alike if param.grad is not None]
        if stepped and len(stepped) < len(alike):  # the others keep the values from before
            state = optimizer.state[stepped[0]]
            state.update({key: state[key].clone() for key in SINGLE & state.keys()})
        if stepped:
            found[stepped[0]] = stepped[1:]
    return found


def follow(optimizer: Optimizer, led: Led) -> None:
    """Call it after the step."""
    for leader, others in led.items():
        _share(optimizer, leader, others)


def share(optimizer: Optimizer, empty: Collection[nn.Parameter]) -> None:
    """Call it after a state was loaded: single values that are equal are the same tensors from then on."""
    for first, *others in _alike(optimizer, empty, Tensor.tolist):
        _share(optimizer, first, others)


def _alike(
    optimizer: Optimizer, empty: Collection[nn.Parameter], value: Callable[[Any], Any]
) -> Iterator[list[nn.Parameter]]:
    """The empty shards in the same group, of the same history."""
    for group in optimizer.param_groups:
        found: dict[Any, list[nn.Parameter]] = {}
        for param in group["params"]:
            if param in empty:
                state = optimizer.state.get(param, {})
                history = [(key, value(one)) for key, one in state.items() if key in SINGLE]
                found.setdefault((param.dtype, param.device, len(state), *history), []).append(param)
        yield from found.values()


def _share(optimizer: Optimizer, leader: nn.Parameter, others: Iterable[nn.Parameter]) -> None:
    state = optimizer.state.get(leader, {})
    for other in others if state else ():
        own = optimizer.state[other]
        for key, one in state.items():
            if key in SINGLE or not isinstance(one, Tensor):
                own[key] = one
            elif not isinstance(own.get(key), Tensor):
                own[key] = one.new_empty(other.shape)
