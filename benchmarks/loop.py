"""What every command measures with: the timing of a step, and the counting of its bytes and collectives."""

import ctypes
import gc
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import zero
from contestants import CONTESTANTS, How, Trained, build
from fake import Network
from launch import Rank
from models import Task, chain
from zero.comm import Comm
from zero.plan.meter import Meter

WARM_UP = 3  # optimizer state appears in the first step, and DDP orders its buckets anew in the second


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Step:
    """ms of forward, backward, and the optimizer's step with zero_grad, the last until the device is done: time, and
    the CPU time of all threads. launched: until the host has launched all of it."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]
    launched: float

    @property
    def wall_ms(self) -> float:
        return sum(self.wall)

    @property
    def cpu_ms(self) -> float:
        return sum(self.cpu)


def take_step(trained: Trained, batch: Sequence[Tensor], device: torch.device) -> tuple[Step, Tensor]:
    """One step on this rank, and its loss."""
    times = []

    def note(*, wait: bool = False) -> None:
        if wait:
            wait_for(device)
        times.append((time.perf_counter(), time.process_time()))

    note(wait=True)
    loss = trained.loss(*batch)
    note()
    trained.backward(loss)
    note()
    trained.update()
    launched = time.perf_counter() - times[0][0]
    note(wait=True)
    wall, cpu = (tuple(1000 * (b - a) for a, b in pairwise(clock)) for clock in zip(*times, strict=True))
    return Step(wall, cpu, 1000 * launched), loss.detach()


def median(steps: Sequence[Step], figure: Callable[[Step], float]) -> float:
    return statistics.median(map(figure, steps))


@dataclass(frozen=True)
class Timed:
    """A rank's training. cpu_ms: of a step, what other threads did between steps included. losses: of all steps."""

    wall_ms: float
    cpu_ms: float
    losses: list[float]


def time_training(name: str, task: Task, how: How, steps: int, rank: Rank) -> Timed:
    """After steps that warm up."""
    warnings.simplefilter("ignore")
    trained, losses, taken, begin_cpu = build(name, task, rank, how), [], [], 0.0
    for number in range(WARM_UP + steps):
        batch = task.batch(number, rank.rank, rank.device)
        if number == WARM_UP:
            begin_cpu = time.process_time()
        step, loss = take_step(trained, batch, rank.device)
        losses.append(loss)
        taken.append(step)
    cpu_ms = 1000 * (time.process_time() - begin_cpu) / steps
    return Timed(median(taken[WARM_UP:], lambda step: step.wall_ms), cpu_ms, [loss.item() for loss in losses])


def repeat(work: Callable[[], object], rank: Rank, *, times: int) -> tuple[float, float]:
    """ms and CPU ms of one of so many, after one to warm up."""
    work()
    wait_for(rank.device)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        work()
    wait_for(rank.device)
    return 1000 * (time.perf_counter() - begin) / times, 1000 * (time.process_time() - begin_cpu) / times


OPERATIONS = ("gather", "reduce", "all_reduce", "broadcast")
KINDS = {"allreduce": "all-reduce", "alltoall": "all-to-all"}
"""What a collective is called by simulated.network, by what torch's operator has in its name. All others send as a
gather does; a broadcast and a reduction to one rank do so in the mean over the ranks."""


class Counting(Meter):
    """Counts the bytes of all tensors that are alive on the device, the collectives of torch.distributed, and the bytes
    that this rank sends by them, by rings."""

    def __init__(self, world: int, device: torch.device) -> None:
        super().__init__()
        self._network, self._device = Network(1, world, 1, 1, 1), device
        self.calls = self.sent = 0

    def counts(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d" and args:
            nbytes = max(map(_bytes_in, args))
            kind = next((kind for part, kind in KINDS.items() if part in func.__name__), "gather")
            self.calls += nbytes > 0
            self.sent += round(self._network.link_bytes(kind, nbytes))
        return super().run(func, args, kwargs)

    def of_zero(self) -> AbstractContextManager[Any]:
        """Counts zero's own, too: on the CPU it sends by host memory or a Gloo group that torch does not know."""

        def noted(operation: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.calls += self._device.type == "cpu"
                return operation(*args, **kwargs)

            return run

        return mock.patch.multiple(Comm, **{name: noted(getattr(Comm, name)) for name in OPERATIONS})


def _bytes_in(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(map(_bytes_in, argument)) if isinstance(argument, (list, tuple)) else 0


@dataclass(frozen=True)
class Weight:
    """Of a settled step on this rank, in bytes: what lies there between backward and step, where it is counted, the
    most of tensors at once, by how much the process grew at most, and what is sent. transport: by which zero sends."""

    parameters: int
    gradients: int
    optimizer: int
    tensors: int
    process: int
    sent: int
    calls: int
    transport: str


def weigh(name: str, task: Task, how: How, rank: Rank) -> Weight:
    """The process is told how to treat freed blocks before it allocates any. What is imported and set up once does not
    count. On a GPU its memory is what CUDA's allocator has taken, which it does not give back."""
    warnings.simplefilter("ignore")
    return_freed_blocks_at_once()
    small = chain(1)
    take_step(build(name, small, rank, how), small.batch(0, rank.rank, rank.device), rank.device)
    gc.collect()
    before = peak_of_process(rank.device)
    batches = [task.batch(number, rank.rank, rank.device) for number in range(WARM_UP + 1)]
    comm, ours, on_gpu = Comm.default(), CONTESTANTS[name].ours, rank.device.type == "cuda"
    with Counting(rank.world, rank.device) as counting, counting.of_zero():
        trained = build(name, task, rank, how)
        for batch in batches[:-1]:
            take_step(trained, batch, rank.device)
        counting.reset_peak()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        counting.calls = counting.sent = 0
        since = zero.traffic()
        trained.backward(trained.loss(*batches[-1]))
        resting = zero.report(trained.model, trained.optimizer) if ours or name == "ddp" else None
        trained.update()
        peak = torch.cuda.max_memory_allocated() if on_gpu else counting.peak()
    unseen = (zero.traffic() - since).total if ours and not on_gpu else 0
    return Weight(
        *((resting.parameters, resting.gradients, resting.optimizer) if resting else (0, 0, 0)),
        tensors=peak,
        process=peak_of_process(rank.device) - before,
        sent=counting.sent + unseen,
        calls=counting.calls,
        transport=comm.transport_name(rank.device),
    )


def return_freed_blocks_at_once() -> None:
    """Tells glibc to give freed blocks from 256 KiB up back to the system.

    Otherwise it keeps many of them, and the process's peak says more of the C library than of the program.
    """
    if sys.platform == "linux":
        mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
        ctypes.CDLL(None).mallopt(mmap_threshold, 256 * 1024)


def peak_of_process(device: torch.device) -> int:
    """The most memory that this process ever held, in bytes, the interpreter and its libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
