"""Values and orders of calls that nobody wants: each does what it does with DistributedDataParallel, or raises on every
rank; nothing hangs.
"""

import gc
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
from torch.optim import AdamW

import assertions
import matrix
import ranks
import zero
from odd import AT
from rows import Loop, Rows
from runs import SideBySide, take_step
from zoo import Block, Stack, batch, loss_on

DESTROYED: list[Any] = []
"""Groups of this process. Should the last to hold one be what is collected, ProcessGroupGloo may wait for a thread of
its own, which waits for Python (torch 2.13): DistributedDataParallel's reducer does.
"""

adamw = partial(AdamW, lr=1e-2)
row = Rows("what nobody wants", __name__, net=lambda: Stack(lambda: Block(between=nn.ReLU()), classes=3), optim=adamw)


def backward_twice(t: Loop, i: int) -> None:
    """The gradients of the first stay."""
    loss = t.loss(i)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    t.update(None)


def no_rows_on_one_rank(t: Loop, i: int) -> None:
    t.update(t.note(t.m(t.batch(i)[: 4 * t.rank]).square().sum()))


def step_in_a_thread(t: Loop, i: int) -> None:
    thread = threading.Thread(target=lambda: t.update(t.loss(i)))
    thread.start()
    thread.join()


def step_without_the_process_group(t: Loop, i: int) -> None:
    """The model and the optimizer hold it. Stage 0 runs in the same processes before."""
    if t.stage:
        DESTROYED.append(dist.group.WORLD)
        dist.destroy_process_group()
    t.update(t.loss(i))


def nan_on_one_rank(t: Loop, i: int) -> None:
    inputs = t.batch(i)
    inputs[0, 0] = torch.nan if t.rank else 0.0
    t.update(t.note(t.m(inputs).square().sum()))


def run_without_the_optimizer(t: Loop, i: int) -> None:
    t.o = None
    gc.collect()
    with torch.no_grad():
        t.loss(i)
    t.loss(i + 1).backward()


ONE_BY_ONE = [backward_twice, no_rows_on_one_rank, step_in_a_thread, step_without_the_process_group, nan_on_one_rank]
ONE_BY_ONE += [run_without_the_optimizer]
for stage in (1, 2, 3):
    program = "odd steps, one by one", lambda t, i: ONE_BY_ONE[i](t, i)
    row.of(*program, steps=len(ONE_BY_ONE), same={stage})


test_rows = row.tests()


def without_its_model(stage: int, rank: int) -> dict[str, Tensor]:
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
    return {name: assertions.plain(param) for name, param in inner.named_parameters()}


def without_their_models(rank: int, world: int) -> list[dict[str, Tensor]]:
    return [without_its_model(stage, rank) for stage in range(4)]


@pytest.mark.slow
def test_an_optimizer_steps_when_the_wrapper_is_gone():
    """At stage 3 what it steps are shards."""
    by_rank = ranks.run(without_their_models, timeout=20)
    for name, expected in by_rank[0][0].items():
        assert all(torch.equal(found[stage][name], expected) for found in by_rank for stage in (1, 2)), name
        assert torch.equal(torch.cat([found[3][name].flatten() for found in by_rank]), expected.flatten()), name


class Faulty(nn.Module):
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


def fails(both: SideBySide, rank: int, where: str, error: type[BaseException], sync: bool, trains: bool = True) -> None:
    def fail() -> None:
        raise error("as told")

    faulty = both.model.module.blocks[1].between
    faulty.where, faulty.fail = where, fail
    with pytest.raises(error), nullcontext() if sync else both.model.no_sync(), torch.set_grad_enabled(trains):
        loss_on(rank, 9)(both.model).backward()
    faulty.where = ""


def evaluates(both: SideBySide, rank: int) -> None:
    with torch.no_grad():
        assert torch.equal(both.model(batch(rank, 0)), both.plain(batch(rank, 0)))
    assert all(param.grad is None for param in both.model.parameters())


NEXT: list[Callable[[SideBySide, int], object]] = [
    lambda both, rank: both.step(loss_on(rank, 3)),
    evaluates,
    lambda both, rank: both.compare(),
    lambda both, rank: both.update(),
]
ERRORS = [
    *product([("forward", KeyError), ("backward", KeyError)], [True, False], NEXT),
    *product([("forward", KeyboardInterrupt)], [True, False], NEXT[:2]),  # no hooks are told of it
]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("at", AT if matrix.WHOLE else ["2 in small buckets", "3", "3 without shards"])
@ranks.on(2, timeout=30)
def test_training_goes_on_after_an_error(rank, world, at):
    """Gradients from before it, sent or not, do not come back once they are cleared; before, they are there still."""
    both = SideBySide(net(), AT[at])
    for (where, error), sync, goes_on in ERRORS:
        both.step(loss_on(rank, 0))
        both.zero_grad()
        both.backward(loss_on(rank, 1), sync=sync)
        fails(both, rank, where, error, sync)
        both.zero_grad()
        goes_on(both, rank)
    for error in (KeyError, KeyboardInterrupt):
        both.zero_grad()
        both.backward(loss_on(rank, 0), sync=False)
        fails(both, rank, "forward", error, sync=False)
        both.backward(loss_on(rank, 1))
        both.update()
        fails(both, rank, "forward", error, sync=True, trains=False)


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
def test_an_interrupt_ends_every_process():
    """Where it reaches one rank only, the others end too, of its going away."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    moments = {1: ("step", ""), 2: ("", "backward"), 3: ("forward", "forward")}  # by stage, of each rank
    processes = {
        (stage, rank): ranks.forked(interrupted, (rank, store.port, stage, moment))
        for stage, by_rank in moments.items()
        for rank, moment in enumerate(by_rank)
    }
    try:
        for process in processes.values():
            process.join(20)
        assert {at: process.exitcode for at, process in processes.items()} == dict.fromkeys(processes, 1)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
