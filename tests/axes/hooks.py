"""The user's hooks, at every place where torch lets them, registered before wrapping or after, and removed before the
third step. Each reads, writes, raises on every rank in the second step, or raises on rank 1 alone.

A place is a function of a Loop and of what the hook does there. It registers the hook and returns its handles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules import module as everywhere
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gpus
import zero
from axes import Axis, Wrap, happens
from axes.layout import linears

if TYPE_CHECKING:
    from rows import Loop

Act = Callable[..., Any]
"""Of a Loop and what a hook sees. Returns what is to stand in its place, or None."""
Place = Callable[["Loop", Act], list[Any]]
TOLD = "from the user's hook"


class Hook(Axis):
    """early: before wrapping. own: of the optimizer, so that this is built first, where that can be.

    alone: the stages at which all ranks raise what rank 1 alone raises there. ends: whether a model that raises there
    cannot go on, as DistributedDataParallel cannot after half a backward.
    """

    def __init__(
        self,
        place: Place,
        act: Act,
        *,
        early: bool,
        own: bool = False,
        alone: str = "123",
        ends: bool = False,
        or_refused: str | None = None,
    ) -> None:
        self.place, self.act, self.early, self.own, self.handles = place, act, early, own, list[Any]()
        if act is raises_alone or (act is raises and ends):
            self.refused = dict.fromkeys(map(int, alone if act is raises_alone else "123"), (TOLD,))
            if or_refused and not early:
                self.refused[3] = (or_refused,)
        elif act is not raises:
            self.or_refused = or_refused
        if act is clips:
            self.tolerance = max(1e-6, gpus.ROUNDING)  # a norm is summed in the order of the shards

    @contextmanager
    def running(self, rank: int, stage: int) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)  # no input has a gradient
            try:
                yield
            finally:
                self.remove()

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def register(self, t: Loop) -> None:
        self.handles = self.place(t, partial(self.act, t))

    def net(self, net: nn.Module, t: Loop) -> nn.Module:
        t.n, t.i = net, 0
        if self.early and not self.own:
            self.register(t)
        return net

    def wrapped(self, t: Loop, wrap: Wrap, optim: Callable[..., Any]) -> tuple[nn.Module, Any]:
        if self.early and self.own and t.stage == 3:
            t.o = optim(t.n.parameters())
            self.register(t)
            return zero.FSDP(t.n), t.o
        t.m, t.o = super().wrapped(t, wrap, optim)
        if not self.handles:
            self.register(t)
        return t.m, t.o

    def step(self, program: Callable[[Loop, int], object], t: Loop, i: int) -> None:
        t.i = i
        if i == 2:
            self.remove()
        try:
            super().step(program, t, i)
        except Exception as error:
            if self.refused or TOLD not in str(error):
                raise
            t.o.zero_grad()


def hooks(name: str, place: Place, *acts: Act, whens: str = "early late", **how: Any) -> None:
    for act, when in product(acts, whens.split()):
        words = f"hooks: {name} {act.__name__.replace('_', ' ')}, registered {when}"
        happens(words)(partial(Hook, place, act, early=when == "early", **how))


def raises(t: Loop, *_: Any) -> None:
    if t.i == 1:
        raise RuntimeError(f"{TOLD} on every rank")


def raises_alone(t: Loop, *_: Any) -> None:
    if t.i == 1 and t.rank == 1:
        raise RuntimeError(f"{TOLD} on rank 1")


RAISES = raises, raises_alone


def gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def reads_each(t: Loop, params: Iterable[Tensor]) -> None:
    """Element-wise work on gradients, as it may be done on shards. How often the hook is called is compared."""
    t.note(torch.tensor(float(len([grad.mul(2).isfinite() for grad in gradients(params)]) > 0)))


def halves_each(t: Loop, params: Iterable[Tensor]) -> None:
    for grad in gradients(params):
        grad.mul_(0.5)


def replaces_each(t: Loop, params: Iterable[Tensor]) -> None:
    for param in params:
        param.grad = None if param.grad is None else param.grad * 0.5


def zeroes_each(t: Loop, params: Iterable[Tensor]) -> None:
    for grad in gradients(params):
        grad.zero_()


def clips(t: Loop, params: Iterable[Tensor]) -> None:
    clip_grad_norm_(params, 0.05)


@torch.no_grad()
def decays_each(t: Loop, params: Iterable[Tensor]) -> None:
    for param in params:
        param.mul_(0.9)


def reads(t: Loop, *seen: Tensor | None) -> None:
    for one in seen:
        if one is not None:
            t.note(one.sum())


def scales(t: Loop, *seen: Tensor | None) -> Any:
    scaled = tuple(None if one is None else one * 0.9 for one in seen)
    return scaled if len(scaled) > 1 else scaled[0]


@torch.no_grad()
def scales_in_place(t: Loop, *seen: Tensor | None) -> None:
    for one in seen:
        if one is not None:
            one.mul_(0.9)


def of_step(register: Callable[[Loop], Callable[..., Any]]) -> Place:
    def place(t: Loop, act: Act) -> list[Any]:
        def hook(optimizer: Any, *_: Any) -> None:
            act([param for group in optimizer.param_groups for param in group["params"]])

        return [register(t)(hook)]

    return place


BEFORE = reads_each, halves_each, replaces_each, zeroes_each, clips
own_pre, own_post = of_step(lambda t: t.o.register_step_pre_hook), of_step(lambda t: t.o.register_step_post_hook)
hooks("before an optimizer's step", own_pre, *BEFORE, *RAISES, own=True)
hooks("after an optimizer's step", own_post, reads_each, own=True)
hooks("after an optimizer's step", own_post, decays_each, *RAISES, own=True)
every_pre, every_post = (
    of_step(lambda t: register_optimizer_step_pre_hook),
    of_step(lambda t: register_optimizer_step_post_hook),
)
hooks("before every optimizer's step", every_pre, *BEFORE[:-1], *RAISES)
# Not early: whether an earlier test in this process has had zero register its own hook makes a difference today.
hooks("before every optimizer's step", every_pre, clips, whens="late")
hooks("after every optimizer's step", every_post, reads_each)
hooks("after every optimizer's step", every_post, decays_each, *RAISES)


def inside(t: Loop, where: str) -> Any:
    """The module itself, a block of it, or a layer of the block."""
    layer = linears(t.n)[1]
    return {
        "the model": t.n,
        "a block": next((one for one in t.n.modules() if layer in one.children()), layer),
        "a layer": layer,
    }[where]


def first_weight(module: nn.Module) -> Tensor:
    return next(module.parameters()).detach()


def on_module(kind: str, where: str, everywhere_too: bool = False) -> Place:
    def place(t: Loop, act: Act) -> list[Any]:
        chosen = inside(t, where)

        def hook(module: nn.Module, *seen: Any) -> Any:
            return seen_by(kind, act, module, *seen) if module is chosen else None

        name = f"register_{'module_' if everywhere_too else ''}{kind}"
        return [getattr(everywhere if everywhere_too else chosen, name)(hook)]

    return place


def seen_by(kind: str, act: Act, module: nn.Module, *seen: Any) -> Any:
    """Gives the hook what torch gives it; one that only reads also reads a weight."""
    last = seen[0] if kind == "full_backward_hook" else seen[-1]
    tensors = last if isinstance(last, tuple) else (last,)
    if act.func is reads:  # type: ignore[attr-defined]
        return act(*tensors, first_weight(module))
    changed = act(*tensors)
    return changed if not isinstance(last, tuple) or changed is None or isinstance(changed, tuple) else (changed,)


KINDS = {"forward_pre_hook": "before", "forward_hook": "after"}
KINDS |= {"full_backward_pre_hook": "before the backward of", "full_backward_hook": "after the backward of"}
for kind, words in KINDS.items():
    how = {"ends": "backward" in kind, "alone": "23" if "backward" in kind else "3"}
    for where in ("the model", "a block", "a layer"):
        hooks(f"{words} {where}", on_module(kind, where), reads, scales, *RAISES, **how)
    hooks(
        f"{words} a layer, as of every module,",
        on_module(kind, "a layer", True),
        reads,
        scales,
        *RAISES,
        whens="late",
        **how,
    )


def on_gradients(t: Loop, act: Act) -> list[Any]:
    return [param.register_hook(act) for param in t.n.parameters() if param.requires_grad]


def on_accumulated(t: Loop, act: Act) -> list[Any]:
    params = [param for param in t.n.parameters() if param.requires_grad]
    return [param.register_post_accumulate_grad_hook(lambda param: act(param.grad)) for param in params]


def on_many(mode: str) -> Place:
    def place(t: Loop, act: Act) -> list[Any]:
        params = [param for param in inside(t, "a block").parameters() if param.requires_grad]

        def hook(seen: Any) -> None:
            act(*(seen if isinstance(seen, (tuple, list)) else [seen]))

        return [register_multi_grad_hook(params, hook, mode=mode)]  # type: ignore[arg-type]

    return place


hooks("on each gradient", on_gradients, reads, scales, *RAISES, **how)
hooks("on each accumulated gradient", on_accumulated, reads, scales_in_place, *RAISES, **how)
hooks("on any gradient of a block", on_many("any"), reads, *RAISES, **how)
how["or_refused"] = "needs the full tensor"  # registered between steps of stage 3
hooks("on all gradients of a block", on_many("all"), reads, *RAISES, **how)


def scales_entries(t: Loop, state: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: value * 0.9 for name, value in state.items() if isinstance(value, Tensor) and value.ndim}
    return (
        state | {name: scales_entries(t, value) for name, value in state.items() if isinstance(value, dict)} | tensors
    )


def reads_entries(t: Loop, state: dict[str, Any]) -> None:
    t.note(torch.tensor(float(len(state))))
    for value in state.values():
        if isinstance(value, dict):
            reads_entries(t, value)
        elif isinstance(value, Tensor):
            t.note(value.sum())


def of_state(owner: str, name: str) -> Place:
    """owner: "n" for the module, which has its dictionary changed, "o" for the optimizer, which takes another one."""

    def place(t: Loop, act: Act) -> list[Any]:
        def hook(_: Any, *seen: Any) -> Any:
            state = next((one for one in seen if isinstance(one, dict)), {})
            other = act(state)
            return other if owner == "o" or other is None else state.update(other)

        return [getattr(getattr(t, owner), f"register_{name}")(hook)]

    return place


for owner, whose, whens in (("n", "model", "early late"), ("o", "optimizer", "late")):
    for name, acts in {
        "state_dict_pre_hook": (reads_entries,),
        "state_dict_post_hook": (reads_entries, scales_entries),
        "load_state_dict_pre_hook": (reads_entries, scales_entries),
        "load_state_dict_post_hook": (reads_entries,),
    }.items():
        words = name.replace("_dict", "").replace("_", " ").removesuffix(" hook")
        hooks(f"at the {whose}'s {words}", of_state(owner, name), *acts, *RAISES, whens=whens, alone="3")
