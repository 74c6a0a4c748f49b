"""Where the tensors lie that an optimizer steps: here on the device that computes, in zero/offload elsewhere.

At stage 3 these are the shards, at stages 1 and 2 what stands in their place (masters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from zero.measure.param_groups import like


class SteppedGroup(Protocol):
    """What a step reads of a shard group. copies: the events after copies of its gradients."""

    params: list[nn.Parameter]
    main: Tensor
    copies: list[Any]

    def wait_for_copies(self) -> None:
        """Makes the host wait for its gradients."""


class Offload:
    """The device that computes.

    `active`: whether stepped tensors lie elsewhere.
    `alike`: the text of what must be the same on every rank.
    """

    active = False
    alike = "shards on the device"

    def place(self, shard: Tensor) -> Tensor:
        """Returns the tensor that is stepped in place of the shard: a copy, if it lies elsewhere."""
        return shard

    def of_groups(self, numels: Sequence[int]) -> list[Offload]:
        """Returns where shard groups of so many elements lie, given in the order in which forward needs them."""
        return [self] * len(numels)

    def has(self, shard: Tensor) -> bool:
        """Whether a tensor lies here already, and needs no copy."""
        return not self.active

    def holds(self, shard: Tensor) -> bool:
        """Whether a shard on the device surely holds what `returned` was told of. If not, what was written is found by
        comparing all elements with the stepped tensor."""
        return False

    def returned(self, shard: Tensor) -> None:
        """Called after a stepped tensor was copied into its shard on the device."""

    def copied(self, there: Tensor, sums: Tensor, own: Sequence[Tensor]) -> None:
        """Called after gradients were brought here: `there`, the copy of the flat `sums`. own: the gradient of each
        parameter, views of `sums`."""

    def known_norms(self, gradients: Sequence[Tensor], norm_type: float) -> Mapping[int, Tensor]:
        """Returns the norms that are known without reading the gradients, 0-dim, by position."""
        return {}

    def used(self, shard: Tensor) -> None:
        """Called after a placed tensor was read or written, when it will not be used for a while."""

    def refuse_full(self, what: str) -> None:
        """Raises ValueError if there was no room for a tensor. what: the shards in the message."""

    def make_room(self, optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
        """Called before any rank steps these parameters. Raises ValueError without room for the state that they get."""

    def step_group(
        self,
        group: SteppedGroup,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        then: Callable[[slice], None] | None = None,
    ) -> None:
        """Steps only these parameters, which lie here: the shards of one group. The optimizer treats each element by
        itself. then: called with each part of the flat stepped tensor once it has been stepped."""
        group.wait_for_copies()
        self.step_part(part_of(optimizer, params))
        if then is not None:
            then(slice(None))

    def step_part(self, part: Optimizer) -> None:
        """Steps all parameters of an optimizer, which lie here."""
        unhooked(part)()

    def before_step(
        self, optimizer: Optimizer, params: Sequence[nn.Parameter], groups: Sequence[SteppedGroup], *, closure: bool
    ) -> None:
        """Called before the user steps these parameters, all at rest in these groups, and perhaps others. May step some
        of them already."""

    def after_step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Called after an optimizer has stepped these parameters without `step_group`."""


DEVICE = Offload()


def part_of(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Optimizer:
    """Returns an optimizer with the state and options of this one, and of its parameters only these."""
    chosen = {*params}
    own = [[param for param in group["params"] if param in chosen] for group in optimizer.param_groups]
    groups = zip(optimizer.param_groups, own, strict=True)
    return like(optimizer, [{**group, "params": params} for group, params in groups])


def unhooked(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's step without its hooks, and without the count that schedulers keep."""
    step: Callable[..., Any] = vars(type(optimizer).step)["__wrapped__"]
    return partial(step, optimizer)
