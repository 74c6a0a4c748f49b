"""How long `zero.plan` says that a step takes, on faster and slower hardware, and what of it waits for transfers."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ranks
import zero
from zero.comm import Comm
from zero.plan import (
    Hardware,
    Link,
    Options,
    Plan,
    Sizes,
    Timing,
    as_hardware,
    write_trace,
)
from zero.plan.command import main
from zero.plan.hardware import PRESETS, Group
from zero.plan.rehearsal import Rehearsal
from zero.plan.timeline import play
from zero.plan.trace import COMPUTE, GATHER, HOST, REDUCE, Task, Trace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H100 = PRESETS["h100-8"]
MIXED = zero.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYERS = 6


def planned(tokens: int = 20_000, world: int = 8, hardware: Hardware = H100, **options: Any) -> Plan:
    """Of a model that computes for much longer than it sends, where it has many tokens."""
    sizes = Sizes.of_count(6e7, LAYERS, precision=MIXED)
    how = Options(precision=MIXED, **options.pop("of", {}))
    return zero.plan(sizes, world_size=world, options=how, hardware=hardware, tokens=tokens, **options)


def sent(timing: Timing, queue: str, kind: str | None = None) -> list[float]:
    """Seconds of each transfer there, a gather or reduction by default."""
    spans = timing.timeline.spans
    return [span.end - span.begin for span in spans if span.queue == queue and span.name == (kind or queue)]


@pytest.fixture(scope="module")
def at_stage_3() -> Plan:
    return planned(stages=[3])


# ------------------------------------------------------------------------------------------- what is exposed


def test_a_slower_link_makes_a_step_longer(at_stage_3):
    slow = replace(H100, within=replace(H100.within, bandwidth=H100.within.bandwidth / 100))
    for fast, slower in zip(at_stage_3.timings, planned(stages=[3], hardware=slow).timings, strict=True):
        assert slower.step_ms > 1.5 * fast.step_ms
        assert slower.exposed_ms > 10 * fast.exposed_ms
        assert slower.mfu < fast.mfu


def test_speed_first_exposes_the_first_gather_and_the_last_reduce(at_stage_3):
    """The unit that backward begins with stays from forward."""
    timing = at_stage_3.timing(3, prefetch="speed-first")
    gathers, reduces = sent(timing, GATHER), sent(timing, REDUCE)
    assert (len(gathers), len(reduces)) == (2 * LAYERS - 1, LAYERS)
    assert timing.exposed_ms == pytest.approx(1e3 * (gathers[0] + reduces[-1]), rel=0.15)


def test_memory_first_exposes_every_transfer(at_stage_3):
    timing = at_stage_3.timing(3, prefetch="memory-first")
    moments = sorted((span.begin, span.end) for span in timing.timeline.spans if span.queue in (GATHER, REDUCE))
    covered = until = 0.0
    for begin, end in moments:
        covered, until = covered + max(0.0, end - max(begin, until)), max(until, end)
    assert timing.exposed_ms == pytest.approx(1e3 * covered, rel=0.02)
    assert timing.exposed_ms > 5 * at_stage_3.timing(3, prefetch="speed-first").exposed_ms


def test_stage_2_exposes_the_last_reduce_and_the_gathers_of_the_step():
    sizes = Sizes.of_count(6e7, LAYERS)
    options = Options(bucket_bytes=20 << 20)
    timing = zero.plan(sizes, world_size=8, options=options, stages=[2], hardware=H100, tokens=2000).timing(2)
    assert len(sent(timing, REDUCE)) > 3
    ends = sent(timing, REDUCE)[-1] + sum(sent(timing, GATHER))
    assert timing.exposed_ms == pytest.approx(1e3 * ends, rel=0.2)


def test_few_tokens_hide_nothing(at_stage_3):
    few = planned(tokens=100, stages=[3], hardware=replace(H100, unit=0.0)).timing(3, prefetch="speed-first")
    assert few.exposed_ms > 0.4 * few.step_ms


def test_communication_that_takes_no_time_is_not_exposed():
    none = Link(0.0, float("inf"))
    free = replace(H100, within=none, between=none, collective=0.0, exchange=0.0)
    timing = planned(stages=[3], hardware=free).timing(3, prefetch="speed-first")
    assert round(timing.exposed_ms, 1) == 0


def test_shares_of_flops_are_of_all_that_is_multiplied(at_stage_3):
    timing = at_stage_3.timing(3, prefetch="speed-first")
    assert timing.mfu == pytest.approx(6 * 6e7 * 20_000 / (timing.step_ms * 1e-3 * 989e12), rel=0.01)
    assert 0.5 < timing.mfu < H100.efficiency


def test_a_hybrid_gathers_within_its_host():
    far = replace(H100, between=replace(H100.between, bandwidth=1e9))
    across, hybrid = (
        planned(world=16, stages=["3"], hardware=far, of={"replicas": replicas}).timing(3) for replicas in (1, 2)
    )
    assert max(sent(across, GATHER)) > 5 * max(sent(hybrid, GATHER))
    assert min(sent(hybrid, REDUCE, "all-reduce")) > 5 * max(sent(hybrid, GATHER))  # from host to host


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_are_averaged_bucket_by_bucket_as_they_come(stage):
    sizes = Sizes.of_count(6e7, LAYERS)
    timing = zero.plan(sizes, world_size=8, stages=[stage], hardware=H100, tokens=2000).timing(stage)
    assert len(sent(timing, REDUCE, "all-reduce")) == 240e6 // (25 << 20)
    for_gradients = timing.exposed_ms - 1e3 * sum(sent(timing, GATHER))
    assert 0 < for_gradients < 0.5e3 * sum(sent(timing, REDUCE, "all-reduce"))


def test_a_step_that_launches_too_much_is_as_long_as_its_launches(at_stage_3):
    timing = planned(stages=[2], hardware=replace(H100, launch=1e-3)).timing(2)
    on_host = sum(span.end - span.begin for span in timing.timeline.spans if span.queue == HOST)
    assert timing.step_ms == pytest.approx(1e3 * on_host, rel=0.05)


def test_ranks_are_compared_by_their_hosts(at_stage_3):
    spans = at_stage_3.timing(3, prefetch="speed-first").timeline.spans
    compared = [span for span in spans if span.name == "ranks are compared"]
    assert {span.queue for span in compared} == {HOST}
    assert sum(span.end - span.begin for span in compared) == pytest.approx(
        2 * 7 * H100.exchange
    )  # after backward, before a step
    assert {span.name for span in spans if span.queue == REDUCE} == {"new_zeros", "copy_", "reduce"}


def test_what_prepares_a_transfer_runs_on_its_stream():
    trace = Trace()
    with Rehearsal(trace), trace.taken():
        shard, full, gradient = torch.ones(2), torch.empty(4), torch.ones(4)
        shard.mul_(2)
        full[:2].copy_(shard)
        trace.launch("gather", [full], full.nbytes, Group(2))
        packed = torch.zeros(4)
        packed.copy_(gradient)
        gradient.add_(1)
        trace.launch("reduce", [packed], packed.nbytes, Group(2))
        for part, source in zip(packed.split(2), gradient.split(2), strict=True):
            part.copy_(source)
        trace.launch("reduce", [packed], packed.nbytes, Group(2))
    assert [(task.name, task.queue) for task in trace.tasks[2:]] == [
        ("mul_", COMPUTE),
        ("copy_", GATHER),
        ("gather", GATHER),
        ("zeros", COMPUTE),
        ("copy_", COMPUTE),
        ("add_", COMPUTE),
        ("reduce", REDUCE),
        *[("copy_", REDUCE)] * 2,
        ("reduce", REDUCE),
    ]
    assert trace.tasks[8].after == (6,)  # what wrote into it last
    assert [task.launches for task in trace.tasks[-3:]] == [1, 0, 1], "zero copies all gradients by one operator"


@pytest.mark.parametrize(("hardware", "backend"), [("h100-8", "nccl"), ("cpu", "gloo")])
def test_hardware_decides_the_backend(hardware, backend):
    sizes, other = Sizes.of_count(1e6, 2), {"nccl": "gloo", "gloo": "nccl"}[backend]
    plan = zero.plan(sizes, world_size=2, stages=[3], options=Options(backend=other), hardware=hardware, tokens=1)
    peaks = {
        one: zero.plan(sizes, world_size=2, stages=[3], options=Options(backend=one)).cost(3).peak
        for one in (backend, other)
    }
    assert plan.cost(3).peak == peaks[backend] != peaks[other]


# ----------------------------------------------------------------------------------------------- operators


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).sum()


def of_net(width: int, rows: int, stage: int, hardware: Hardware, **options: Any) -> Timing:
    with torch.device("meta"):
        model = Net(width)
    batch = [torch.zeros(rows, width)]
    return zero.plan(model, world_size=2, batch=batch, stages=[stage], hardware=hardware, **options).timing(stage)


def test_what_a_module_multiplies_is_counted():
    timing = of_net(512, 4096, 0, H100)
    multiplied = 2 * 512 * 512 * 4096 * 5  # forward twice, gradients of both weights and of one input
    assert timing.mfu == pytest.approx(multiplied / (timing.step_ms * 1e-3 * 67e12), rel=0.01)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).sum()


def test_attention_is_counted():
    plan = zero.plan(Attention(), world_size=1, batch=[torch.zeros(2, 512, 64)], stages=[0], hardware=H100)
    timing = plan.timing(0)
    linear, attention = 2 * 2 * 2 * 512 * 64 * 192, 2 * 512 * 512 * 64 * (4 + 10)
    assert timing.mfu * timing.step_ms * 1e-3 * 67e12 == pytest.approx(linear + attention, rel=0.01)


def test_on_the_cpu_nothing_overlaps():
    spans = of_net(64, 64, 3, PRESETS["cpu"]).timeline.spans
    assert all(one.end == pytest.approx(other.begin) for one, other in pairwise(spans))
    assert {span.name for span in spans} >= {"gather", "reduce", "mm"}


# ---------------------------------------------------------------------------------------------- the clocks


def transfer(kind: Any, queue: str, **more: Any) -> Task:
    return Task(kind, queue, 9 * 10**8, kind=kind, group=Group(2), **more)


FAST = replace(H100, launch=0.0, unit=0.0, collective=0.0, within=Link(0.0, 0.45e9))
"""On which that takes a second."""


def test_the_device_waits_unit_by_unit_for_a_host_that_takes_longer():
    """A step is not the longer of both totals: 1 s of computing is not hidden behind the host's later 2 s."""
    second = Task("mm", COMPUTE, 1, flops=round(67e12 * 0.6))
    tasks = [*[transfer("gather", GATHER)] * 2, replace(second, after=(1,))]
    slow = replace(FAST, launch=0.5, unit=1.0, within=Link(0.0, 9e9))
    ends = [span.end for span in play(tasks, slow).spans if span.queue in (GATHER, COMPUTE)]
    assert ends == pytest.approx([1.55, 3.05, 4.5])


def test_transfers_share_the_links():
    alone, both = ([transfer("gather", GATHER), *others] for others in ([], [transfer("reduce", REDUCE)]))
    assert play(alone, FAST).seconds == pytest.approx(1)
    assert play(both, FAST).seconds == pytest.approx(2)


def test_what_was_launched_later_takes_what_time_is_left():
    long = Task("mm", COMPUTE, 1, flops=round(0.5 * 67e12 * 0.6))
    tasks = [long, transfer("gather", GATHER, after=(0,)), transfer("reduce", REDUCE)]
    ends = {span.name: span.end for span in play(tasks, FAST).spans}
    assert (ends["gather"], ends["reduce"]) == pytest.approx((1.5, 2.0))


def test_a_wait_is_exposed_as_far_as_nothing_is_computed_meanwhile():
    half = Task("mm", COMPUTE, 1, flops=round(0.5 * 67e12 * 0.6))
    found = play([transfer("gather", GATHER), half, Task("wait", COMPUTE, after=(0,)), half], FAST)
    assert (found.exposed, found.seconds) == pytest.approx((0.5, 1.5))
    assert found.used == pytest.approx(0.6 * 1 / 1.5)


@pytest.mark.parametrize(
    ("kind", "world", "seconds"),
    [
        ("gather", 8, 7 / 8),
        ("gather", 16, 15 / 16 / 0.8),  # by eight links of 0.1
        ("reduce", 16, 15 / 16 / 0.8),
        ("all-reduce", 8, 2 * 7 / 8),
        ("all-to-all", 8, 7 / 8),
        ("all-to-all", 16, 8 / 16 / 0.1),  # half of it to the other host, by one link
    ],
)
def test_what_a_transfer_takes(kind, world, seconds):
    hardware = replace(H100, within=Link(0.0, 1e9), between=Link(0.0, 1e8), collective=0.0)
    assert sum(hardware.transfer(kind, 10**9, Group(world))) == pytest.approx(seconds)


def test_hops_take_their_time():
    hardware = replace(H100, within=Link(1.0, 1e9), between=Link(100.0, 1e9), collective=1000.0)
    taken = {kind: hardware.transfer(kind, 0, Group(32))[0] for kind in ("gather", "all-reduce")}
    assert taken == {"gather": 1000 + 3 * 100 + 28, "all-reduce": 1000 + 2 * 2 * 100 + 2 * 7}


# -------------------------------------------------------------------------------------------------- results


def test_json_has_the_times(capsys):
    main(["--parameters", "1e7", "--layers", "2", "--world", "8", "--hardware", "h100-8", "--tokens", "4096", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["activations"]
    times = plan["times"]
    assert [(one["stage"], one["prefetch"]) for one in times] == [
        *((stage, None) for stage in "012"),
        ("3 kept", "default"),
        *(("3", name) for name in ("memory-first", "default", "speed-first")),
    ]
    assert all(one["step_ms"] > one["exposed_ms"] >= 0 and 0 < one["mfu"] < 1 for one in times)
    assert {*times[0]} == {"stage", "prefetch", "world", "step_ms", "exposed_ms", "mfu"}


def test_a_prefetch_of_ones_own_is_timed_beside_the_others():
    own = zero.Prefetch("BACKWARD_PRE", limit=2)
    assert [one.prefetch for one in planned(stages=[3], prefetch=own).timings][-1] == "given"


def test_without_hardware_there_are_no_times(tmp_path):
    plan = zero.plan(Sizes.of_count(1e5, 2), world_size=2, stages=[3])
    assert plan.timings == () and json.loads(plan.to_json())["times"] == []
    with pytest.raises(ValueError, match=r"the plan has no times.*hardware='h100-8'"):
        write_trace(plan, tmp_path / "trace.json")


def test_a_trace_has_what_a_step_does_one_after_another(tmp_path, at_stage_3):
    write_trace(at_stage_3, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-6 for one, other in pairwise(row))
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == [timing.title for timing in at_stage_3.timings]
    for process, timing in enumerate(at_stage_3.timings):
        last = max(event["ts"] + event["dur"] for key, row in rows.items() if key[0] == process for event in row)
        assert last == pytest.approx(1e3 * timing.step_ms)


def test_the_command_line_traces_and_tells_of_times(tmp_path, capsys):
    job = ["--parameters", "1e6", "--layers", "2", "--world", "2", "--hardware", "a100-8", "--tokens", "64"]
    main([*job, "--trace", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert "steps on a100-8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardware": "h100-8"}, "a batch, or of a number of tokens a rank: pass one of batch and tokens"),
        ({"tokens": 4}, "pass hardware too"),
        ({"hardware": "h100-8", "tokens": 0}, "tokens=0"),
        ({"hardware": "h200", "tokens": 4}, "hardware='h200' is unknown. Choose of h100-8, a100-8, cpu"),
    ],
)
def test_times_that_cannot_be_told_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zero.plan(Sizes.of_count(1000, 2), world_size=2, **options)


# ---------------------------------------------------------------------------------------------------- files


def test_the_file_in_the_docs_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    (tmp_path / "ours.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    assert as_hardware(tmp_path / "ours.toml") == replace(
        H100, name="ours", flops={"float32": 67e12, "bfloat16": 989e12}
    )


WHOLE = """
name = "ours"
overlaps = true
ranks_a_host = 4
memory = 1e12
launch = 5e-6
[flops]
float32 = 1e13
[within]
latency = 1e-6
bandwidth = 1e11
[between]
latency = 1e-5
bandwidth = 1e10
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("memory = 1e12", "", r"one.toml: 'memory' is missing. Needed are name, overlaps"),
        ("launch = 5e-6", "launch = 5e-6\nlaunches = 1", r"one.toml: 'launches' is unknown. There are name, overlaps"),
        ("latency = 1e-5", "", r"one.toml, \[between\]: 'latency' is missing"),
        ("latency = 1e-6", "latency = 1e-6\nbeta = 2", r"one.toml, \[within\]: 'beta' is unknown"),
        ("[between]\nlatency = 1e-5\nbandwidth = 1e10", "", "one.toml: 'between' is missing"),
        ("float32 = 1e13", "bfloat16 = 1e13", r"one.toml, \[flops\]: 'float32' is missing"),
        ("float32 = 1e13", "float32 = 1e13\nint8 = 1", r"one.toml, \[flops\]: 'int8' is unknown"),
        ("memory = 1e12", "memory = -1", "one.toml: memory is -1. Give a number that is not negative"),
        ("memory = 1e12", "memory = 0", "one.toml: memory is 0"),
        ("overlaps = true", "overlaps = 1", "one.toml: overlaps is 1. Write true or false"),
        ("ranks_a_host = 4", "ranks_a_host =", "one.toml cannot be read"),
    ],
)
def test_a_file_that_is_not_right_is_refused_by_what_is_wrong(tmp_path, before, after, message):
    file = tmp_path / "one.toml"
    file.write_text(WHOLE)
    assert as_hardware(file).ranks_a_host == 4
    assert before in WHOLE
    file.write_text(WHOLE.replace(before, after))
    with pytest.raises(ValueError, match=message):
        as_hardware(file)


def test_what_is_measured_becomes_hardware(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import calibrate

    [hooks] = ranks.run(hooks_measured, 1, bare=True)
    found = ranks.run(measured, 2)[0] | hooks
    hardware = calibrate.hardware_of(found)
    assert hardware.within.bandwidth > 0 and hardware.between.reduce > 0 and hardware.flops["float32"] > 1e8
    assert 1e-7 < hardware.launch < 1e-3 and 0 < hardware.unit < 0.1
    one_gpu, gpus = (calibrate.hardware_of({**found, "bfloat16": 6e14}, number) for number in (1, 2))
    assert one_gpu.within == H100.within and gpus.within == hardware.within
    assert one_gpu.overlaps and one_gpu.flops["bfloat16"] == 6e14 and one_gpu.unit == hardware.unit
    for one in (hardware, one_gpu, gpus, *PRESETS.values()):
        calibrate.write_toml(one, tmp_path / "own.toml", "Two lines\nof it.")
        assert as_hardware(tmp_path / "own.toml").launch == pytest.approx(one.launch, rel=1e-3)


def measured(_: int, __: int) -> dict[str, float]:
    """As quickly as can be."""
    sys.path.insert(0, str(BENCHMARKS))
    import calibrate

    calibrate.ROUNDS, calibrate.SIZES["large"] = 1, 1 << 19
    comm, device = Comm(), torch.device("cpu")
    within = calibrate.sending(comm, "within", device)
    return calibrate.computing(comm, device) | within | calibrate.sending(comm, "between", device)


def hooks_measured(_: int, __: int) -> dict[str, float]:
    sys.path.insert(0, str(BENCHMARKS))
    import calibrate
    from launch import Rank

    dist.init_process_group("fake", rank=4, world_size=8, store=FakeStore())
    return calibrate.hooks(1e-6, 4, 2, Rank(4, 8, torch.device("cpu"), tick=lambda: None))
