"""Streams of a GPU, simulated: every access to memory comes after what wrote it and before what frees it, and without
any one of the waits in the code it would not."""

from __future__ import annotations

import linecache
import re
import traceback
from functools import cache
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


def run(scenario: str, removed: Site | None = None, *, own_stream: bool = False) -> tuple[str, set[Site]]:
    """What goes wrong, in words: pytest would print tensors whose memory is freed. And where the package has waited."""
    with simulated(removed=removed, own_stream=own_stream) as there:
        told = "" if removed else "nothing has waited: nothing was beside anything"
        try:
            SCENARIOS[scenario](there)
        except Race as race:
            told = f"{race}\n{''.join(traceback.format_tb(race.__traceback__)[-12:])}"
        except Exception:
            told = traceback.format_exc()
        else:
            told = told if not there.device.waited else ""
    return told, {site for site in there.device.waited if WAITS.search(line_of(site))}


def line_of(site: Site) -> str:
    return linecache.getline(f"{PACKAGE}/{site.file}", site.line)


WAITS = re.compile(
    r"\.(wait|wait_stream|wait_event|synchronize|record_stream|begin|release|settle)\(|(?<!self)\.arrive\("
)
"""Of a line by which a stream or the host waits, or that calls what does. A shard group also takes its own events away
by `arrive` when it has waited already."""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_access_comes_after_what_wrote_and_before_what_frees(scenario):
    assert run(scenario)[0] == ""


OTHERS = ["3", "3 hybrid", "3 in 16 bits", "3 full parameters", "3 offloaded", "2 in 16 bits"]


@pytest.mark.parametrize("scenario", OTHERS)
def test_so_it_does_where_a_backend_has_a_stream_of_its_own(scenario):
    assert run(scenario, own_stream=True)[0] == ""


@cache
def waited() -> dict[str, set[Site]]:
    """By scenario, those with the fewest sites first."""
    found = {scenario: run(scenario)[1] for scenario in SCENARIOS}
    return dict(sorted(found.items(), key=lambda one: len(one[1])))


@pytest.mark.timeout(600)
def test_without_any_one_wait_an_access_comes_too_soon():
    needless, scenarios = [], [*waited()]
    for site in sorted(set[Site]().union(*waited().values())):
        runs = ((one, own) for own in (False, True) for one in scenarios if site in waited()[one])
        for scenario, own in runs:
            if "nothing says which comes first" in run(scenario, site, own_stream=own)[0]:
                scenarios.sort(key=lambda one: one != scenario)  # it is tried first for the next site
                break
        else:
            needless.append(f"{site.file} need not wait in {site.function}: {line_of(site).strip()}")
    assert not needless, "\n".join(needless)


ON_STREAMS = re.compile(r"\.(wait_stream|wait_event|synchronize|record_stream)\(|streams\.(begin|release|settle)\(")


def test_every_line_that_waits_for_a_stream_is_tried():
    tried = {(site.file, site.line) for sites in waited().values() for site in sites}
    untried = []
    for folder in ("comm", "shards", "oss", "sdp", "fsdp", "checks", "features"):
        for file in Path(PACKAGE, folder).rglob("*.py"):
            name = file.relative_to(PACKAGE).as_posix()
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if ON_STREAMS.search(line) and (name, number) not in tried:
                    untried.append(f"{name}: {line.strip()}")
    assert not untried, "\n".join(untried)


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
