"""What zero says of itself: a line at construction, and `zero.report`."""

import logging
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.profiler import ProfilerActivity, profile

import ranks
import zero
from logs import Heard
from processes import python
from transports import TRANSPORTS, by

SIZE, HALF = "256 bytes", "128 bytes"


def construct(rank, world, transport):
    with by(transport), Heard() as heard:
        for stage in (2, 3):
            model = nn.Sequential(nn.Linear(16, 3, bias=False), nn.Linear(3, 1, bias=False))
            model[1].weight.requires_grad_(False)
            if stage == 2:
                sharding = zero.OSS([model[0].weight], torch.optim.SGD, lr=0.1)
                zero.ShardedDDP(model, sharding)
            else:
                zero.FSDP(model, ignored_parameters=[model[1].weight])
    return heard.messages


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_construction_says_what_a_rank_holds_in_one_line_on_the_first_rank(transport):
    first, other = ranks.run(construct, 2, (transport,))
    assert other == []
    oss, sdp, fsdp = first
    held = f"optimizer state of 50 % on a rank (DDP: {SIZE}, {SIZE}, 100 %)"
    assert oss == f"stage 1, OSS(SGD) on 2 ranks by {transport}: weights {SIZE}, gradients {SIZE}, {held}"
    frozen = "; left out: 1 parameters that are frozen and in no optimizer"
    where = f"on 2 ranks by {transport}: weights"
    assert sdp == f"stage 2, ShardedDDP(Sequential) {where} {SIZE}, gradients {HALF}, {held}{frozen}"
    assert re.fullmatch(r"stage 3, FSDP\(Sequential, FULL_SHARD\) of 1 unit, the largest .* on 2 ranks .*", fsdp)
    ignored = "; left out: 1 parameters, ignored as the caller asked"
    assert fsdp.endswith(f"{where} {HALF}, gradients {HALF}, {held}{ignored}")


@pytest.mark.parametrize(("stage", "gradients"), [(1, "512 bytes"), (2, "256 bytes"), (3, "512 bytes")])
@ranks.on(2)
def test_the_line_tells_of_masters_and_counts_no_gradients_of_what_is_frozen(rank, world, stage, gradients):
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 64, bias=False).requires_grad_(False))
    with Heard() as heard:
        zero.setup(model, torch.optim.SGD, stage=stage, lr=0.1, precision="bf16")
    assert len(heard.messages) == (rank == 0)
    for line in heard.messages:
        assert line.startswith(f"stage {stage}, ")
        assert f"gradients {gradients}, optimizer state of 50 %{' with masters' if stage < 3 else ''} on" in line


BUILDS = "import torch, zero; zero.OSS([torch.nn.Parameter(torch.ones(16))], torch.optim.SGD, lr=0.1{})"


@pytest.mark.parametrize(
    ("before", "asked", "lines"),
    [("", "", 1), ("", "info", 1), ("", "off", 0), ("import logging; logging.basicConfig(level='INFO'); ", "", 1)],
)
def test_the_line_comes_by_default_and_once(before, asked, lines):
    written = python("-c", before + BUILDS.format(""), ZERO_LOG=asked).stderr
    assert written.count("stage 1, OSS(SGD) on 1 rank by this process alone") == lines


def test_with_offload_the_line_says_how_many_threads_step():
    """torchrun has OMP_NUM_THREADS be 1."""
    written = python("-c", BUILDS.format(", offload=zero.CPUOffload()"), ZERO_LOG="", OMP_NUM_THREADS="1").stderr
    assert written.startswith("zero: stage 1, OSS(SGD)")
    assert written.endswith("; offload CPUOffload, ratio 1.0, stepped by 1 threads of the CPU\n")


WIDE = zero.MixedPrecision(torch.bfloat16)


def of_stage(stage, module):
    """Stages "1" and "3" in float32, "2 masters" and "3 masters" with parameters of 16 bits that compute."""
    if stage == "3 masters":
        model = zero.FSDP(module, precision=WIDE)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    if stage == "2 masters":
        optimizer = zero.OSS(module.bfloat16().parameters(), torch.optim.Adam, lr=0.01, precision="bf16")
        return zero.ShardedDDP(module, optimizer), optimizer
    return zero.setup(module, torch.optim.Adam, stage=int(stage), lr=0.01)


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "state"),
    [("0", 4, 4, 8), ("1", 4, 4, 4), ("2", 4, 2, 4), ("3", 2, 2, 4), ("2 masters", 2, 2, 6), ("3 masters", 2, 2, 4)],
)
@ranks.on(2)
def test_a_report_tells_the_bytes_of_each_parameter(rank, world, stage, parameters, gradients, state):
    """Between backward and step; of two ranks, with the Adam family's two numbers a parameter."""
    torch.manual_seed(0)
    inner = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    inner.register_buffer("scale", torch.ones(1000))
    count, buffers = sum(param.numel() for param in inner.parameters()), 4000 if stage != "2 masters" else 2000
    model, optimizer = of_stage(stage, inner)
    for _ in range(2):
        optimizer.zero_grad()
        before = zero.traffic()
        model(torch.randn(4, 64).to(inner[0].weight.dtype)).square().mean().backward()
        found, sent = zero.report(model, optimizer, since=before), (zero.traffic() - before).total
        optimizer.step()
    expected = (parameters * count + buffers, gradients * count, state * count)
    assert (found.parameters, found.gradients, found.optimizer) == pytest.approx(expected, rel=0.02)
    assert zero.report(inner, [optimizer]).parameters == found.parameters
    assert (found.stage, found.rank, found.world, found.peak) == (stage[0], rank, 2, None)
    assert found.sent == sent and (sent > 0 or stage in "01")  # where gradients may be DistributedDataParallel's
    assert f"stage {stage[0]} (" in str(found) and f"parameters {found.parameters / 2**20:.1f} MiB" in str(found)
    assert found.numbers()["zero/resident_bytes"] == sum((found.parameters, found.gradients, found.optimizer))
    assert "zero/peak_bytes" not in found.numbers() and "zero/planned_bytes" not in found.numbers()


@ranks.on(2)
def test_a_report_tells_the_peak_of_the_plan(rank, world):
    plan = zero.plan(nn.Linear(64, 64), world_size=[2, 4], stages=[2], backend="gloo")
    told = zero.report(*zero.setup(nn.Linear(64, 64), torch.optim.Adam, stage=2), plan=plan)
    assert told.planned == told.numbers()["zero/planned_bytes"] == plan.cost(2, 2).peak
    assert f"planned {told.planned / 2**20:.1f} MiB" in str(told)
    alone = [dist.new_group([one]) for one in range(world)][rank]
    plan_alone = zero.plan(nn.Linear(64, 64), world_size=1, stages=[2], backend="gloo")
    told = zero.report(*zero.setup(nn.Linear(64, 64), torch.optim.Adam, stage=2, process_group=alone), plan=plan_alone)
    assert (told.rank, told.world, told.planned) == (0, 1, plan_alone.cost(2, 1).peak)
    with pytest.raises(KeyError, match="stage 3 on 2 ranks is not in this plan"):
        zero.report(*zero.setup(nn.Linear(64, 64), torch.optim.Adam, stage=3), plan=plan)


# What torch's profiler, and the log at DEBUG, show of a step: the units and buckets by name.


def built(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net, units = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    return zero.setup(net, torch.optim.SGD, stage=stage, lr=0.1, **(units if stage == 3 else {}))


def names(rank: int, world: int, stage: int) -> set[str]:
    model, optimizer = built(stage)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return {event.key for event in profiler.key_averages() if event.key.startswith("zero::")}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_units_and_buckets_are_named_where_they_are_unsharded_resharded_and_reduced():
    for found in ranks.run(names, 2, args=(3,)):
        for unit in ("unit '0'", "unit '1'"):
            for act in ("unshard", "wait_for_unshard", "reshard", "reduce", "wait_for_reduce"):
                assert f"zero::{act} {unit}" in found
    for found in ranks.run(names, 2, args=(2,)):
        assert {name.split()[0] for name in found} >= {"zero::reduce", "zero::unshard", "zero::wait_for_unshard"}


def logged(rank: int, world: int, stage: int, level: int) -> list[str]:
    model, optimizer = built(stage)
    with Heard(level=level) as heard:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return heard.messages


@pytest.mark.parametrize("stage", [2, 3])
def test_every_rank_logs_what_a_step_does_to_each_unit_and_bucket(stage):
    expected = {2: {"reduce", "unshard"}, 3: {"unshard", "reshard", "reduce"}}[stage]
    for rank, lines in enumerate(ranks.run(logged, 2, args=(stage, logging.DEBUG))):
        told = {tuple(line.removeprefix(f"rank {rank}: ").split(" ", 1)) for line in lines}
        assert {act for act, _ in told} >= expected
        assert stage < 3 or {(act, unit) for act in expected for unit in ("unit '0'", "unit '1'")} <= told
    assert ranks.run(logged, 2, args=(stage, logging.INFO)) == [[], []]
