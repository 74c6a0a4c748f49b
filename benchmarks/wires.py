"""One real rank of W whose transfers take as long as on a wire: zero beside FSDP2, FSDP1 and an unsharded model.

The other ranks are torch's fake process group. Each collective copies this rank's own values into what it receives, and
is followed, on the stream on which it runs, by a kernel that sleeps as long as its bytes take on the wires: kernels,
streams, allocations and the host's work are real. On the CPU the host sleeps, so that nothing overlaps.

    python benchmarks/wires.py --world 8 --bandwidth 300 --tokens 8192
    python benchmarks/wires.py --world 64 --gpus-a-host 8 --nics 1 --bandwidth 45 --tokens 8192

--bandwidth is that of links between the GPUs of one host. With --gpus-a-host it is that of a NIC, of which a host has
--nics, and --link that of links. What a collective takes depends on its kind (tests/simulated/network.py).

That kernel is of one thread. With --ctas N it is of N programs that copy what arrives, and take their part of the GPU
from the computing, as NCCL's do (ctas.py). Transfers on different streams have the whole bandwidth each; with --one
they follow one another in the order of their launches, as in one communicator.

Every contestant runs in fresh processes, in turn, over and over; its steps run with and without the wires, in turn.
Prints a table of medians, and writes wires.json and wires.png. Without a GPU the default model is tiny.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from contestants import CONTESTANTS, Settings, add_options
from gpt import CONTEXT
from host import FakeWork, bring_own
from launch import Rank, RankFailed, run_one_of
from measure import read_cpu_seconds, wait_for_device
from report import MIB, align, processor

OUT = Path(__file__).parent / "out"
WARM_UP = 3
HEAD = ("", "step ms", "no wires", "host ms", "CPU ms", "allocated", "reserved", "wire ms", "exposed ms")


# ---------------------------------------------------------------------------------------------------- the wires


class Wires:
    """Stands for the network.

    `on`: whether collectives take their time. `seconds`: what those took, or were to take, so far.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.on, self.seconds = True, 0.0
        self._network, self._device = settings.network, device
        self._sleep = time.sleep if device.type == "cpu" else sleeping(settings, device)
        # The event after the last transfer, for which the next one waits.
        self._last = torch.cuda.Event() if settings.one and device.type == "cuda" else None

    def send(self, kind: str, tensor: Tensor, times: int = 1) -> None:
        """kind: as of Network. tensor: of all ranks together, or a part of it that is sent so many times. On a GPU what
        ranks compare on their hosts takes no time of the wires."""
        if tensor.device.type != self._device.type:
            return
        seconds = self._network.seconds(kind, times * tensor.nbytes)
        self.seconds += seconds
        if self.on and self._last is not None:
            self._last.wait()
            self._sleep(seconds)
            self._last.record()
        elif self.on:
            self._sleep(seconds)

    def gather(self, group: dist.ProcessGroup, into: Tensor, tensor: Tensor, options: Any = None) -> dist.Work:
        work = bring_own(group, into, tensor)
        self.send("gather", into)
        return work

    def gather_each(
        self, group: dist.ProcessGroup, into: list[list[Tensor]], tensors: list[Tensor], options: Any = None
    ) -> dist.Work:
        for one in into[0]:
            one.copy_(tensors[0])
        self.send("gather", tensors[0], times=len(into[0]))
        return FakeWork()

    def scatter(self, group: dist.ProcessGroup, into: Tensor, tensor: Tensor, options: Any = None) -> dist.Work:
        work = bring_own(group, into, tensor)
        self.send("reduce", tensor)
        return work

    def all_to_all(self, group: dist.ProcessGroup, into: Tensor, tensor: Tensor, *options: Any) -> dist.Work:
        common = min(into.numel(), tensor.numel())
        into.view(-1)[:common].copy_(tensor.view(-1)[:common])
        self.send("all-to-all", tensor)
        return FakeWork()

    def all_reduce(self, group: dist.ProcessGroup, tensors: list[Tensor], options: Any = None) -> dist.Work:
        self.send("all-reduce", tensors[0])
        return FakeWork()

    def broadcast(self, group: dist.ProcessGroup, tensors: list[Tensor], options: Any = None) -> dist.Work:
        self.send("broadcast", tensors[0])
        return FakeWork()

    def patched(self) -> Any:
        """A context in which process groups use these wires. Versions of torch differ in the names."""
        methods = {
            self.gather: ("all_gather_single", "_allgather_base"),
            self.scatter: ("reduce_scatter_single", "_reduce_scatter_base"),
            self.all_to_all: ("all_to_all_single", "alltoall_base"),
            self.all_reduce: ("allreduce",),
            self.broadcast: ("broadcast",),
            self.gather_each: ("allgather",),
        }
        known = {
            name: lambda *args, by=by: by(*args)  # a plain function is bound to the group
            for by, names in methods.items()
            for name in names
            if hasattr(dist.ProcessGroup, name)
        }
        return mock.patch.multiple(dist.ProcessGroup, **known)


def sleeping(settings: Settings, device: torch.device) -> Callable[[float], object]:
    """Launches a kernel that takes so many seconds."""
    if settings.ctas:
        from ctas import Copies  # needs Triton

        return Copies(settings.ctas, settings.bandwidth, device)
    cycles = cycles_a_second()
    return lambda seconds: torch.cuda._sleep(int(seconds * cycles))


def cycles_a_second() -> float:
    """Of the clock by which torch.cuda._sleep counts."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for cycles in (10**8, 10**9):  # the first warms up
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return cycles / (begin.elapsed_time(end) / 1000)


# ------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True)
class Round:
    """Medians over the steps of one process. host_ms: until the host has launched a step, with the wires.

    allocated, reserved: bytes at the peak of a step, by CUDA's allocator; None without a GPU.
    """

    step_ms: float
    without_ms: float
    host_ms: float
    cpu_ms: float
    allocated: int | None
    reserved: int | None
    wire_ms: float
    exposed_ms: float


def measure(title: str, settings: Settings, rank: Rank) -> dict[str, Any]:
    """One Round, as a dictionary."""
    warnings.simplefilter("ignore")
    wires = Wires(settings, rank.device)
    with wires.patched():
        loss, optimizer = CONTESTANTS[title](settings, rank)
        batch = settings.batch(rank.device)

        def step() -> tuple[float, float, float]:
            """Milliseconds of the step, of the host and of its processors."""
            wait_for_device(rank.device)
            begin, begin_cpu = time.perf_counter(), read_cpu_seconds()
            loss(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            launched = time.perf_counter() - begin
            wait_for_device(rank.device)
            return 1000 * (time.perf_counter() - begin), 1000 * launched, 1000 * (read_cpu_seconds() - begin_cpu)

        for _ in range(WARM_UP):
            step()
        if rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wires.seconds, timed, alone = 0.0, [], []
        for _ in range(settings.steps):
            wires.on = True
            timed.append(step())
            wires.on = False
            alone.append(step()[0])
    step_ms, host_ms, cpu_ms = (statistics.median(figures) for figures in zip(*timed, strict=True))
    exposed = statistics.median(one[0] - other for one, other in zip(timed, alone, strict=True))
    on_gpu = rank.device.type == "cuda"
    found = Round(
        step_ms=step_ms,
        without_ms=statistics.median(alone),
        host_ms=host_ms,
        cpu_ms=cpu_ms,
        allocated=torch.cuda.max_memory_allocated() if on_gpu else None,
        reserved=torch.cuda.max_memory_reserved() if on_gpu else None,
        wire_ms=1000 * wires.seconds / (2 * settings.steps),
        exposed_ms=exposed,
    )
    return asdict(found)


@dataclass(frozen=True)
class Row:
    """The rounds of a contestant; each figure is their median."""

    title: str
    rounds: list[Round]
    stage: str = ""  # bars stand next to one another

    @property
    def ours(self) -> bool:
        return self.title.startswith("zero")

    def median(self, figure: str) -> float | None:
        values = [getattr(one, figure) for one in self.rounds]
        return None if None in values else statistics.median(values)

    def cells(self) -> tuple[str, ...]:
        figures = ("step_ms", "without_ms", "host_ms", "cpu_ms", "allocated", "reserved", "wire_ms", "exposed_ms")
        found = [(figure, self.median(figure)) for figure in figures]
        return self.title, *("-" if value is None else _shown(figure, value) for figure, value in found)


def _shown(figure: str, value: float) -> str:
    return f"{value / MIB:.0f}" if figure in ("allocated", "reserved") else f"{value:.1f}"


def describe(settings: Settings) -> str:
    parameters = sum(param.numel() for param in settings.build(torch.device("meta")).parameters())
    compiled = ", compiled" if settings.compile else ""
    wires = f"{settings.bandwidth:g} GB/s" + ", one communicator" * settings.one
    if settings.network.hosts > 1:
        wires = f"hosts of {settings.gpus_a_host} GPUs and {settings.network.nics_a_host:g} NICs, each of {wires}"
    wires += f", {settings.ctas} CTAs" if settings.ctas else ""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU, {processor()}"
    return (
        f"one rank of {settings.world}, {wires}, {settings.tokens} tokens, GPT of {parameters:,} "
        f"parameters ({settings.layers} blocks of {settings.width}{compiled}), computed in bfloat16, gradients sent in "
        f"{settings.reduce_dtype}, AdamW; {where}, torch {torch.__version__}, {time.strftime('%d %B %Y').lstrip('0')}"
    )


def write(out: Path, settings: Settings, subject: str, rows: list[Row]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    found = {row.title: [asdict(one) for one in row.rounds] for row in rows}
    content = {"subject": subject, "settings": asdict(settings), "contestants": found}
    (out / "wires.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"\nwrote {out / 'wires.json'}")
    try:  # here, since the rank imports this file
        from panels import draw_panels
    except ImportError as error:
        print(f"no picture: {error}")
        return
    panels = {"step, ms": ("step_ms", 1), "exposed, ms": ("exposed_ms", 1), "host, ms": ("host_ms", 1)}
    if torch.cuda.is_available():
        panels |= {"reserved, MiB": ("reserved", MIB)}
    drawn = [
        (title, rows, lambda row, figure=figure, unit=unit: max(0.0, row.median(figure)) / unit)
        for title, (figure, unit) in panels.items()
    ]
    draw_panels(
        out / "wires.png", drawn, title="A training step on a wire that sleeps (lower is better)", caption=subject
    )
    print(f"wrote {out / 'wires.png'}")


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--world", default=8, help="ranks, of which one runs (default: %(default)s)")
    add("--bandwidth", metavar="GB/s", type=float, default=300.0, help="of a link, or a NIC (default: %(default)s)")
    add("--gpus-a-host", default=0, help="ranks of a host (default: all)")
    add("--nics", default=0, help="of a host, where there are several (default: one a GPU)")
    add("--link", metavar="GB/s", type=float, default=300.0, help="within a host of several (default: %(default)s)")
    add_options(parser, CONTESTANTS, tokens=8192 if on_gpu else 256)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    add("--ctas", default=0, help="programs of a transfer's kernel, by Triton; 0: a kernel of one thread that sleeps")
    parser.add_argument("--one", action="store_true", help="transfers wait for one another")
    add("--steps", default=10, help="timed steps a round, with the wires and without (default: %(default)s)")
    add("--rounds", default=3, help="turns of each contestant (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", default=OUT, help="folder of the results (default: %(default)s)")
    given = vars(parser.parse_args())
    rounds, out, only = given.pop("rounds"), given.pop("out"), given.pop("only")
    settings = Settings(**given)
    odd = settings.tokens % CONTEXT or settings.world % (settings.gpus_a_host or 1)
    if odd or min(settings.world, settings.tokens, settings.steps, rounds) < 1:
        parser.error(f"numbers are from 1 up; --tokens is a multiple of {CONTEXT}, --world of --gpus-a-host")
    subject = describe(settings)
    print(subject)
    if not on_gpu:
        print("Without a GPU the host sleeps, nothing overlaps, and the default model is tiny.")
    taken: dict[str, list[Round]] = {title: [] for title in only}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for title in [title for title in only if title not in failed]:
            try:
                taken[title].append(Round(**run_one_of(partial(measure, title, settings), settings.world)))
            except RankFailed as failure:
                failed[title] = str(failure)
    rows = [Row(title, found) for title, found in taken.items() if title not in failed]
    print(f"\n{align([HEAD, *(row.cells() for row in rows)])}")
    write(out, settings, subject, rows)
    if failed:
        sys.exit("".join(f"FAILED: {title}: {told}\n" for title, told in failed.items()))


if __name__ == "__main__":
    main()
