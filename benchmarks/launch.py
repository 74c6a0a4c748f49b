"""Runs a function on local ranks, each in a fresh process, and brings back what the ranks return."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

import links

TIMEOUT = timedelta(minutes=5)

# torch imports _dynamo with the first optimizer, which takes seconds.
PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.distributed.fsdp"]

T = TypeVar("T")


class RankFailed(RuntimeError):
    """A rank raised or died; the message holds its traceback."""


@dataclass(frozen=True)
class Rank:
    """What the function is told of the process it runs in."""

    rank: int
    world: int
    device: torch.device


@dataclass(frozen=True)
class Launch:
    """How ranks are started.

    group: "all": `world` ranks run, over NCCL if each has a GPU, or else over Gloo. "hosts": over NCCL on however few
        GPUs there are. NCCL refuses two ranks of one host on one GPU, so they pose as hosts, which send by sockets.
        "fake": the first rank runs alone, and its collectives return at once and bring nothing. Another one would train
        on whatever lies in the memory into which it is to receive the first one's weights. "none": one process without
        torch.distributed.
    threads: of each. seconds: after which the ranks are ended. link: as of links.py, by which ranks reach one another.
    """

    world: int = 1
    group: Literal["all", "hosts", "fake", "none"] = "all"
    threads: int = 1
    seconds: float | None = None
    link: str | None = None

    def __call__(self, work: Callable[[Rank], T]) -> list[T]:
        """Calls `work` on the ranks that run, and returns its results in the order of ranks; both are pickled. Their
        classes are not to be those of a script: a rank imports it by another name."""
        # Importing torch takes seconds, so a server imports it once and forks the ranks. Forking this process instead
        # would hang as soon as it had used autograd.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        processes, channels = [], []
        count = self.world if self.group in ("all", "hosts") else 1
        apart = links.joined(count, self.link) if self.link else nullcontext([None] * count)
        with tempfile.TemporaryDirectory() as folder, apart as namespaces:
            try:
                for rank, namespace in enumerate(namespaces):
                    receiver, sender = context.Pipe(duplex=False)
                    told = (work, rank, self, folder, namespace, sender)
                    process = context.Process(target=_be_rank, args=told, daemon=True)
                    process.start()
                    sender.close()  # so that a rank's death ends its channel
                    processes.append(process)
                    channels.append(receiver)
                return _collect(channels, self.seconds)
            finally:
                for process in processes:
                    process.kill()
                    process.join()

    def first(self, work: Callable[[Rank], T]) -> T:
        """What the first rank returns."""
        return self(work)[0]


def take_turns(jobs: Mapping[str, Callable[[], T]], rounds: int) -> tuple[dict[str, list[T]], dict[str, str]]:
    """What each job returned in each round, and why others failed, which are left out from then on. An interrupt ends
    the rounds.

    One job after another, over and over, they meet the same machine: what else it does slows down all of them alike.
    """
    found: dict[str, list[T]] = {name: [] for name in jobs}
    failed: dict[str, str] = {}
    for turn, name in product(range(rounds), jobs):
        if name in failed:
            continue
        if sys.stderr.isatty():
            print(f"round {turn + 1} of {rounds}: {name}\033[K", end="\r", file=sys.stderr, flush=True)
        try:
            found[name].append(jobs[name]())
        except RankFailed as failure:
            failed[name] = str(failure).strip()
        except KeyboardInterrupt:
            failed["all that is not shown"] = "interrupted"
            break
    return {name: results for name, results in found.items() if results and name not in failed}, failed


def backend_of(world: int) -> str:
    """NCCL wants a GPU for each rank; over Gloo several can share one."""
    return "nccl" if 0 < world <= torch.cuda.device_count() else "gloo"


def _collect(channels: list[Connection], seconds: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    until = None if seconds is None else time.monotonic() + seconds
    while len(results) < len(channels):
        left = None if until is None else max(0.0, until - time.monotonic())
        ready = wait([channel for rank, channel in enumerate(channels) if rank not in results], left)
        if not ready:
            raise RankFailed(f"TimeoutError: not done in {seconds:g} s")
        told = {rank: _receive(channel) for rank, channel in enumerate(channels) if channel in ready}
        failures = [f"rank {rank} failed:\n{result}" for rank, (succeeded, result) in told.items() if not succeeded]
        if failures:
            raise RankFailed("\n".join(failures))
        results |= {rank: result for rank, (_, result) in told.items()}
    return [results[rank] for rank in range(len(channels))]


def _receive(channel: Connection) -> tuple[bool, Any]:
    try:
        return channel.recv()
    except EOFError:
        return False, "its process died without a word"


def _be_rank(
    work: Callable[[Rank], Any], rank: int, launch: Launch, folder: str, namespace: str | None, channel: Connection
) -> None:
    try:
        if namespace is not None:
            links.enter(namespace)
        with _process_group(rank, launch, Path(folder)) as device:
            result = work(Rank(rank, launch.world, device))
        channel.send((True, result))
    except Exception:
        channel.send((False, traceback.format_exc()))
    # A process that used DDP over Gloo sometimes aborts while the interpreter shuts down.
    os._exit(0)


@contextmanager
def _process_group(rank: int, launch: Launch, folder: Path) -> Iterator[torch.device]:
    torch.set_num_threads(launch.threads)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.group == "none":
        yield device
        return
    if launch.group == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=launch.world, store=FakeStore())
    else:
        meet, backend = f"file://{folder / 'rendezvous'}", backend_of(launch.world)
        if launch.group == "hosts" and gpus:  # NCCL reads these once
            os.environ.update(NCCL_HOSTID=f"host-{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
            backend = "nccl"
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=launch.world, timeout=TIMEOUT)
    yield device
    dist.destroy_process_group()
