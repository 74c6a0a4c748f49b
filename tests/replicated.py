"""Replicas that train together, of which any rank may be killed; each is a group of its own, as a job of torchrun's is.

A supervisor in a thread starts each replica, and starts it again once it has died, with another name. What all ranks
know alike (`Progress`) says who dies next, so that no rank of the others need be told. `trained_alone` does the same
steps in one process, in plain PyTorch.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ranks
import zero
from zero.comm.store_group import StoreGroup
from zero.features.replicas.coordinator import Coordinator
from zero.features.replicas.membership import Membership

OPTIMIZERS = {"adam": (torch.optim.Adam, {"lr": 0.02}), "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})}
STEADY = 2
"""Steps with all replicas after which the next one dies, or the run ends."""


@dataclass(frozen=True)
class Death:
    """index: of the replica among those that live, 0 is the oldest. place: see `doomed`; or "sending", in which the
    oldest one dies as soon as another joins, before all have been there for some steps."""

    index: int
    rank: int
    place: str


@dataclass(frozen=True)
class Run:
    """replicas: at the beginning. restarts: whether a replica that died is started again. stillborn: the names of those
    that die as they receive the state."""

    replicas: int
    shards: int
    stage: int
    deaths: tuple[Death, ...] = ()
    optimizer: str = "adam"
    restarts: bool = True
    stillborn: tuple[str, ...] = ()

    def expected(self, deaths: int) -> int:
        return self.replicas if self.restarts else self.replicas - deaths


@dataclass
class Progress:
    """Known to all replicas alike. history: the names that took part in each step. It is the test's state=."""

    history: list[list[str]] = field(default_factory=list)
    deaths: int = 0
    steady: int = 0

    def see(self, names: Sequence[str], run: Run) -> None:
        gone = {*self.history[-1]} - {*names} if self.history else set()
        self.deaths += len(gone)
        self.history.append([*names])
        self.steady = self.steady + 1 if len(names) == run.expected(self.deaths) and not gone else 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, name: str, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * int(name[1:]) + ord(name[0]) * 7 + rank)
    return torch.randn(6, 4, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def doomed(model: nn.Module, optimizer: torch.optim.Optimizer, place: str) -> Iterator[None]:
    """In this context the process is killed at the place in a step."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    send = Membership._send

    def die_when_done(self: Membership, message: dict[str, Any]) -> None:
        die() if "done" in message else send(self, message)

    with ExitStack() as stack:
        if place == "forward":
            last.register_forward_hook(die)
        elif place == "backward":
            last.register_forward_hook(lambda module, args, output: output.register_hook(die) and None)
        elif place == "step":
            optimizer.register_step_pre_hook(die)
        elif place == "averaging":
            stack.enter_context(mock.patch.object(StoreGroup, "average", die))
        elif place == "averaged":
            stack.enter_context(mock.patch.object(Membership, "_send", die_when_done))
        elif place in ("sending", "receiving"):
            method = "send" if place == "sending" else "receive"
            transfer, number = getattr(StoreGroup, method), itertools.count()
            with_death = lambda *args: die() if next(number) == 3 else transfer(*args)  # noqa: E731
            stack.enter_context(mock.patch.object(StoreGroup, method, with_death))
        yield


def train(rank: int, world: int, run: Run, port: int, name: str) -> tuple[Progress, dict[int, float], dict[str, Any]]:
    """One replica. Returns also its losses by step, and the full weights."""
    optim, options = OPTIMIZERS[run.optimizer]
    model, optimizer = zero.setup(build(), optim, stage=run.stage, **options)
    progress, losses = Progress(), {}
    with doomed(model, optimizer, "receiving" if name in run.stillborn else ""):
        replicas = zero.fault_tolerant(model, optimizer, f"localhost:{port}", name=name, state={"progress": progress})
    while not (progress.deaths == len(run.deaths) and progress.steady == STEADY + 1):
        assert replicas.step == len(progress.history) < 20_000
        death = run.deaths[progress.deaths] if progress.deaths < len(run.deaths) else None
        dies = death is not None and (progress.steady == STEADY or death.place == "sending")
        dies = dies and (replicas.index, rank) == (death.index, death.rank)
        with doomed(model, optimizer, death.place if dies else ""):
            loss = loss_of(model(batch(replicas.step, name, rank)))
            optimizer.zero_grad()
            loss.backward()
            losses[replicas.step] = loss.item()
            optimizer.step()
        progress.see(replicas.names, run)
        if replicas.count < run.expected(progress.deaths):
            time.sleep(0.02)  # else those that start again have little of the CPU
    return progress, losses, zero.full_state_dict(model)


def trained_alone(
    rank: int, world: int, run: Run, history: Sequence[Sequence[str]]
) -> tuple[dict[tuple[int, str], float], dict[str, Tensor]]:
    """The same steps in one process. Returns losses of the first ranks, by step and name, and the weights."""
    model = build()
    optim, options = OPTIMIZERS[run.optimizer]
    optimizer, losses = optim(model.parameters(), **options), {}
    for step, names in enumerate(history):
        before = [buffer.clone() for buffer in model.buffers()]
        means = []
        for number, name in enumerate(names):
            of_ranks = []
            for shard in range(run.shards):
                after = [buffer.clone() for buffer in model.buffers()]
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)
                loss = loss_of(model(batch(step, name, shard)))
                of_ranks.append(torch.autograd.grad(loss, [*model.parameters()]))
                if shard == 0:
                    losses[step, name] = loss.item()
                if number or shard:  # all take the buffers of the first
                    for buffer, value in zip(model.buffers(), after, strict=True):
                        buffer.copy_(value)
            means.append([mean_in_order(gradients) for gradients in zip(*of_ranks, strict=True)])
        for param, gradients in zip(model.parameters(), zip(*means, strict=True), strict=True):
            param.grad = mean_in_order(gradients)
        optimizer.step()
    return losses, model.state_dict()


def mean_in_order(gradients: Sequence[Tensor]) -> Tensor:
    first, *others = gradients
    total = first.clone()
    for other in others:
        total += other
    return total * (1 / len(gradients))


class Served:
    """A coordinator in a thread."""

    def __init__(self, replicas: int, timeout: float = 30.0) -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._args, self._listening = (replicas, timeout, self._store.port), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop, self.coordinator = asyncio.get_running_loop(), Coordinator(*self._args)
        server = await asyncio.start_server(self.coordinator.serve, "localhost", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        async with server:
            await self.coordinator.over.wait()
            await asyncio.sleep(0.05)

    def __enter__(self) -> Served:
        self._thread.start()
        self._listening.wait()
        return self

    def wait(self) -> None:
        """Waits until it has ended by itself, when no replica is left."""
        self._thread.join(10)
        assert not self._thread.is_alive()

    def end_soon(self) -> None:
        """Ends the coordinator while replicas train."""
        self._loop.call_later(0.5, self.coordinator.over.set)

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # it is over already
            self._loop.call_soon_threadsafe(self.coordinator.over.set)
        self._thread.join()


def supervised(run: Run, port: int, letter: str) -> tuple[str, list[Any] | ranks.RankError]:
    """Starts a replica as often as it dies. Returns the last name and what its ranks returned, or how they died."""
    for number in range(100):
        name = f"{letter}{number}"
        try:
            return name, ranks.run(train, run.shards, (run, port, name), timeout=90, fresh=True)
        except ranks.RankError as error:
            if not run.restarts or "died with exit code -9" not in [outcome.verdict for outcome in error.outcomes]:
                return name, error
    raise AssertionError("never ended")


def each(start: Callable[[str], Any], number: int) -> list[Any]:
    """Calls `start` with the letter of each replica, in threads, and returns what it returns."""
    ranks.start()
    ranks._store()  # here, because threads would make several
    with ThreadPoolExecutor(number) as threads:
        return [*threads.map(start, "abcdefgh"[:number])]


def ended(fn: Callable[..., Any], served: Served, shards: Mapping[str, int], *args: Any) -> dict[str, list[Any]]:
    """Runs `fn(rank, world, port, letter, *args)` on replicas. By letter, what each rank returned or what became of it.
    shards: the number of ranks, by letter."""

    def start(letter: str) -> tuple[str, list[Any]]:
        try:
            return letter, ranks.run(fn, shards[letter], (served.port, letter, *args), fresh=True)
        except ranks.RankError as error:
            return letter, [one.value if one.returned else one.verdict for one in error.outcomes]

    return dict(each(start, len(shards)))


def replicate(run: Run) -> dict[str, Any]:
    """Trains. Returns, by the last name of each replica, the results of its ranks, or the error."""
    with Served(run.replicas) as served:
        found = dict(each(partial(supervised, run, served.port), run.replicas))
        served.wait()
        return found
