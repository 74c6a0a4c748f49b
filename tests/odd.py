"""Tables of odd models: each is trained at stages 2 and 3 beside a copy that torch trains, and numbers are the same.

MODELS = odd = Odds()
odd("hidden states alone", lambda: Stack(Remembering), of_hidden)      # a model, and its loss on a batch

@pytest.mark.matrix
@pytest.mark.parametrize(("name", "at"), MODELS.cases())
@ranks.on(2, timeout=20)
def test_numbers_are_those_of_torch(rank, world, name, at):
    MODELS[name].trains(rank, at)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import matrix
from assertions import close
from runs import STAGES, SideBySide, stage_3
from zoo import Block, Stack, batch

AT = STAGES | {
    "3 without shards": partial(stage_3, sharding_strategy="NO_SHARD"),
    "3 memory first": partial(stage_3, prefetch=1),
    "3 speed first": partial(stage_3, prefetch=3),
}
STAGE_3 = [name for name in AT if name.startswith("3")]

recomputed = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)


def mean(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Calling(Stack):
    """Runs each block by a function of block and input."""

    def __init__(self, by: Callable[..., Tensor], block: Callable[[], nn.Module] = Block, **how: Any) -> None:
        super().__init__(block, **how)
        self.by = by

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.by(block, x)


@dataclass(frozen=True)
class Odd:
    """at: keys of AT. options: of FSDP. tolerance: for gradients that are sent in two goes and so rounded once more."""

    net: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    at: list[str]
    options: dict[str, Any]
    tolerance: float

    def trains(self, rank: int, at: str) -> None:
        """With no_sync, and in every second batch with a gradient of the inputs."""
        both = SideBySide(self.net(), partial(AT[at], **self.options), tolerance=self.tolerance)
        for step in range(3):
            inputs: dict[int, list[Tensor]] = {2 * step: [], 2 * step + 1: []}
            both.step(*(partial(self._loss, rank, number, inputs[number]) for number in inputs), unsent=1)
            for found, expected in inputs.values():
                assert found.grad is expected.grad is None or close(found.grad, expected.grad, self.tolerance)

    def _loss(self, rank: int, number: int, seen: list[Tensor], model: nn.Module) -> Tensor:
        seen.append(batch(rank, number).requires_grad_(bool(number % 2)))
        return self.loss(model, seen[-1])


class Odds(dict[str, Odd]):
    """By name."""

    def __call__(
        self,
        name: str,
        net: Callable[[], nn.Module],
        loss: Callable[[Any, Tensor], Tensor] = mean,
        *,
        units: list[type[nn.Module]] | None = None,
        at: list[str] | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """units: the classes of FSDP's, where the default ones are not meant; then at stage 3 alone."""
        options = {} if units is None else {"auto_wrap_policy": ModuleWrapPolicy({*units})}
        self[name] = Odd(net, loss, at or (STAGE_3 if options else [*AT]), options, tolerance)

    def cases(self) -> list[Any]:
        """Every model at stage 3 as it is by default, and at the other places; in the suite every third one at one of
        these, in turn. The quick subset has every third at stage 3."""
        chosen: list[Any] = []
        for number, (name, model) in enumerate(self.items()):
            others = [at for at in model.at if at != "3"]
            others = others if matrix.WHOLE else others[number % len(others) :: len(others)][: number % 3 == 1]
            quick = () if number % 3 else ("3",)
            chosen += [pytest.param(name, at, marks=() if at in quick else pytest.mark.slow) for at in ("3", *others)]
        return chosen
