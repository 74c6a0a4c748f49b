"""Values and orders of calls that nobody wants: each does what it does with DistributedDataParallel, or raises on every
rank; nothing hangs.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW

import matrix
import ranks
import zero
from rows import Loop, Rows
from runs import SideBySide, take_step
from zoo import WIDTH, Block, Stack, batch, loss_on

pytestmark = pytest.mark.filterwarnings("ignore:module forward hook with:UserWarning")  # in a recursion without end

DESTROYED: list[Any] = []
"""Groups of this process. Should the last to hold one be what is collected, ProcessGroupGloo may wait for a thread of
its own, which waits for Python (torch 2.13): DistributedDataParallel's reducer does.
"""

adamw = partial(AdamW, lr=1e-2)

row = Rows("what nobody wants", __name__, net=lambda: Stack(lambda: Block(between=nn.ReLU()), classes=3), optim=adamw)


def step(t: Loop, x: Tensor, scale: float = 1.0, clip: float | None = None) -> None:
    loss = t.note(t.m(x).square().sum() * scale)
    loss.backward()
    if clip is not None:
        t.note(zero.clip_grad_norm_(t.m, t.o, clip).isfinite())
    t.o.step()
    t.o.zero_grad()


# -------------------------------------------------------------------------------------------------------------- values


@row()
def nan_in_one_input_of_one_rank(t, i):
    x = t.batch(i)
    x[0, 0] = torch.nan if t.rank and i == 1 else 0.0
    step(t, x)


row.of("a norm that is not finite", lambda t, i: step(t, t.batch(i), [1.0, math.nan, 1.0][i], clip=1.0))
row.of("gradients that overflow", lambda t, i: step(t, t.batch(i) * 1e19, clip=1.0 if i == 2 else None))
row.of("no rows on one rank", lambda t, i: step(t, t.batch(i)[: 0 if t.rank == i % 2 else 4]))


@row()
def state_that_is_not_finite(t, i):
    for state in getattr(t.o, "optim", t.o).state.values():
        state["exp_avg"].fill_(math.nan)
        state["exp_avg_sq"].fill_(math.inf)
    step(t, t.batch(i))


@row()
def weights_that_are_not_finite(t, i):
    weights = {name: value * math.nan for name, value in zero.full_state_dict(t.m).items()}
    (t.n if t.stage < 2 else t.m).load_state_dict(weights)
    step(t, t.batch(i), clip=1.0 if i == 1 else None)


# ------------------------------------------------------------------------------------------------------ orders of calls


@row()
def backward_twice_and_then_a_step(t, i):
    """The gradients of the first stay."""
    loss = t.loss(i)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    t.update(None)


@row(steps=1)
def the_optimizer_is_gone_before_the_model(t, i):
    t.update(t.loss(i))
    t.o = None
    gc.collect()
    with torch.no_grad():
        t.loss(1)
    t.loss(2).backward()


@row()
def the_process_group_is_gone_between_steps(t, i):
    """The model and the optimizer hold it."""
    t.update(t.loss(i))
    if i == 0:
        DESTROYED.append(dist.group.WORLD)
        dist.destroy_process_group()


@row()
def each_step_in_a_thread_of_its_own(t, i):
    thread = threading.Thread(target=lambda: t.update(t.loss(i)))
    thread.start()
    thread.join()


# --------------------------------------------------------------------------------------------------------------- depth


def nested() -> nn.Module:
    torch.manual_seed(0)
    inner: nn.Module = nn.Linear(WIDTH, WIDTH)
    for _ in range(100):
        inner = nn.Sequential(inner)
    return inner


class Endless(Block):
    """Calls itself without end, when told."""

    endless = False

    def forward(self, x: Tensor) -> Tensor:
        return self(x) if self.endless else super().forward(x)


units = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential, nn.Linear})}
row.of("modules are nested deeply", net=nested)
row.of("units are nested deeply", net=nested, options=units, same={3})


@row(net=lambda: Stack(Endless, classes=3))
def a_recursion_without_end(t, i):
    t.n.blocks[1].endless = True
    with pytest.raises(RecursionError):
        t.m(t.batch(9))
    t.n.blocks[1].endless = False
    t.update(t.loss(i))


test_rows = row.tests()


# --------------------------------------------------------------------------------------------------------- what is gone


def without_its_model(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    inner = Stack()
    model, optimizer = zero.setup(inner, adamw, stage=stage)
    take_step(optimizer, loss_on(rank, 0)(model))
    optimizer.zero_grad()
    loss_on(rank, 1)(model).backward()
    model = None
    gc.collect()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.state_dict()
    return dict(inner.named_parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_steps_when_the_wrapper_is_gone(stage):
    """At stage 3 what it steps are shards."""
    expected = ranks.run(without_its_model, args=(0,))[0]
    by_rank = ranks.run(without_its_model, args=(stage,), timeout=20)
    for name, value in expected.items():
        shards = [found[name].flatten() for found in by_rank]
        assert torch.equal(torch.cat(shards) if stage == 3 else shards[0], value.flatten()), name


# ----------------------------------------------------------------------------------------------------- errors in a step


class Faulty(nn.Module):
    """Hands its input on, and fails where it is told to."""

    where = ""
    fail: Callable[[], object]

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            self.fail()
        if self.where == "backward":
            x = x.clone()
            x.register_hook(lambda _: self.fail())
        return x


def net() -> Stack:
    return Stack(lambda: Block(between=Faulty()))


def fails(both: SideBySide, rank: int, where: str, error: type[BaseException], sync: bool) -> None:
    def fail() -> None:
        raise error("as told")

    faulty = both.model.module.blocks[1].between
    faulty.where, faulty.fail = where, fail
    with pytest.raises(error), nullcontext() if sync else both.model.no_sync():
        loss_on(rank, 9)(both.model).backward()
    faulty.where = ""


def evaluates(both: SideBySide, rank: int) -> None:
    with torch.no_grad():
        assert torch.equal(both.model(batch(rank, 0)), both.plain(batch(rank, 0)))
    assert all(param.grad is None for param in both.model.parameters())


NEXT: dict[str, Callable[[SideBySide, int], None]] = {
    "trains": lambda both, rank: None,
    "evaluates": evaluates,
    "reads": lambda both, rank: both.compare(),
    "steps without gradients": lambda both, rank: both.update(),
}
ERRORS: dict[str, tuple[str, type[BaseException], bool, str]] = {
    f"{error.__name__} in {where}, {'sent' if sync else 'no_sync'}, then it {then}": (where, error, sync, then)
    for where, error, sync, then in [
        *product(["forward", "backward"], [KeyError], [True, False], NEXT),
        *product(["forward"], [KeyboardInterrupt], [True, False], ["trains", "evaluates"]),  # no hooks are told of it
    ]
}


@matrix.combined("how, stage", ERRORS, ["2", "2 in small buckets", "3", "3 kept"])
@ranks.on(2, timeout=20)
def test_training_goes_on_after_an_error(rank, world, how, stage):
    """Gradients from before it, sent or not, do not come back once they are cleared."""
    where, error, sync, then = ERRORS[how]
    both = SideBySide(net(), stage)
    for number in range(2):
        both.step(loss_on(rank, 3 * number))
        both.zero_grad()
        both.backward(loss_on(rank, 3 * number + 1), sync=sync)
        fails(both, rank, where, error, sync)
        both.zero_grad()
        NEXT[then](both, rank)
    both.step(loss_on(rank, 7))


@pytest.mark.parametrize("stage", ["2", "3", "3 kept"])
@ranks.on(2, timeout=20)
def test_what_no_sync_kept_before_an_error_in_a_forward_is_there_still(rank, world, stage):
    both = SideBySide(net(), stage)
    for error in (KeyError, KeyboardInterrupt):
        both.zero_grad()
        both.backward(loss_on(rank, 0), sync=False)
        fails(both, rank, "forward", error, sync=False)
        both.backward(loss_on(rank, 1))
        both.update()


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupt(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(rank: int, port: int, stage: int, moment: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traceback
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{stage}", store), rank=rank, world_size=2)
    inner = net()
    faulty = inner.blocks[1].between
    model, optimizer = zero.setup(inner, adamw, stage=stage)
    for number in range(50):
        if number == 2:
            faulty.where, faulty.fail = moment, interrupt
        if number == 2 and moment == "step":
            getattr(optimizer, "optim", optimizer).register_step_pre_hook(interrupt)
        take_step(optimizer, loss_on(rank, number)(model))


@pytest.mark.slow
@matrix.combined("moment, only", ["forward", "backward", "step"], [None, 1])
def test_an_interrupt_ends_every_process(moment, only):
    """Where it reaches one rank only, the others end too, of its going away."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = {
        (stage, rank): ranks.forked(interrupted, (rank, store.port, stage, moment if only in (None, rank) else ""))
        for stage, rank in product([1, 2, 3], range(2))
    }
    try:
        for process in processes.values():
            process.join(20)
        assert {at: process.exitcode for at, process in processes.items()} == dict.fromkeys(processes, 1)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
