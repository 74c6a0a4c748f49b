"""Streams of a GPU, simulated: every access to memory comes after what wrote it and before what frees it, and without
any one of the waits in the code it would not."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD

import zero
from simulated.device import PACKAGE, Site
from simulated.memory import Race
from simulated.world import Simulated, simulated
from zero.fsdp import MixedPrecision
from zero.oss.flat import FlatGroup
from zero.oss.layout import even

WIDTH, BLOCKS, RANK, WORLD = 8, 3, 1, 4

sgd = partial(SGD, lr=1e-3, momentum=0.9, foreach=True)  # reads no value on the host, as no optimizer does on a GPU


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """With parameters in the root unit, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def only_blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


Step = Callable[[nn.Module, Any], None]


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()


def wrapped(net: nn.Module, comm: Any, **options: Any) -> tuple[nn.Module, Any]:
    model = zero.FSDP(net, process_group=comm, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    return model, sgd(model.parameters())


def stage_3(*, net: Callable[[], nn.Module] = Net, take: Step = step, world: int = WORLD, **options: Any) -> Any:
    def run(there: Simulated) -> None:
        comm = there.comm(min(RANK, world - 1), world)
        groups = (comm, there.comm(0, 2)) if options.get("sharding_strategy") == "HYBRID_SHARD" else comm
        model, optimizer = wrapped(net(), groups, **options)
        for _ in range(3):
            take(model, optimizer)

    return run


def stage_2(*, bucket: int | None = None, take: Step = step, **options: Any) -> Any:
    def run(there: Simulated) -> None:
        of_ddp = {name: options.pop(name) for name in ("overlap_param_gather", "reduce_fp16") if name in options}
        net = Net()
        optimizer = zero.OSS(net.parameters(), sgd, there.comm(RANK, WORLD), **options)
        model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=bucket, **of_ddp)
        for _ in range(3):
            take(model, optimizer)

    return run


def stage_1(**options: Any) -> Any:
    def run(there: Simulated) -> None:
        net = Net()
        optimizer = zero.OSS(net.parameters(), sgd, there.comm(RANK, WORLD), **options)
        for _ in range(3):
            step(net, optimizer)

    return run


def with_clipping(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    (optimizer.clip_grad_norm if isinstance(optimizer, zero.OSS) else model.clip_grad_norm_)(1.0)
    optimizer.step()


def in_two_backwards(model: Any, optimizer: Any) -> None:
    """Gradients are accumulated, those of the first half unreduced."""
    optimizer.zero_grad()
    for context in (model.no_sync(), nullcontext(), nullcontext()):
        with context:
            model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()


def written_before_backward(model: Any, optimizer: Any) -> None:
    """The user writes into shards between forward and backward."""
    loss = model(torch.ones(2, WIDTH)).sum()
    for param in model.blocks.parameters():
        param.data.mul_(0.9)  # other writes autograd refuses
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated_and_written(model: nn.Module, optimizer: Any) -> None:
    """After a forward without a backward the user writes into shards."""
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
        for param in model.parameters():
            param.mul_(0.9)
    step(model, optimizer)


def a_block_by_itself(model: Any, optimizer: Any) -> None:
    """The forward of a unit alone, before a step."""
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    with torch.no_grad():
        model.blocks[1](torch.ones(2, WIDTH))
    optimizer.step()


class Sparing(Block):
    """With a parameter that other ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(64 * WIDTH))  # this rank owns some of it


def of_older_forwards(model: nn.Module, optimizer: Any) -> None:
    """A backward through graphs from before another: it comes to every unit twice, and sends twice."""
    optimizer.zero_grad()
    first, second, third = (model(torch.full((2, WIDTH), scale)).sum() for scale in (0.1, 0.2, 0.3))
    third.backward()
    (first + second).backward()
    optimizer.step()


class Averaging(nn.Sequential):
    """Writes, in forward, into parameters of blocks that are to come: as models do that learn from their average."""

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        with torch.no_grad():
            for param in self[2].parameters():
                param.mul_(0.9)
        for block in [*self][1:]:
            x = block(x)
        return x


HALF = MixedPrecision(param_dtype=torch.bfloat16)

SCENARIOS: dict[str, Any] = {
    "3": stage_3(),
    "3, no parameters in the root": stage_3(net=only_blocks),
    "3 memory first": stage_3(prefetch=zero.MEMORY_FIRST),
    "3 speed first": stage_3(prefetch=zero.SPEED_FIRST),
    "3, gathered after backward": stage_3(prefetch=zero.Prefetch("BACKWARD_POST")),
    "3, two units in flight": stage_3(prefetch=zero.Prefetch("BACKWARD_PRE", limit=2)),
    "3 kept": stage_3(reshard_after_forward=False),
    "3 hybrid": stage_3(sharding_strategy="HYBRID_SHARD"),
    "3 replicated": stage_3(sharding_strategy="NO_SHARD"),
    "3 in 16 bits": stage_3(mixed_precision=HALF),
    "3 whole parameters": stage_3(partition="whole"),
    "3 clipped": stage_3(take=with_clipping),
    "3 accumulated": stage_3(take=in_two_backwards),
    "3 written before backward": stage_3(take=written_before_backward),
    "3 written in forward": stage_3(net=lambda: Averaging(*(Block() for _ in range(BLOCKS)))),
    "3 evaluated": stage_3(take=evaluated_and_written),
    "3 offloaded": stage_3(offload=zero.CPUOffload()),
    "3 offloaded, one rank": stage_3(offload=zero.CPUOffload(), world=1),
    "3 offloaded in 16 bits": stage_3(offload=zero.CPUOffload(), mixed_precision=HALF),
    "3 offloaded, accumulated": stage_3(offload=zero.CPUOffload(), take=in_two_backwards),
    "3 offloaded, evaluated": stage_3(offload=zero.CPUOffload(), take=evaluated_and_written),
    "3 offloaded, a block by itself": stage_3(offload=zero.CPUOffload(), take=a_block_by_itself),
    "3 offloaded, some unused": stage_3(
        offload=zero.CPUOffload(), take=of_older_forwards, net=lambda: nn.Sequential(*(Sparing() for _ in range(2)))
    ),
    "2": stage_2(),
    "2 in small buckets": stage_2(bucket=200, take=with_clipping),
    "2 overlapping": stage_2(bucket=200, overlap_param_gather=True),
    "2 in 16 bits": stage_2(bucket=200, reduce_fp16=True, broadcast_fp16=True),
    "2 overlapping in 16 bits": stage_2(bucket=200, overlap_param_gather=True, broadcast_fp16=True),
    "2 whole parameters": stage_2(bucket=200, partition="whole"),
    "2 accumulated": stage_2(bucket=200, take=in_two_backwards),
    "1": stage_1(),
    "1 in 16 bits": stage_1(broadcast_fp16=True),
}


def problem(scenario: str, removed: Site | None = None, *, own_stream: bool = False) -> str:
    """What goes wrong, in words: pytest would print tensors whose memory is freed."""
    with simulated(removed=removed, own_stream=own_stream) as there:
        try:
            SCENARIOS[scenario](there)
        except Race as race:
            return f"{race}\n{''.join(traceback.format_tb(race.__traceback__)[-12:])}"
        except Exception:
            return traceback.format_exc()
    return "" if there.device.waited else "nothing has waited: nothing was beside anything"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_access_comes_after_what_wrote_and_before_what_frees(scenario):
    assert problem(scenario) == ""


OTHERS = ["3", "3 hybrid", "3 in 16 bits", "3 whole parameters", "3 offloaded", "2 overlapping in 16 bits"]


@pytest.mark.parametrize("scenario", OTHERS)
def test_so_it_does_where_a_backend_has_a_stream_of_its_own(scenario):
    assert problem(scenario, own_stream=True) == ""


# ------------------------------------------------------------------------------------------ without one of the waits

NEEDED_IN: dict[tuple[str, str, str], str] = {
    ("comm/process_group.py", "_await", "work.wait()"): "3",
    ("comm/streams.py", "begin", "self._gathers.wait_stream(self._computing)"): "3, no parameters in the root",
    ("comm/streams.py", "gather", "self._gathers.wait_stream(self._current)"): "2",
    ("comm/streams.py", "reduce", "self._reductions.wait_stream(self._current)"): "3",
    ("comm/streams.py", "_launch", "result = launch().wait()"): "3",
    ("comm/streams.py", "finish", "waiting.wait_event(arrival)"): "3",
    ("comm/streams.py", "to_host", "self._reductions.wait_stream(self._current)"): "3 offloaded, some unused",
    ("comm/streams.py", "release", "self._gathers.wait_stream(self._current)"): "3",
    ("comm/streams.py", "settle", "stream.record_event().synchronize()"): "3 offloaded",
    ("fsdp/backward.py", "_begin", "self._beside.begin()"): "3 written before backward",
    ("fsdp/backward.py", "_finish", "unit.settle()"): "3 offloaded",
    ("fsdp/beside.py", "begin", "streams.begin()"): "3, no parameters in the root",
    ("fsdp/schedule.py", "_enter", "self._beside.begin()"): "3, no parameters in the root",
    ("fsdp/schedule.py", "_leave", "other.settle()"): "3 offloaded, a block by itself",
    ("fsdp/unit.py", "settle", "group.settle()"): "3 offloaded",
    ("fsdp/unit_gradients.py", "_deliver", "flat.settle()"): "3 offloaded, accumulated",
    ("oss/flat.py", "finish", "handle.wait()"): "2 in 16 bits",
    ("oss/flat.py", "finish_gather", "handle.wait()"): "3",
    ("oss/flat.py", "_leave_part", "self.streams.release()"): "3",
    ("oss/flat.py", "settle", "self.streams.settle()"): "3 offloaded",
    ("sdp/bucket.py", "average", "sums: Tensor = handle.wait()"): "3 hybrid",
    ("sdp/bucket.py", "finish", "sums: Tensor = handle.wait()"): "3",
}
"""File, function and text of every line by which a stream or the host waits, and a scenario that needs it."""

WAITING = re.compile(
    r"\.(wait_stream|wait_event|synchronize)\(|(?<!_order)\.settle\(|(_beside|streams)\.(begin|release)\("
)


def lines_of(function: str, file: Path) -> list[tuple[int, str]]:
    """Of all functions of this name."""
    source = file.read_text()
    lines = source.splitlines()
    found = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    return [(n, lines[n - 1].strip()) for node in found for n in range(node.lineno, (node.end_lineno or 0) + 1)]


@pytest.mark.parametrize("place", NEEDED_IN, ids=lambda place: f"{place[0]} {place[1]}")
def test_without_any_one_wait_an_access_comes_too_soon(place):
    file, function, text = place
    lines = [number for number, line in lines_of(function, Path(PACKAGE, file)) if line.split("  #")[0] == text]
    assert lines, "there is no such line any more"
    for line in lines:
        found = [problem(NEEDED_IN[place], Site(file, function, line), own_stream=own) for own in (False, True)]
        if any("nothing says which comes first" in told for told in found):
            return
    pytest.fail(f"{file} need not wait in {function}: {text}")


def test_every_line_that_waits_is_tried():
    for folder in ("comm", "oss", "sdp", "fsdp"):
        for file in Path(PACKAGE, folder).glob("*.py"):
            waiting = {line.strip().split("  #")[0] for line in file.read_text().splitlines() if WAITING.search(line)}
            tried = {text for name, _, text in NEEDED_IN if name == f"{folder}/{file.name}"}
            assert waiting <= tried, (file.name, waiting - tried)


# -------------------------------------------------------------------------------------------------- several streams


@pytest.fixture
def there() -> Any:
    with simulated() as one:
        yield one


def test_the_stream_that_launched_a_transfer_and_the_one_that_waits_both_go_on_after_it(there):
    layout = even([64], WORLD, align=16)
    flat = FlatGroup([nn.Parameter(torch.ones(64))], ["weight"], layout, there.comm(RANK, WORLD), own_part=True)
    other = there.device.Stream()
    flat.launch_gather()
    with there.device.stream(other):
        flat.finish_gather()
    gathers = flat.streams._gathers
    assert other.knows(gathers, gathers.clock[gathers]) and there.device.computing.knows(
        gathers, gathers.clock[gathers]
    )


def test_a_unit_that_runs_on_another_stream_than_the_model_is_refused(there):
    model, _ = wrapped(Net(), there.comm(RANK, WORLD))
    block = model.blocks[1]
    forward = block.forward
    model(torch.ones(2, WIDTH))

    def elsewhere(x: Tensor) -> Tensor:
        with there.device.stream(there.device.Stream()):
            return model.blocks[2](x)

    block.forward = elsewhere
    with pytest.raises(RuntimeError, match=r"unit 'blocks.2' of FSDP runs on another stream .*Run whole steps on one"):
        model(torch.ones(2, WIDTH))
    block.forward = forward


def test_gradients_that_arrive_on_another_stream_are_refused(there):
    net = Net()
    optimizer = zero.OSS(net.parameters(), sgd, there.comm(RANK, WORLD))
    model = zero.ShardedDDP(net, optimizer)
    loss = model(torch.ones(2, WIDTH)).sum()
    another = there.device.stream(there.device.Stream())
    net.blocks[1].down.bias.register_post_accumulate_grad_hook(lambda _: another.__enter__())
    with pytest.raises(RuntimeError, match=r"the gradient of .* arrived on another stream"):
        loss.backward()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_is_not_recorded_into_a_graph(there, stage):
    comm = there.comm(RANK, WORLD)
    net = Net()
    model, optimizer = wrapped(net, comm) if stage == 3 else (net, zero.OSS(net.parameters(), sgd, comm))
    there.device.recording = True
    with pytest.raises(RuntimeError, match="a CUDA graph is being recorded"):
        step(model, optimizer)
