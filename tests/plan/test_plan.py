"""What `zero.plan` says, and how: against the ZeRO papers, and objects of large worlds; steps are in test_peaks.py."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import ranks
import zero
from inner import nbytes, shard_groups
from optimizers import Moments, Wrapping
from placements import OPTIMIZERS, Block, Model
from processes import ROOT, python
from zero.plan import Cost, Options, Plan, stages
from zero.plan.command import _count, main
from zero.plan.gpt import gpt_of

MIXED = zero.MixedPrecision(param_dtype=torch.bfloat16)


class Unit(nn.Module):
    """Parameters of these shapes, with which nothing is computed."""

    def __init__(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta")))


def blocks(numel: float, count: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Equal units, each of four parameters, whose sizes are those of the matrices of a transformer's block."""
    shapes = [(round(numel / count * share / 12),) for share in (3, 1, 4, 4)]
    return nn.Sequential(*(Unit(shapes, dtype) for _ in range(count)))


def test_buffers_are_planned_in_the_dtype_that_they_are_computed_with():
    model = nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64))
    model[0].register_buffer("mask", torch.ones(1000))
    given = fsdp.MixedPrecision(buffer_dtype=torch.bfloat16)
    mixed, plain = (zero.plan(model, world_size=2, precision=precision, stages=[3]) for precision in (given, None))
    assert plain.cost(3, world=2).parameters - mixed.cost(3, world=2).parameters == 2000


def test_the_papers_table():
    """ZeRO (arXiv 1910.02054), figure 1: 7.5B parameters, 64 ranks, mixed precision Adam; GB (10^9 bytes).

    At stage 2 gradients are kept in float32, for the masters to be stepped by: 16.9, where the paper has 16.6.
    Stage 0 is planned for a hundredth of the parameters: its masters are compared piece by piece, which takes seconds.
    """
    for stage, paper in enumerate([120, 31.4, 16.6, 1.9]):
        numel = 7.5e9 if stage else 7.5e7
        plan = zero.plan(blocks(numel, 2), world_size=64, precision=MIXED, stages=[stage])
        assert plan.cost(stage).resident / 1e9 * (7.5e9 / numel) == pytest.approx(paper, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "backend", "buckets"),
    [
        (torch.float32, "nccl", 2),
        (torch.bfloat16, "gloo", 2),
        (torch.bfloat16, "nccl", 3),  # gradients of 16 bits arrive beside those that are sent, to be summed in float32
    ],
)
def test_with_offload_parameters_and_buckets_of_gradients_stay_on_the_device(dtype, backend, buckets):
    """ZeRO-Offload (arXiv 2101.06840), section 4: 2 bytes a parameter on the device, 16 on the hosts together."""
    numel, world, bucket = 25 * 10**6, 64, 12 << 20
    options = Options(offload=zero.CPUOffload(), backend=backend, bucket_bytes=bucket)
    plan = zero.plan(blocks(numel, 6, dtype), world_size=world, options=options, stages=[1, 2])
    cost = plan.cost(2)
    assert cost.parameters == pytest.approx(dtype.itemsize * numel, rel=1e-3)
    assert cost.gradients == 0 and cost.optimizer < 200, "all but counts of steps is on the host"
    shard = bucket // world // dtype.itemsize
    at_stage_1 = 16 * numel if dtype == torch.float32 else 14 * numel + 4 * shard * world  # widened bucket by bucket
    assert cost.host * world == pytest.approx(16 * numel, rel=1e-3)
    assert plan.cost(1).host * world == pytest.approx(at_stage_1, rel=1e-2)
    assert cost.peak - cost.parameters <= 1.1 * buckets * bucket


def test_with_a_share_offloaded_the_rest_of_the_state_is_on_the_device():
    numel = 25 * 10**6
    options = Options(offload=zero.CPUOffload(ratio=0.5), master_dtype=torch.float32, bucket_bytes=2 << 20)
    half = zero.plan(blocks(numel, 25, torch.bfloat16), world_size=1, options=options, stages=[2]).cost(2)
    assert half.host == pytest.approx(16 * numel / 2, rel=0.09)  # by whole buckets, of which it has 25
    assert half.host + half.optimizer + half.gradients == pytest.approx(16 * numel, rel=1e-3)


def test_files_are_planned_like_the_memory_of_the_host():
    in_files, in_memory = (
        zero.plan(blocks(1e5, 2), world_size=2, options=Options(offload=offload), stages=[3]).cost(3)
        for offload in (zero.DiskOffload("unused"), zero.CPUOffload())
    )
    assert in_files == in_memory
    assert in_memory.host == pytest.approx(16 * 10**5 / 2, rel=0.01)


def test_large_worlds_against_objects_of_a_fake_process_group():
    world = 4096
    with torch.device("meta"):
        model, policy = Model(96, 1, 70), ModuleWrapPolicy({Block})
        plan = zero.plan(model, world_size=world, auto_wrap_policy=policy, stages=[1, 3])
    [[stage_1, stage_3]] = ranks.run(in_a_fake_world, 1, (world,), bare=True)
    assert stage_1 == plan.cost(1).parameters
    assert stage_3 == plan.cost(3).parameters


def in_a_fake_world(rank: int, _: int, world: int) -> list[int]:
    dist.init_process_group("fake", rank=world // 2, world_size=world, store=FakeStore())
    model = Model(96, 1, 70)
    optimizer = zero.OSS(model.named_parameters(), torch.optim.Adam)
    whole = nbytes(group.full for group in shard_groups(optimizer))
    sharded = zero.FSDP(Model(96, 1, 70), auto_wrap_policy=ModuleWrapPolicy({Block}))
    return [whole, nbytes(group.shard for group in shard_groups(sharded))]


def test_blocks_are_planned_as_the_units_that_fsdp_makes_of_them():
    with torch.device("meta"):
        in_a_list, in_a_sequence = Model(96), Model(96)
    in_a_sequence.blocks = nn.Sequential(*in_a_sequence.blocks)
    plan = partial(zero.plan, world_size=2, stages=[3])
    peak = plan(in_a_sequence).cost(3).peak
    assert peak == plan(in_a_list).cost(3).peak
    assert peak < plan(in_a_sequence, auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d})).cost(3).peak


def test_with_a_limit_of_one_large_embeddings_and_heads_are_units():
    with torch.device("meta"):
        model = Model(96, 2, 1200)
    memory_first = partial(zero.plan, model, world_size=4, prefetch=zero.MEMORY_FIRST, stages=[3])
    one_at_a_time, in_the_root = memory_first(), memory_first(auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert one_at_a_time.cost(3).peak < in_the_root.cost(3).peak - 1.8 * model.words.weight.nbytes


def test_frozen_parameters_have_neither_gradient_nor_state():
    with torch.device("meta"):
        model = Model(96, 2)
    whole = zero.plan(model, world_size=4, stages=[0]).cost(0)
    for param in model.blocks.parameters():
        param.requires_grad_(False)
    frozen = sum(param.nbytes for param in model.blocks.parameters())
    plan = zero.plan(model, world_size=4, stages=[0, 2, 3])
    for stage, shards in [(0, 1), (2, 4), (3, 4)]:
        cost = plan.cost(stage)
        assert cost.gradients == pytest.approx((whole.gradients - frozen) / shards, rel=0.01)
        assert cost.optimizer == pytest.approx((whole.optimizer - 2 * frozen) / shards, rel=0.01)


@pytest.mark.parametrize(
    ("optim", "states"),
    [
        (torch.optim.SGD, 0),
        (OPTIMIZERS["momentum"], 1),
        (torch.optim.Adam, 2),
        (partial(torch.optim.Adam, amsgrad=True), 3),
        (torch.optim.Adafactor, 0),
        (torch.optim.Muon, 1),
        (Moments, 1),  # two, in 16 bits
        (partial(Wrapping, compiled=True), 2),
    ],
)
def test_states_of_an_optimizer_are_those_that_it_makes(optim, states):
    with torch.device("meta"):
        matrix = nn.Linear(64, 64, bias=False)
    cost = zero.plan(matrix, world_size=2, optimizer=optim, stages=[0]).cost(0)
    assert round(cost.optimizer / cost.parameters) == states


def test_a_hybrid_is_cut_within_and_repeated_across():
    model = blocks(1e6, 2)
    hybrid = zero.plan(model, world_size=16, options=Options(replicas=4), stages=[3]).cost(3)
    alone = zero.plan(model, world_size=4, stages=[3]).cost(3)
    assert (hybrid.world, hybrid.resident, hybrid.peak) == (16, alone.resident, alone.peak)
    assert hybrid.sent - alone.sent == pytest.approx(2 * alone.gradients * 3 / 4, rel=0.01)


def test_of_many_ranks_with_unequal_parts_the_one_that_needs_most_is_found(monkeypatch):
    model = nn.Sequential(*(Unit([(n, 64 + 7 * n) for n in range(unit, 50, 19)]) for unit in (5, 2, 3, 4)))
    plan = partial(zero.plan, model, world_size=7, options=Options(partition="whole"), stages=[3])
    found = plan().cost(3)
    monkeypatch.setattr(stages, "_FEW", 7)
    assert found.peak == pytest.approx(plan().cost(3).peak, rel=0.02)


def planned(*peaks: float, memory: float | None, **more: Any) -> Plan:
    """A plan with these peaks, in GiB, of the stages in their order."""
    sent = {"1": 3, "3": 3}
    costs = [
        Cost(stage, 64, 1, 0, 0, peak=int(peak * 2**30), sent=sent.get(stage, 2), **more)
        for stage, peak in zip(stages.STAGES, peaks, strict=True)
    ]
    return Plan(10**8, tuple(costs), None if memory is None else int(memory * 2**30), activations=False)


def test_the_lowest_stage_that_fits_is_taken_and_why():
    plan = planned(3, 0.788, 0.5, 0.3, 0.2, memory=0.7)
    assert plan.recommended(64).stage == "2"
    assert "stage 2 (ShardedDDP and OSS), the lowest that fits in 0.7 GiB: it needs 0.5 GiB" in plan.why(64)
    assert "stage 1 would need 0.788" in plan.why(64) and "DDP itself" not in plan.why(64)
    both = replace(plan, memory=2**30)
    assert both.fits(both.cost(1)) and both.recommended(64).stage == "2"
    assert "which fits in 1.0 GiB" in both.why(64) and both.why(64).endswith(
        "and sends 1.5 times as much: take it for what needs DDP itself"
    )
    assert replace(both, costs=(both.cost(1),)).recommended(64).stage == "1"
    everything = replace(plan, memory=8 * 2**30)
    assert everything.recommended(64).stage == "0"
    assert everything.why(64).endswith("everything fits")
    assert "--memory" in replace(plan, memory=None).why(64)


@pytest.mark.parametrize("offloaded", [False, True])
def test_where_nothing_fits_why_says_what_comes_closest_and_what_would_need_less(offloaded):
    plan = planned(3, 2, 1.5, 0.9, 0.8, memory=0.5, host=2**30 * offloaded)
    assert plan.recommended(64) is None
    assert "nothing fits in 0.5 GiB; stage 3 comes closest with 0.8 GiB, activations not counted" in plan.why(64)
    assert "activation checkpointing" in plan.why(64)
    assert ("CPUOffload" in plan.why(64)) is not offloaded


def test_where_higher_stages_need_more_why_names_them():
    plan = planned(2, 3, 3, 3, 3, memory=2)
    assert plan.recommended(64).stage == "0"
    assert plan.why(64).endswith("of the others 1, 2, 3 kept, 3 do not fit")


@pytest.mark.parametrize("precision", [zero.MixedPrecision(), MIXED], ids=["float32", "mixed"])
def test_the_readmes_table_is_what_is_planned(precision):
    """On the CPU, where optimizers step one parameter after another; bytes and bytes sent, by parameter."""
    section = (ROOT / "README.md").read_text().split("## Which stage to take")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| [0-3]", line)]
    numel, world, units = 10**8, 16, 16
    unit = (precision.param_dtype or torch.float32).itemsize / units
    options = Options(precision=precision, bucket_bytes=round(unit * numel))
    plan = zero.plan(blocks(numel, units), world_size=world, options=options)
    assert [row[0] for row in rows] == [cost.stage for cost in plan.costs]
    for cost, row in zip(plan.costs, rows, strict=True):
        formula = re.fullmatch(r"(.*Ψ(?:/W)?)(?: \+ (?:.* to )?(\d*)B)?", row[2 if precision == MIXED else 1])
        least = eval(formula[1].replace("Ψ", "*1"), {"W": world})
        most = least if formula[2] is None else least + int(formula[2] or 1) * unit
        assert 0.97 * least < cost.peak / numel < 1.02 * most, (cost.stage, formula[0])
        assert cost.sent / plan.cost(0).sent == pytest.approx(float(row[3]), rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": []}, "world_size is empty"),
        ({"world_size": 2, "optimizer": torch.optim.LBFGS}, "LBFGS cannot be sharded"),
        ({"world_size": 6, "options": Options(replicas=4)}, "cannot be divided into 4 replicas"),
        ({"world_size": 2, "stages": ["2", 4]}, "stages has '4'"),
        (
            {"world_size": 2, "stages": [0], "options": Options(offload=zero.CPUOffload())},
            "only stages 1, 2, 3 kept, 3 take it",
        ),
        ({"world_size": 2, "precision": MIXED, "options": Options()}, "precision was given twice"),
        ({"world_size": 2, "model": nn.GELU()}, "has no parameters"),
    ],
)
def test_what_the_stages_would_refuse_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zero.plan(**{"model": blocks(1000, 2), **options})


def test_the_command_line():
    command = ["-m", "zero.plan", "placements:Model", "--world", "8", "--memory", "1GiB"]
    told = json.loads(python(*command, "--json", "--batch", "4x32:int64", cwd=ROOT / "tests").stdout)
    assert [one["world"] for one in told["recommended"]] == [8]
    assert len(told["costs"]) == 5
    assert told["activations"] is True


def test_the_table_has_a_line_for_every_stage_and_world(capsys):
    main(["--parameters", "1M", "--layers", "1", "--world", "8,64", "--memory", "8MiB", "--precision", "mixed"])
    lines = capsys.readouterr().out.splitlines()
    shape = "a GPT of 1 blocks, 248 numbers a token, 1,053 words"
    assert lines[0].startswith(f"999,936 parameters ({shape}), AdamW, mixed; MiB a rank and step; activations not")
    assert [line.split()[:2] for line in lines[3:8]] == [["8", "0"], ["8", "1"], ["8", "2"], ["8", "3"], ["8", "3"]]
    assert lines[-1].startswith("64 ranks: stage 2")


def test_with_offload_the_table_has_the_memory_of_the_host_from_stage_1_on(capsys):
    main(["--parameters", "1M", "--layers", "2", "--world", "1", "--tokens", "64", "--offload", "0.5"])
    lines = capsys.readouterr().out.splitlines()
    assert "activations" not in lines[0]
    assert lines[2].split()[-1] == "host"
    assert [line.split()[1] for line in lines[3:7]] == ["1", "2", "3", "3"]
    hosted = {line.split()[1]: float(line.split()[-1]) for line in lines[3:7]}
    assert all(0 < nbytes < 16 * 10**6 / 2**20 for nbytes in hosted.values()), "a share of 16 bytes a parameter"


@pytest.mark.parametrize(
    ("parameters", "layers", "found"),
    [("7B", 32, 7e9), ("1.3B", 21, 1.3e9), ("350M", 16, 350e6), ("125000000", 12, 125e6), ("1e6", 4, 1e6)],
)
def test_a_number_of_parameters_is_a_gpt_of_that_size(parameters, layers, found):
    model = gpt_of(_count(parameters), None, torch.float32)
    assert len(model.blocks) == layers
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(found, rel=1e-3)


def test_the_command_line_knows_of_one_host(capsys):
    job = ["--parameters", "1e7", "--layers", "2", "--world", "4", "--backend", "gloo", "--json"]
    peaks = []
    for flags in [], ["--one-host"]:
        main([*job, *flags])
        peaks.append({cost["stage"]: cost["peak"] for cost in json.loads(capsys.readouterr().out)["costs"]})
    across, within = peaks
    assert [stage for stage in across if within[stage] < across[stage]] == ["2", "3 kept", "3"]


def test_gathering_further_ahead_needs_more(capsys):
    peaks = []
    for prefetch in "memory-first", "default", "speed-first":
        job = ["--parameters", "1e6", "--layers", "3", "--world", "4", "--backend", "gloo", "--stage", "3"]
        main([*job, "--prefetch", prefetch, "--json"])
        peaks += [cost["peak"] for cost in json.loads(capsys.readouterr().out)["costs"]]
    memory_first, default, speed_first = peaks
    assert memory_first < default < speed_first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "1e999"], "inf parameters: give a finite number"),
        (["--parameters", "10"], "10 parameters are too few for a GPT of 1 layers"),
        (["torch.nn:Linear"], "'torch.nn:Linear' takes arguments .*in_features"),
        (["builtins:dict"], "the model is a dict. Pass a torch.nn.Module"),
        (["placements:Model", "--batch", "2x4:int64,2x4:int64"], "Model.forward cannot be called .* arguments: 2"),
    ],
)
def test_what_the_command_line_cannot_plan_is_one_line(arguments, message):
    with pytest.raises(SystemExit, match=f"^zero.plan: {message}") as exited:
        main(arguments)
    assert "\n" not in str(exited.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a model, as module:factory, or --parameters"),
        (["placements:Model", "--tokens", "64"], "--batch"),
        (["--parameters", "1M", "--batch", "1x64:int64"], "--tokens"),
        (["--parameters", "1M", "--tokens", "0"], "'0' is no number from 1 up"),
        (["--parameters", "1M", "--offload", "1.5"], "'1.5' is no share above 0, up to 1"),
        (["--parameters", "1M", "--memory", "80 apples"], "'80 apples' is no size"),
    ],
)
def test_arguments_that_do_not_fit_say_what_to_pass(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_optimizers_are_torchs_or_the_users_own(capsys):
    job = ["--parameters", "1e5", "--layers", "1", "--world", "2", "--stage", "2", "--json", "--optimizer"]
    states = []
    for name in "Adam", "optimizers:Moments":
        main([*job, name])
        states += [cost["optimizer"] for cost in json.loads(capsys.readouterr().out)["costs"]]
    assert 2 * states[1] == pytest.approx(states[0], rel=0.01)
    with pytest.raises(SystemExit, match="'Optimizer' is no optimizer of torch"):
        main([*job, "Optimizer"])


def test_it_is_a_function_and_a_package():
    import zero.plan as package  # what it binds is the attribute `plan` of zero

    assert package is zero.plan is importlib.import_module("zero.plan")
    assert isinstance(package(nn.Linear(4, 4), world_size=1, stages=[0]), Plan)
    assert inspect.signature(package) == inspect.signature(package.plan)
