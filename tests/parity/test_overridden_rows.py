"""Modules whose own parameters() or named_parameters() are not torch's: every stage trains and saves all there is."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

import zero
from rows import Loop, Rows
from zoo import WIDTH, Block, Stack

row = Rows("D: parameters() that leave some out, or are no iterator of parameters", __name__, tolerance=1e-5)


def overridden(base: type[nn.Module], name: str, make: Callable[[Any], Iterable[Any]]) -> type[nn.Module]:
    def method(module: Any, *args: Any, **how: Any) -> Iterable[Any]:
        return make(getattr(super(found, module), name)(*args, **how))

    found = type(base.__name__, (base,), {name: method})
    return found


def frozen(net: Stack) -> Stack:
    net.first.requires_grad_(False)
    net.blocks[0].up.requires_grad_(False)
    return net


MAKES: dict[str, tuple[str, Callable[[Any], Iterable[Any]]]] = {
    "parameters() that leave frozen ones out": ("parameters", lambda own: (p for p in own if p.requires_grad)),
    "parameters() that are a list": ("parameters", list),
    "parameters() that are groups": ("parameters", lambda own: [{"params": [*own], "lr": 0.1}]),
    "named_parameters() that leave frozen ones out": (
        "named_parameters",
        lambda own: ((name, param) for name, param in own if param.requires_grad),
    ),
}


class WithoutArguments(Stack):
    def parameters(self) -> Any:  # type: ignore[override]
        return [*super().parameters()]


def trains_and_saves(t: Loop, i: int) -> None:
    t.loss(i).backward()
    t.clip(1.0)
    t.o.step()
    t.o.zero_grad()
    if i == 1:
        zero.load_full_state_dict(t.m, zero.full_state_dict(t.m, to=None))
        zero.load_full_optimizer_state_dict(t.m, t.o, zero.full_optimizer_state_dict(t.m, t.o, to=None))
        zero.checkpoint.save(t.folder, t.m, t.o)
        zero.checkpoint.load(t.folder, t.m, t.o)


for title, (name, make) in MAKES.items():
    model, block = overridden(Stack, name, make), overridden(Block, name, make)
    row.of(title, trains_and_saves, net=lambda model=model: frozen(model(classes=3)))
    row.of(f"{title}, of blocks", trains_and_saves, net=lambda block=block: frozen(Stack(block, classes=3)))
row.of("parameters() without arguments", trains_and_saves, net=lambda: frozen(WithoutArguments(classes=3)))

test_rows = row.tests()


def unwrapped(t: Loop, i: int) -> None:
    t.update(t.loss(i))
    assert zero.unwrap(t.m) is t.n and t.n.first.weight.shape == (WIDTH, WIDTH)


unwraps = Rows("D: parameters() of one's own, unwrapped", __name__)
for title, (name, make) in MAKES.items():
    model = overridden(Stack, name, make)
    unwraps.of(title, unwrapped, steps=1, net=partial(model, classes=3))

test_unwraps = unwraps.tests()
