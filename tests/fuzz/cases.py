"""What a random training is, as plain values: `repr` of a case is the code that makes it, to be pasted into a test."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


class Shown:
    def __repr__(self) -> str:
        told = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING:
                told.append(repr(value))
            elif value != field.default:
                told.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(told)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """By this name hypothesis asks how to print."""
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Node(Shown):
    """A module: a layer, or something around other nodes.

    kind: a key of fuzz.layers.LAYERS or fuzz.layers.AROUND.
    size: of the layer's inner dimension, where it has one.
    frozen: its own parameters are not trained.
    of: which of the linear layers before it the kinds "tied" and "reads" take their weight from, counted round.
    """

    kind: str
    inside: tuple[Node, ...] = ()
    size: int = 3
    frozen: bool = False
    of: int = 0


@dataclass(frozen=True, repr=False)
class Micro(Shown):
    """One backward, of the summed losses of some forwards, or, with `retained`, two through the same graph.

    cleared: whose gradients are cleared between forward and backward of a step's first, as in Step.
    """

    forwards: int = 1
    sync: bool = True
    retained: bool = False
    cleared: str = ""


@dataclass(frozen=True, repr=False)
class Step(Shown):
    """Backwards and a step of the optimizer.

    before: what is done first, a key of fuzz.loop.EVENTS.
    clear: by whom gradients are set to None: "optimizer", "model", "each" (parameter, by hand) or "head", which alone
    loses them then; or "optimizer to zero" and so on.
    clip: the norm that gradients are clipped to.
    after: what is done between the last backward, or clipping, and the step, a key of fuzz.loop.WRITES.
    """

    micros: tuple[Micro, ...] = (Micro(),)
    before: str = ""
    clear: str = "optimizer"
    clip: float | None = None
    after: str = ""


@dataclass(frozen=True, repr=False)
class Case(Shown):
    """A model, how it is sharded, and how it is trained.

    averaged: who averages gradients at stage 1: "ddp" or "hand".
    bucket: ShardedDDP's reduce_buffer_size.
    units: a key of fuzz.training.POLICIES.
    by_hand: the first module of the body is an FSDP of its own, not resharded after forward.
    replicas: for hybrid strategies.
    optim: a key of fuzz.training.OPTIMIZERS.
    groups: of parameters, each with a learning rate of its own.
    compared: whether weights are compared after each step; else only after the last, so that nothing gathers between.
    """

    body: tuple[Node, ...]
    world: int = 2
    stage: int = 3
    steps: tuple[Step, ...] = (Step(), Step())
    width: int = 4
    rows: int = 3
    optim: str = "sgd"
    groups: int = 1
    compared: bool = True
    broadcast_buffers: bool = True
    partition: str = "auto"
    averaged: str = "hand"
    bucket: int | None = None
    units: str = "default"
    by_hand: bool = False
    strategy: str = "FULL_SHARD"
    replicas: int = 1
    prefetch: str = "default"
