"""Runs a function on local ranks, each in a fresh process, and brings back what the ranks return."""

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)

# torch imports _dynamo with the first optimizer, which takes seconds.
PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.distributed.fsdp"]


class RankFailed(RuntimeError):
    """A rank raised or died; the message holds its traceback."""


@dataclass(frozen=True)
class Rank:
    """What the function is told of the process it runs in; `tick` moves the progress bar by one step."""

    rank: int
    world: int
    device: torch.device
    tick: Callable[[], None]


Work = Callable[[Rank], Any]


def backend_of(world: int) -> str:
    """NCCL wants a GPU for each rank; over Gloo several can share one."""
    return "nccl" if 0 < world <= torch.cuda.device_count() else "gloo"


def describe_device(world: int) -> str:
    """What the ranks compute on, in words."""
    gpus = torch.cuda.device_count()
    return f"{min(gpus, world)} x {torch.cuda.get_device_name()}" if gpus else "CPU"


def run_ranks(work: Work, world: int, on_tick: Callable[[], object] = lambda: None) -> list[Any]:
    """Calls `work` on `world` ranks and returns its JSON-able results in the order of ranks.

    `work` must be picklable. `on_tick` is called for every tick of rank 0.
    """
    return _run(work, range(world), world, on_tick)


def run_hosts(work: Work, world: int, *, seconds: float | None = None) -> list[Any]:
    """As `run_ranks`, but over NCCL, on however few GPUs there are. NCCL refuses two ranks of one host on one GPU, so
    they pose as hosts, which send by sockets. seconds: after which the ranks are ended."""
    return _run(work, range(world), world, seconds=seconds, hosts=True)


def run_one_of(work: Work, world: int, *, seconds: float | None = None) -> Any:
    """Calls `work` on the first rank of a world that is not there: its collectives return at once, and bring nothing.
    Another one would train on whatever lies in the memory into which it is to receive the first one's weights. In a
    world of one it is as any other. seconds: after which the rank is ended."""
    return _run(work, [0], world, seconds=seconds)[0]


def _run(
    work: Work,
    ranks: Sequence[int],
    world: int,
    on_tick: Callable[[], object] = lambda: None,
    *,
    seconds: float | None = None,
    hosts: bool = False,
) -> list[Any]:
    # Importing torch takes seconds, so a server imports it once and forks the ranks. Forking this
    # process instead would hang as soon as it had used autograd.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes: list[BaseProcess] = []
    channels: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in ranks:
                receiver, sender = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_be_rank,
                    args=(work, rank, world, None if len(ranks) < world else Path(folder), hosts, sender),
                    daemon=True,
                )
                process.start()
                sender.close()  # so that a rank's death ends its channel
                processes.append(process)
                channels.append(receiver)
            return _collect(channels, on_tick, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(channels: list[Connection], on_tick: Callable[[], object], seconds: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    until = None if seconds is None else time.monotonic() + seconds
    while len(results) < len(channels):
        failures = []
        left = None if until is None else max(0.0, until - time.monotonic())
        ready = wait([channel for rank, channel in enumerate(channels) if rank not in results], left)
        if not ready:
            raise RankFailed(f"TimeoutError: not done in {seconds:g} s")
        for rank, channel in enumerate(channels):
            message = _receive(channel) if channel in ready else {}
            if "error" in message:
                failures.append(f"rank {rank} failed:\n{message['error']}")
            elif "result" in message:
                results[rank] = message["result"]
            elif "tick" in message and rank == 0:
                on_tick()
        if failures:
            raise RankFailed("\n".join(failures))
    return [results[rank] for rank in range(len(channels))]


def _receive(channel: Connection) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(channel.recv_bytes())
        return message
    except EOFError:
        return {"error": "its process died without a word"}


def _be_rank(work: Work, rank: int, world: int, folder: Path | None, hosts: bool, channel: Connection) -> None:
    def send(message: dict[str, Any]) -> None:
        channel.send_bytes(json.dumps(message).encode())

    try:
        with _process_group(rank, world, folder, hosts) as device:
            result = work(Rank(rank, world, device, tick=lambda: send({"tick": True})))
        send({"result": result})
    except Exception:
        send({"error": traceback.format_exc()})
    # A process that used DDP over Gloo sometimes aborts while the interpreter shuts down.
    os._exit(0)


@contextmanager
def _process_group(rank: int, world: int, folder: Path | None, hosts: bool) -> Iterator[torch.device]:
    """folder: where the ranks meet; None where there are no others. hosts: whether ranks on GPUs pose as hosts."""
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if folder is None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    else:
        meet, backend = f"file://{folder / 'rendezvous'}", backend_of(world)
        if hosts and gpus:  # NCCL reads these once
            os.environ.update(NCCL_HOSTID=f"host-{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
            backend = "nccl"
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=world, timeout=TIMEOUT)
    yield device
    dist.destroy_process_group()
