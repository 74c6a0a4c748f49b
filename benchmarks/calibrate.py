"""Measures how fast this machine's CPU computes and sends, on two ranks at once.

All figures are of CPU time, with one thread a rank, so that other load on the machine matters little. Each is the
median of several rounds.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zero.comm import Comm, configure
from zero.plan.hardware import Hardware, Link
from zero.plan.rehearsal import Rehearsal
from zero.plan.trace import Trace

_RANKS = 2
ROUNDS = 7
_TIMEOUT = timedelta(minutes=3)

_CACHE = 4 << 20
"""Bytes. Operators that move at most so many are taken to work in the processor's cache."""

SIZES = {"small": 1 << 16, "large": 1 << 24}
"""Bytes of transfers."""

Measured = dict[str, float]


def calibrate() -> tuple[Hardware, str]:
    """The hardware, and a note on where and how it was measured. Takes about half a minute.

    Raises RuntimeError where a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results: Queue[Measured | str] = context.Queue()
        processes = [context.Process(target=_run_rank, args=(rank, folder, results)) for rank in range(_RANKS)]
        for process in processes:
            process.start()
        try:
            found = [results.get(timeout=_TIMEOUT.total_seconds()) for _ in processes]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    measured = [one for one in found if not isinstance(one, str)]
    if len(measured) < _RANKS:
        raise RuntimeError(f"a rank failed while it measured: {next(one for one in found if isinstance(one, str))}")
    means = {name: statistics.mean(one[name] for one in measured) for name in measured[0]}
    note = (
        f"Measured by python -m zero.plan --calibrate on {date.today():%d %B %Y}: torch {torch.__version__},\n"
        f"CPU time of {_RANKS} ranks at once, one thread each. within: ranks that read one another's memory;\n"
        "between: Gloo, on the same host."
    )
    return hardware_of(means), note


def hardware_of(found: Measured) -> Hardware:
    return Hardware(
        "measured",
        overlaps=False,
        ranks_a_host=1,
        flops={"float32": found["flops"]},
        cache=float(_CACHE),
        within=_link(found, "within"),
        between=_link(found, "between"),
        **{name: found[name] for name in ("memory", "launch", "cached", "elements", "exchange")},
    )


def _link(found: Measured, name: str) -> Link:
    def bandwidth(kind: str, moved: float) -> float:
        """Bytes a second of a rank. moved: the share of the buffer that a rank moves, on two ranks."""
        seconds = found[f"{name} {kind} large"] - found[f"{name} {kind} small"]
        return moved * (SIZES["large"] - SIZES["small"]) / max(1e-9, seconds)

    gather, reduce, all_reduce = bandwidth("gather", 0.5), bandwidth("reduce", 0.5), bandwidth("all-reduce", 1)
    latency = found[f"{name} gather small"] - SIZES["small"] / 2 / gather
    return Link(max(0.0, latency), gather, reduce, all_reduce)


def _run_rank(rank: int, folder: str, results: Queue[Measured | str]) -> None:
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        found: Measured = {}
        for link, host_memory in (("within", "auto"), ("between", "off")):
            store = f"file://{Path(folder, link)}"
            dist.init_process_group("gloo", store, rank=rank, world_size=_RANKS, timeout=_TIMEOUT)
            configure(host_memory=host_memory)
            found |= sending(Comm(), link) | (computing(Comm()) if link == "within" else {})
            dist.destroy_process_group()
        results.put(found)
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")


def _seconds(work: Callable[[], object], times: int, comm: Comm) -> float:
    """CPU time of one call, on all ranks at once."""
    work()
    rounds = []
    for _ in range(ROUNDS):
        comm.all_gather_text("")
        begin = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - begin) / times)
    return statistics.median(rounds)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cpu")


def computing(comm: Comm) -> Measured:
    tokens, width = 256, 512
    x, weight, y = _random(tokens, width), _random(4 * width, width), _random(tokens, 4 * width)
    multiplied = _seconds(lambda: (F.linear(x, weight), y.mm(weight), y.t().mm(x)), 5, comm)
    many, few = _random(2, 1 << 24), _random(2, _CACHE // 16)
    taken, in_cache = _seconds(lambda: many[0].add_(many[1]), 2, comm), _seconds(lambda: few[0].add_(few[1]), 200, comm)
    layers = [[nn.LayerNorm(8, device="cpu"), nn.Linear(8, 8, device="cpu"), nn.GELU()] for _ in range(20)]
    model, little = nn.Sequential(*[nn.Sequential(*layer) for layer in layers]), torch.zeros(2, 8, device="cpu")

    def train() -> None:
        model(little).sum().backward()
        model.zero_grad()

    trace = Trace()
    with Rehearsal(trace), trace.taken():
        train()
    return {
        "flops": 6 * tokens * width * 4 * width / multiplied,
        "memory": 3 * many[0].nbytes / taken,
        "cached": 3 * few[0].nbytes / in_cache,
        "elements": few[0].numel() / _seconds(lambda: F.gelu(few[0]), 20, comm),
        "launch": _seconds(train, 20, comm) / len(trace.tasks),
        "exchange": _seconds(lambda: comm.compare("nothing", ["one line"]), 100, comm) / 2 / (_RANKS - 1),
    }


def sending(comm: Comm, link: str) -> Measured:
    channel = comm.channel("a transfer that is measured")
    found: Measured = {}
    for size, nbytes in SIZES.items():
        full = _random(nbytes // 4)
        half, times = len(full) // _RANKS, max(2, (1 << 22) // nbytes)

        def gather(full: Tensor = full, half: int = half) -> Any:
            return comm.gather(full, [0, half, 2 * half], channel).wait()

        def reduce(full: Tensor = full, half: int = half) -> Any:
            return comm.reduce([(full, [half, half])], times=0.5, channel=channel).wait()

        def all_reduce(full: Tensor = full) -> None:
            full.zero_()
            comm.all_reduce(full)

        for kind, work in (("gather", gather), ("reduce", reduce), ("all-reduce", all_reduce)):
            found[f"{link} {kind} {size}"] = _seconds(work, times, comm)
    return found
