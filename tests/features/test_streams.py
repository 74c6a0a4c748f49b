"""Streams of a GPU, simulated: every access to memory comes after what wrote it and before what frees it, and without
any one of the waits in the code it would not."""

from __future__ import annotations

import ast
import re
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero
from simulated.device import PACKAGE, Site
from simulated.memory import Race
from simulated.scenarios import RANK, SCENARIOS, WIDTH, WORLD, net, sgd, step, wrapped
from simulated.world import simulated
from zero._torch import current_stream_of
from zero.shards.group_state import GroupOptions
from zero.shards.layout import even
from zero.shards.placement import Placement
from zero.shards.shard_group import ShardGroup

OWN = GroupOptions(own_shard=True)


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


OTHERS = ["3", "3 hybrid", "3 in 16 bits", "3 full parameters", "3 offloaded", "2 overlapping in 16 bits"]


@pytest.mark.parametrize("scenario", OTHERS)
def test_so_it_does_where_a_backend_has_a_stream_of_its_own(scenario):
    assert problem(scenario, own_stream=True) == ""


STREAMS = "features/streams/__init__.py"

NEEDED_IN: dict[tuple[str, str, str], str] = {
    ("comm/process_group.py", "_await", "work.wait()"): "3",
    (STREAMS, "begin", "self._gathers.wait_stream(self._computing)"): "3, no parameters in the root",
    (STREAMS, "gather", "self._gathers.wait_stream(self._current)"): "2",
    (STREAMS, "reduce", "self._reductions.wait_stream(self._current)"): "3",
    (STREAMS, "_launch", "result = launch().wait()"): "3",
    (STREAMS, "finish", "waiting.wait_event(arrival)"): "3",
    (STREAMS, "to_host", "self._reductions.wait_stream(self._current)"): "1 offloaded",
    (STREAMS, "to_host", "source.record_stream(self._reductions)"): "1 offloaded, with other strides",
    (STREAMS, "release", "self._gathers.wait_stream(self._current)"): "3",
    (STREAMS, "settle", "stream.record_event().synchronize()"): "2 offloaded, written after the step",
    ("fsdp/backward.py", "_begin", "self._model.streams.begin()"): "3 written before backward",
    ("fsdp/backward.py", "_finish", "unit.settle()"): "3 offloaded",
    ("comm/streams.py", "begin", "one.begin()"): "3, no parameters in the root",
    ("checks/guard.py", "_reshard_idle", "unit.settle()"): "3 offloaded, interrupted",
    (STREAMS, "_rounded", "self._sent.pop(0).synchronize()"): "2 offloaded in 16 bits",
    ("shards/owned_shards.py", "stepped", "flat.settle()"): "2 offloaded, written after the step",
    ("shards/shard_group.py", "arrive", "self.departures.pop().synchronize()"): "2 offloaded",
    ("features/offload/beside.py", "widen", "departure.synchronize()"): "2 offloaded in 16 bits, one rank",
    ("features/offload/beside.py", "synchronize", "handle.wait()"): "2 offloaded in 16 bits, one rank",
    (
        "features/offload/pieces.py",
        "arrive",
        "departure.synchronize()",
    ): "2 offloaded, overlapping, stepped in backward",
    ("features/offload/pieces.py", "arrive", "self._departure.synchronize()"): "1 offloaded, overlapping in 16 bits",
    ("fsdp/schedule.py", "_begin_forward", "self._model.streams.begin()"): "3, no parameters in the root",
    ("comm/streams.py", "settle", "one.settle()"): "3 offloaded, a block by itself",
    ("fsdp/schedule.py", "_leave", "self._model.streams.settle()"): "3 offloaded, a block by itself",
    ("fsdp/unit.py", "settle", "group.settle()"): "3 offloaded",
    ("features/penalties/__init__.py", "_before_accumulation", "unit.settle()"): "3 offloaded, with a penalty",
    ("sdp/bucket.py", "_add", "self.group.arrive()"): "3 offloaded, accumulated",
    ("comm/wire.py", "finish", "handle.wait()"): "2 in 16 bits",
    ("shards/shard_group.py", "finish_step", "step.wait()"): "3 offloaded, overlapping",
    ("shards/shard_group.py", "launch_unshard", "self.finish_step()"): "3 offloaded, overlapping, evaluated",
    ("shards/shard_group.py", "outgoing", "self.finish_step()"): "2 offloaded, overlapping",
    ("oss/optimizer.py", "part", "group.settle()"): "2 offloaded, overlapping, written after the step",
    ("shards/shard_group.py", "finish_unshard", "handle.wait()"): "3",
    ("shards/shard_group.py", "reshard", "self.streams.release()"): "3",
    ("shards/shard_group.py", "settle", "self.streams.settle()"): "2 offloaded, written after the step",
    ("shards/shard_group.py", "settle", "self.arrive()"): "3 offloaded in 16 bits, one rank",
    ("features/hybrid/__init__.py", "average", "averages: Tensor = within.wait()"): "3 hybrid",
    ("sdp/bucket.py", "finish", "sums: Tensor = handle.wait()"): "3",
}
"""File, function and text of every line by which a stream or the host waits, and a scenario that needs it."""

WAITING = re.compile(
    r"\.(wait_stream|wait_event|synchronize|record_stream)\(|step\.wait\(|(?<!_order)\.settle\("
    r"|(_beside|streams)\.(begin|release)\("
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
    for folder in ("comm", "shards", "oss", "sdp", "fsdp", "checks", "features"):
        for file in Path(PACKAGE, folder).rglob("*.py"):
            waiting = {line.strip().split("  #")[0] for line in file.read_text().splitlines() if WAITING.search(line)}
            tried = {text for name, _, text in NEEDED_IN if name == file.relative_to(PACKAGE).as_posix()}
            assert waiting <= tried, (file.name, waiting - tried)


@pytest.fixture
def there() -> Any:
    with simulated() as one:
        yield one


def test_the_stream_that_launched_a_transfer_and_the_one_that_waits_both_go_on_after_it(there):
    layout = even([64], WORLD, align=16)
    flat = ShardGroup([nn.Parameter(torch.ones(64))], ["weight"], layout, Placement(there.comm(RANK, WORLD)), OWN)
    other = there.device.Stream()
    flat.launch_unshard()
    with there.device.stream(other):
        flat.finish_unshard()
    gathers = flat.streams._gathers
    assert other.knows(gathers, gathers.clock[gathers]) and there.device.computing.knows(
        gathers, gathers.clock[gathers]
    )


def test_a_unit_that_runs_on_another_stream_than_the_model_is_refused(there):
    model, _ = wrapped(net(), there.comm(RANK, WORLD))
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
    module = net()
    optimizer = zero.OSS(module.parameters(), sgd, there.comm(RANK, WORLD))
    model = zero.ShardedDDP(module, optimizer)
    loss = model(torch.ones(2, WIDTH)).sum()
    another = there.device.stream(there.device.Stream())
    module.blocks[1].down.bias.register_post_accumulate_grad_hook(lambda _: another.__enter__())
    with pytest.raises(RuntimeError, match=r"the gradient of .* arrived on another stream"):
        loss.backward()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_is_not_recorded_into_a_graph(there, stage):
    comm = there.comm(RANK, WORLD)
    module = net()
    model, optimizer = wrapped(module, comm) if stage == 3 else (module, zero.OSS(module.parameters(), sgd, comm))
    there.device.recording = True
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        step(model, optimizer)


def test_the_current_stream_is_looked_up_without_an_object_each_time():
    """For each transfer it is asked for several times, and torch.cuda makes a new object each time."""
    streams = {(7, 0): "the default", (9, 0): "another"}
    now = [(7, 0)]
    with (
        mock.patch.object(torch._C, "_cuda_getCurrentStream", mock.Mock(side_effect=lambda index: now[0]), create=True),
        mock.patch("torch.cuda.current_stream", side_effect=lambda device: streams[now[0]]) as made,
    ):
        current = current_stream_of(torch.device("cuda:0"))
        found = [current(), current()]
        now[0] = (9, 0)
        found += [current(), current()]
    assert found == ["the default"] * 2 + ["another"] * 2
    assert made.call_count == 2
