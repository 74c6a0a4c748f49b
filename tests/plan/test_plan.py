"""What `zero.plan` says, and how: against papers, and objects of large worlds. Steps are in parity/test_memory.py."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam
from torch.testing._internal.distributed.fake_pg import FakeStore

import matrix
import ranks
import zero
from inner import nbytes, shard_groups
from optimizers import Moments, Wrapping
from placements import Block, Model
from processes import ROOT, command
from simulated.world import simulated
from zero.plan import Cost, Plan
from zero.plan.gpt import batch_of, gpt_of
from zero.plan.result import COMMUNICATOR, PEER

STAGES = ("0", "1", "2", "3 kept", "3")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "backend", "buckets"),
    [
        (torch.float32, "nccl", 2),
        (torch.bfloat16, "nccl", 3),  # gradients of 16 bits arrive beside those that are sent, to be summed in float32
    ],
)
def test_with_offload_parameters_and_buckets_of_gradients_stay_on_the_device(dtype, backend, buckets):
    """ZeRO-Offload (arXiv 2101.06840), section 4: 2 bytes a parameter on the device, 16 on the hosts together."""
    numel, world = 25 * 10**6, 64
    bucket, how = dtype.itemsize * numel // 8, {"offload": zero.CPUOffload(), "backend": backend}
    cost = zero.plan(blocks(numel, 4, dtype), world_size=world, stages=[2], **how).cost(2)
    assert cost.parameters == pytest.approx(dtype.itemsize * numel, rel=1e-3)
    assert cost.gradients == 0 and cost.optimizer < 200, "all but counts of steps is on the host"
    assert cost.host * world == pytest.approx(16 * numel, rel=1e-3)
    assert cost.peak - cost.parameters <= 1.1 * buckets * bucket


@pytest.mark.slow
@ranks.on(bare=True)
def test_large_worlds_against_objects_of_a_fake_process_group(rank, world):
    world = 1024  # of a fake group
    with torch.device("meta"):
        plan = zero.plan(Model(24, 1, 70), world_size=world, stages=[1, 3])
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    whole = zero.OSS(Model(24, 1, 70).named_parameters(), torch.optim.Adam)
    sharded = zero.FSDP(Model(24, 1, 70))
    assert nbytes(group.full for group in shard_groups(whole)) == plan.cost(1).parameters
    assert nbytes(group.shard for group in shard_groups(sharded)) == plan.cost(3).parameters


@pytest.mark.parametrize(
    ("optim", "states"),
    [
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


def test_what_nccl_takes_beside_torch_is_planned_on_gpus_alone():
    half = zero.MixedPrecision(reduce_dtype=torch.bfloat16)

    def beside(stage: str = "3", world: int = 8, **how: Any) -> float:
        model = nn.Sequential(nn.Linear(8, 8))
        return zero.plan(model, world_size=world, stages=[stage], **how).cost(stage).beside / COMMUNICATOR

    assert (beside(), beside("2"), beside(world=1), beside(backend="gloo")) == (1, 1, 0, 0)
    assert beside(precision=half) == pytest.approx(1 + 7 * PEER / COMMUNICATOR)


def planned(*peaks: float, memory: float | None, **more: Any) -> Plan:
    """A plan with these peaks, in GiB, of the stages in their order."""
    sent = {"1": 3, "3": 3}
    costs = [
        Cost(stage, 64, 1, 0, 0, peak=int(peak * 2**30), sent=sent.get(stage, 2), **more)
        for stage, peak in zip(STAGES, peaks, strict=True)
    ]
    return Plan(10**8, tuple(costs), None if memory is None else int(memory * 2**30), activations=False)


def test_the_lowest_stage_that_fits_is_taken_and_why():
    plan = planned(3, 0.788, 0.5, 0.3, 0.2, memory=0.7)
    both = replace(plan, memory=2**30)
    for one, stage, words in [
        (plan, "2", r"stage 2 .* fits in 0.644 GiB \(0.7 GiB less 8% .* 0.5 GiB.* stage 1 would need 0.788"),
        (both, "2", "fits in 0.92 GiB.* 1.5 times as much: take it to work with full gradients"),
        (replace(both, costs=(both.cost(1),)), "1", "stage 1"),
        (replace(plan, memory=8 * 2**30), "0", "everything fits"),
        (planned(2, 3, 3, 3, 3, memory=2.2), "0", "1, 2, 3 kept, 3 do not fit"),
        (planned(3, 2, 1.5, 0.9, 0.8, memory=2, beside=2**29), "3 kept", r"in 1.3 GiB .*, and about 0.5 GiB for NCCL"),
        (planned(2, 1.9, 1.8, 1.7, 1.6, memory=2), "2", r"in 1.8 GiB \(2.0 GiB less 8% .* stage 1 would need 1.9"),
    ]:
        assert one.recommended(64).stage == stage
        assert re.search(words, one.why(64)), one.why(64)
    assert both.fits(both.cost(1)) and "full gradients" not in plan.why(64)
    assert "--memory" in replace(plan, memory=None).why(64)


@pytest.mark.parametrize("offloaded", [False, True])
def test_where_nothing_fits_why_says_what_comes_closest_and_what_would_need_less(offloaded):
    plan = planned(3, 2, 1.5, 0.9, 0.8, memory=0.85, host=2**30 * offloaded)
    assert plan.recommended(64) is None
    assert re.search("0.782 GiB.* stage 3 .* 0.8 GiB.*activation checkpointing", plan.why(64), re.DOTALL)
    assert ("CPUOffload" in plan.why(64)) is not offloaded


def test_what_is_little_beside_the_peak_is_said_in_a_smaller_unit_or_as_0():
    cost = Cost("2", 8, 640, 40 * 2**20, 2**29, peak=3 * 2**30, sent=0)
    row = Plan(10**8, (cost,), None, activations=True).table().splitlines()[1]
    assert re.split(" {2,}", row.strip()) == ["8", "2", "0", "40.0 MiB", "0.5", "2.5", "3.0", "0"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("precision", [MIXED, zero.MixedPrecision()])
def test_the_table_of_formulas_is_what_is_planned(precision):
    """On the CPU, where optimizers step one parameter after another; bytes and bytes sent, by parameter."""
    section = (ROOT / "docs" / "which_stage.md").read_text().split("## What each stage needs")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| [0-3]", line)]
    numel, world, units = 10**7, 8, 8
    unit = (precision.param_dtype or torch.float32).itemsize / units
    plan = zero.plan(blocks(numel, units), world_size=world, precision=precision, backend="gloo")
    assert [row[0] for row in rows] == [cost.stage for cost in plan.costs]
    for cost, row in zip(plan.costs, rows, strict=True):
        formula = re.fullmatch(r"(.*Ψ(?:/W)?)(?: \+ (?:.* to )?(\d*)B)?", row[2 if precision == MIXED else 1])
        least = eval(formula[1].replace("Ψ", "*1"), {"W": world})
        most = least if formula[2] is None else least + int(formula[2] or 1) * unit
        assert 0.97 * least < cost.peak / numel < 1.03 * most, (cost.stage, formula[0])
        if precision != MIXED:
            assert cost.sent / plan.cost(0).sent == pytest.approx(float(row[3]), rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, r"world_size=\[0\]"),
        ({"world_size": 2.0}, r"world_size=\[2.0\]: pass a number of ranks"),
        ({"stages": []}, "stages has 'none'. Choose of '0'"),
        ({"memory": "1.2.3GiB"}, "'1.2.3GiB' is no size"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS cannot be sharded"),
        ({"stages": ["2", 4]}, "stages has '4'"),
        ({"model": nn.GELU()}, "has no parameters"),
        ({"memory": "24 gigs"}, r"'24 gigs' is no size in one of B, KB, "),
        ({"memory": [1]}, r"memory=\[1\]: pass a number of bytes, or text such as '24GiB'"),
        ({"precision": "half"}, "precision='half' is unknown. Pass 'fp32', 'bf16', 'fp16', a dtype, or a policy"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_to_pass(options, message):
    with pytest.raises(ValueError, match=message):
        zero.plan(**{"model": blocks(1000, 2), "world_size": 2, **options})


def told(capsys: Any, *arguments: str) -> list[str]:
    """The lines that the command prints."""
    assert command("zero.plan", *arguments) == 0
    text: str = capsys.readouterr().out
    return text.splitlines()


TINY = ("--parameters", "1e5", "--layers", "1")


@pytest.mark.slow
def test_the_table_has_a_line_for_every_stage_and_world(capsys):
    lines = told(capsys, *TINY, "--world", "8,64", "--memory", "739MiB", "--precision", "bf16")
    title = " ".join(lines[:2])
    for word in ("parameters (a GPT of 1 blocks", "AdamW, bf16", "MiB a rank", "2,048 tokens a rank are assumed"):
        assert word in title
    assert [line.split()[:2] for line in lines[4:9]] == [["8", "0"], ["8", "1"], ["8", "2"], ["8", "3"], ["8", "3"]]
    assert re.search("64 ranks: stage 2 .* less 8% for what is not counted", " ".join(lines))


@pytest.mark.slow
def test_where_nothing_fits_a_stage_with_offload_is_planned_too():
    adam = partial(torch.optim.AdamW, amsgrad=True)
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), amsgrad=True)  # of which class and defaults are taken
    for stage, numel in ((2, 10**6), (3, 10**7)):  # of a small model stage 3 keeps all in flight
        model = blocks(numel, 6)
        needed = zero.plan(model, world_size=2, optimizer=adam, stages=[2, 3], offload=zero.CPUOffload())
        memory = f"{(needed.cost(stage).peak + COMMUNICATOR) / 0.92 + 2} B"
        plan = zero.plan(model, world_size=2, memory=memory, optimizer=optimizer)
        assert plan.costs[-1].stage == f"{stage} offload" and plan.recommended(2) == plan.costs[-1]
        assert re.search(
            rf"stage {stage} \(.*, offload=zero.CPUOffload\(\)\), .* fits .* and .* of the host", plan.why(2)
        )
        assert plan.costs[-1] == replace(needed.cost(stage), stage=f"{stage} offload")
    plan = zero.plan(model, world_size=2, memory=10**6)
    assert plan.recommended(2) is None and re.search("stage [23] offload comes closest", plan.why(2))


@pytest.mark.slow
def test_with_offload_the_table_has_the_memory_of_the_host_from_stage_1_on(capsys):
    lines = told(capsys, *TINY, "--world", "1", "--offload", "0.5", "--tokens", "64")
    assert lines[1].endswith("; 64 tokens a rank") and lines[3].split()[-1] == "host"
    assert [line.split()[1] for line in lines[4:8]] == ["1", "2", "3", "3"]
    hosted = [float(line.split()[-1]) for line in lines[4:8]]
    assert all(0 < nbytes < 1.1 * 16e5 / 2**20 for nbytes in hosted), "a share of 16 bytes a parameter"


@pytest.mark.slow
def test_the_command_and_the_function_plan_the_same(capsys):
    """By default NCCL, where torch's optimizers step all parameters at once, and 2,048 tokens of a GPT."""
    how = {"world_size": 4, "batch": batch_of(2048), "optimizer": torch.optim.AdamW}
    plan, gloo = (zero.plan(gpt_of(1e6, 2, torch.float32), backend=backend, **how) for backend in ("nccl", "gloo"))
    assert (
        "\n".join(told(capsys, "--parameters", "1e6", "--layers", "2", "--world", "4")[3:9])
        == plan.table()
        != gloo.table()
    )


@pytest.mark.slow
def test_a_model_is_planned_with_a_batch_and_an_optimizer_of_ones_own(capsys):
    job = ["placements:Model", "--world", "4", "--batch", "4x32:int64", "--optimizer"]
    adam, moments = (told(capsys, *job, name)[4:] for name in ("Adam", "optimizers:Moments"))
    assert 2 * float(moments[0].split()[4]) == pytest.approx(float(adam[0].split()[4]), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "1e999"], "inf parameters: give a finite number"),
        (["torch.nn:Linear"], "'torch.nn:Linear' takes arguments .*in_features"),
        (["builtins:dict"], "the model is a dict. Pass a torch.nn.Module"),
        (["placements:Model", "--batch", "2x4:int64,2x4:int64"], "Model.forward cannot be called .* arguments: 2"),
        (["--parameters", "1e5", "--layers", "1", "--optimizer", "Optimizer"], "'Optimizer' is no optimizer of torch"),
    ],
)
def test_what_the_command_line_cannot_plan_is_one_line(arguments, message):
    assert re.fullmatch(f"zero.plan: .*{message}.*", command("zero.plan", *arguments)), "not in one line"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a model, as module:factory, or --parameters"),
        (["placements:Model", "--tokens", "64"], "--batch"),
        (["placements:Model", "--layers", "3"], "--layers are of --parameters"),
        (["--parameters", "1M", "--layers", "0"], "'0' is no number from 1 up"),
        (["--parameters", "1M", "--tokens", "-1"], "'-1' is no number from 1 up"),
        (["--parameters", "1M", "--memory", "80 apples"], "'80 apples' is no size"),
        (["--parameters", "1M", "--memory", "24"], "'24' is no size in one of B, KB, MB, GB, KiB"),
    ],
)
def test_arguments_that_do_not_fit_say_what_to_pass(capsys, arguments, message):
    assert command("zero.plan", *arguments)
    assert message in capsys.readouterr().err


def test_precisions_have_the_names_of_setup_and_a_plan_is_of_its_ranks_alone():
    named, built = (zero.plan(nn.Linear(64, 64), world_size=[2, 4], precision=one) for one in ("bf16", MIXED))
    assert named == built
    with pytest.raises(KeyError, match="8 ranks are not in this plan, which is of 2, 4"):
        named.why(8)


# A model that is run without values, for its activations: it stays what it was, and what cannot be run says why.


@pytest.mark.slow
def test_a_model_that_was_measured_is_left_as_it_was_and_nothing_counts_as_sent():
    model, before = Model(24, 1), zero.traffic()
    assert zero.plan(model, world_size=2, batch=[torch.zeros(1, 2).long()], stages=[3]).cost(3).sent
    with pytest.raises(IndexError):
        zero.plan(model, world_size=2, batch=[torch.zeros(()).long()], stages=[3])
    assert zero.traffic() == before
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(param.grad is None and not param._post_accumulate_grad_hooks for param in model.parameters())


def test_a_model_that_is_frozen_has_a_forward_only():
    model = Model(24, 1).requires_grad_(False)
    plan = zero.plan(model, world_size=2, batch=[torch.zeros(4, 32).long()], stages=[0, 3])
    assert [cost.gradients for cost in plan.costs] == [0] * 2
    assert plan.cost(3).transient > sum(param.nbytes for param in model.blocks[0].parameters())


class Caching(nn.Module):
    """Keeps what it computes in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table: Tensor | None = None
        self.by_length: dict[int, list[Tensor]] = {}
        self.apart = SimpleNamespace(seen=None, calls=0)
        self.itself = [self]

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0, device=x.device)
            self.by_length[len(x)] = [self.table]
            self.apart.seen = self.table
            self.register_buffer("more", self.table)
        self.apart.calls += 1
        return self.linear(x) * self.table * self.by_length[len(x)][0]


@pytest.mark.parametrize("times", [0, 1])
def test_what_a_forward_keeps_is_real(times):
    """Also where it has kept something before that is real."""
    model, x = Caching(), torch.ones(2, 4)
    for _ in range(times):
        model(x)
    table = model.table
    zero.plan(model, world_size=2, batch=[x], stages=[3])
    assert (model.table is table, model.apart.calls) == (True, times)
    assert (len(model.by_length), len([*model.buffers()])) == (times, times) and model.apart.seen is table
    model(x).sum().backward()
    assert type(model.linear.weight.grad) is Tensor
    assert model.linear.weight.grad.isfinite().all()


def test_a_model_that_cannot_be_copied_says_so():
    model = nn.Linear(4, 4)
    model.lock = Lock()
    with pytest.raises(ValueError, match=r"the Linear cannot be copied \(.*lock.*\).*Plan it before"):
        zero.plan(model, world_size=2)


class Linear(nn.Linear):
    """Of four features, and with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.frequencies = torch.arange(4.0)


class NeedsValues(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


class MaskedByValue(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x > 0]


class ByKeyword(Linear):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class WithPlainTensor(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.frequencies


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (NeedsValues, RuntimeError, "its forward needs values"),
        (MaskedByValue, RuntimeError, r"needs values, .*\(aten.*Plan without a batch"),
        (ByKeyword, ValueError, r"ByKeyword.forward .* arguments: 1.*'scale'"),
        (lambda: nn.Sequential(WithPlainTensor()), RuntimeError, r"0\.frequencies .*register_buffer"),
    ],
)
def test_what_cannot_be_run_says_what_to_do(make, error, message):
    with torch.device("meta"):
        model = make()
    with pytest.raises(error, match=message):
        zero.plan(model, world_size=2, batch=[torch.ones(4, 4)], stages=[0, 3])


# What is planned with offload is what is: against steps on the simulated GPU.


BATCH = (torch.zeros(4, 32, dtype=torch.int64),)
POLICY = ModuleWrapPolicy({Block})
adam = partial(Adam, foreach=True)


def measured(stage: str, world: int, offload: Any, precision: zero.MixedPrecision) -> tuple[int, int]:
    """Bytes on the device at the peak of a settled step, and in the CPU's memory between its backward and its step."""
    with simulated() as there:
        how: dict[str, Any] = {"auto_wrap_policy": POLICY, "precision": precision, "offload": offload}
        model = zero.FSDP(Model(layers=2), there.comm(0, world), reshard_after_forward=stage == "3", **how)
        optimizer = adam(model.parameters())
        for _ in range(3):
            there.memory.reset_peaks()
            model(*BATCH).backward()
            held = there.memory.on_cpu()
            optimizer.step()
            optimizer.zero_grad()
        return there.memory.peaks()[0], held


PLANNED = [
    (stage, world, zero.CPUOffload(ratio=ratio), zero.MixedPrecision(param_dtype=dtype))
    for stage in ("3", "3 kept")
    for world in (1, 2)
    for ratio in (1.0, 0.5)
    for dtype in (None, torch.bfloat16)
]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "world", "offload", "precision"),
    PLANNED if matrix.WHOLE else [PLANNED[number] for number in (6, 9)],
    ids=str,
)
def test_offload_at_stage_3_is_planned_within_one_percent(stage, world, offload, precision):
    how = {"optimizer": adam, "auto_wrap_policy": POLICY, "batch": BATCH, "offload": offload, "precision": precision}
    cost = zero.plan(Model(layers=2), world_size=world, stages=[stage], **how).cost(stage)
    peak, held = measured(stage, world, offload, precision)
    assert cost.peak == pytest.approx(peak, rel=0.01)
    assert cost.host == pytest.approx(held, rel=0.01)
