"""A step of FSDP2 beside one of zero's stage 3, under the same clocks, on GPUs that are not there.

    python benchmarks/clocks.py --world 8 64 512 --tokens 8192

Nothing is run. What FSDP2 launches is recorded over torch's fake process group, on tensors without values: each
operator and collective on the stream that FSDP2 puts it on, and each wait of one stream for another. zero's step is the
rehearsal of zero.plan. Both are played on the same hardware (zero/plan/timeline.py).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from gpt import CONTEXT, GPT, Block
from report import align
from zero.plan import Hardware, Plan, as_hardware
from zero.plan.hardware import Group
from zero.plan.timeline import Timeline, play
from zero.plan.trace import COMPUTE, Task, Trace

PYTHON = 2.0
"""FSDP2's Python for a unit as a multiple of stage 3's: 1,519 us to 750 us beside the model's (benchmarks/host.py)."""

COLLECTIVES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce", "allreduce_": "all-reduce"}


class Streams:
    """In the place of torch.cpu: which stream is the current one, and what each waits for."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._last: dict[str, int] = {}
        """The last task of each stream."""
        self._count = 0
        self._current = self._computing = self._named(COMPUTE)

    def _named(self, name: str) -> mock.Mock:
        stream = mock.Mock()
        stream.name = name
        stream.wait_stream = lambda other: self._wait(name, self._last.get(other.name))
        stream.wait_event = lambda event: self._wait(name, event.after)
        stream.record_event = lambda: self._event(name)
        return stream

    def _wait(self, name: str, after: int | None) -> None:
        if after is not None and self._trace.on:
            self._place(name, Task("wait", name, after=(after,)))

    def _event(self, name: str) -> mock.Mock:
        return mock.Mock(after=self._last.get(name))

    def Stream(self, **_: object) -> mock.Mock:
        self._count += 1
        return self._named(f"stream {self._count}")

    def Event(self) -> mock.Mock:
        event = mock.Mock(after=None)
        event.record = lambda stream=None: setattr(event, "after", self._last.get((stream or self._current).name))
        return event

    def current_stream(self, device: object = None) -> mock.Mock:
        return self._current

    @contextmanager
    def stream(self, stream: mock.Mock) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def begin(self) -> None:
        """A step begins: nothing runs anywhere."""
        self._last.clear()

    def _place(self, name: str, task: Task) -> None:
        self._last[name] = len(self._trace.tasks)
        self._trace.tasks.append(task)

    def put(self, task: Task) -> None:
        """On the current stream, which takes one after another."""
        task.queue, task.after = self._current.name, ()
        self._place(task.queue, task)


class Recorder(TorchDispatchMode):
    """Takes notes of operators and collectives on the streams that they run on."""

    def __init__(self, trace: Trace, streams: Streams, group: Group) -> None:
        super().__init__()
        self._trace, self._streams, self._group = trace, streams, group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operators on what it wraps are seen instead
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if not self._trace.on:
            return result
        if name in COLLECTIVES:
            kind: Any = COLLECTIVES[name]
            nbytes = args[1 if kind == "reduce" else 0].nbytes
            self._streams.put(Task(kind, "", nbytes, kind=kind, group=self._group))
        elif not func.name().startswith("c10d"):
            count = len(self._trace.tasks)
            self._trace.operator(func, args, kwargs or {}, result)
            for task in self._trace.tasks[count:]:
                if name == "all_gather_copy_in":  # which returns the whole buffer, and writes the shard
                    task.nbytes = 2 * sum(shard.nbytes for shard in args[0])
                self._trace.tasks.pop()
                self._streams.put(task)
        return result


def fsdp2(given: argparse.Namespace, world: int, reduce_dtype: torch.dtype) -> Trace:
    """A settled step of it, on rank 0."""
    trace = Trace()
    streams = Streams(trace)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    with ExitStack() as stack:
        for name in ("Stream", "Event", "stream", "current_stream"):
            stack.enter_context(mock.patch.object(torch.cpu, name, getattr(streams, name)))
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (world,))  # which reads values
        stack.enter_context(FakeTensorMode())
        model: Any = build(given)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        batch = batch_of(given)
        stack.enter_context(Recorder(trace, streams, Group(world)))
        for step in range(3):
            streams.begin()
            trace.on = step == 2
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace


def build(given: argparse.Namespace) -> GPT:
    return GPT(given.layers, given.width, tokens=32768, tied=False)


def batch_of(given: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (given.tokens // CONTEXT, CONTEXT)
    return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)


def ours(given: argparse.Namespace, world: int, reduce_dtype: torch.dtype | None, hardware: Hardware) -> Plan:
    with torch.device("meta"):
        model, batch = build(given), batch_of(given)
    return zero.plan(
        model,
        world_size=world,
        optimizer=partial(torch.optim.AdamW, foreach=True),
        precision=zero.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        batch=batch,
        stages=["3"],
        hardware=hardware,
    )


def main() -> None:
    given = read_options(sys.argv[1:])
    hardware = as_hardware(given.hardware)
    lines = [["ranks", "gradients travel as", "who", "step ms", "exposed ms", "used FLOP/s", "/ FSDP2"]]
    for world in given.world:
        for name in given.travel:
            dtype = getattr(torch, name)
            peer = play(fsdp2(given, world, dtype).tasks, replace(hardware, unit=PYTHON * hardware.unit))
            lines.append(row(world, name, "FSDP2", peer, peer))
            for timing in ours(given, world, dtype, hardware).timings:
                lines.append(row(world, name, f"stage 3, {timing.prefetch}", timing.timeline, peer))
    print(align(lines, left=3))


def row(world: int, dtype: str, who: str, found: Timeline, peer: Timeline) -> list[str]:
    ms = [f"{1e3 * found.seconds:.1f}", f"{1e3 * found.exposed:.1f}", f"{found.used:.1%}"]
    return [str(world), dtype, who, *ms, f"{found.seconds / peer.seconds:.3f}"]


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--world", type=int, nargs="+", metavar="N", default=[8, 64, 512], help="ranks (default: 8 64 512)")
    add("--tokens", type=int, metavar="N", default=8192, help="of a rank's step (default: %(default)s)")
    travel = ("float32", "bfloat16")
    add("--travel", nargs="+", choices=travel, default=travel, help="dtypes in which gradients travel (default: both)")
    add("--layers", type=int, metavar="N", default=24, help="blocks of the GPT (default: %(default)s)")
    add("--width", type=int, metavar="N", default=1856, help="numbers a token (default: %(default)s)")
    add("--hardware", metavar="NAME", default="h100-8", help="a preset or a TOML file (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
