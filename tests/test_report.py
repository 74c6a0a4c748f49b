"""What zero says of itself: a line at construction, `zero.report`, and `python -m zero.report`."""

import re
from unittest import mock

import pytest
import torch
from torch import nn

import ranks
import zero
from logs import Heard
from processes import python
from transports import TRANSPORTS, by
from zero.report.environment import environment


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
def test_a_construction_says_what_it_sharded_in_one_line_on_the_first_rank(transport):
    first, *others = ranks.run(construct, 3, (transport,))
    assert others == [[], []]
    oss, sdp, fsdp = first
    where = f"of 1 parameters over 3 ranks, 64 of 192 of their bytes on rank 0, sent by {transport}; left out: "
    assert oss == f"OSS(SGD): optimizer state {where}nothing"
    assert sdp == f"ShardedDDP(Sequential): gradients {where}1 parameters that are frozen and in no optimizer"
    assert re.fullmatch(r"FSDP\(Sequential, .*FULL_SHARD, 1 unit, the largest .*\): parameters and gradients .*", fsdp)
    assert fsdp.endswith(f"{where}1 parameters, ignored as the caller asked")


def test_the_environment_can_ask_for_the_lines():
    code = "import torch, zero; zero.OSS([torch.nn.Parameter(torch.ones(16))], torch.optim.SGD, lr=0.1)"
    written = python("-c", code, ZERO_LOG="info").stderr
    assert "zero INFO: OSS(SGD): optimizer state of 1 parameters over 1 ranks, 64 of 64 of" in written


def test_the_report_tells_versions_devices_and_transports():
    told = environment()
    for expected in ("python: 3", f"torch: {torch.__version__}", "numpy: ", "CPU cores", "gloo", "process_vm_readv"):
        assert expected in told
    assert "could not be determined" not in told


def test_the_report_never_raises():
    broken = mock.Mock(side_effect=RuntimeError("broken"))
    with mock.patch("torch.cuda.is_available", broken), mock.patch("platform.platform", broken):
        told = environment()
    assert "GPUs: could not be determined (RuntimeError: broken)" in told
    assert "transports:" in told


# ------------------------------------------------------------------------------------------------------ zero.report


@pytest.mark.parametrize(
    ("stage", "options", "kind"),
    [
        (1, {}, "1"),
        (2, {"master_dtype": torch.float32}, "2"),
        (3, {"mixed_precision": zero.MixedPrecision(torch.bfloat16)}, "3"),
    ],
    ids=str,
)
@ranks.on(2)
def test_a_report_tells_what_the_plan_told(rank, world, stage, options, kind):
    """Of a settled step, between backward and step."""
    torch.manual_seed(0)
    before = zero.traffic()
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)]
    inner = nn.Sequential(nn.ModuleList(blocks), nn.Linear(64, 8))
    inner.forward = lambda x: inner[1](blocks[3](blocks[2](blocks[1](blocks[0](x)))))
    if stage == 3:
        model = zero.FSDP(inner, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    elif options:
        optimizer = zero.OSS(inner.bfloat16().parameters(), torch.optim.Adam, lr=0.01, **options)
        model = zero.ShardedDDP(inner, optimizer)
    else:
        model, optimizer = zero.setup(inner, torch.optim.Adam, stage=stage, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 64).to(inner[1].weight.dtype)).square().mean().backward()
        found = zero.report(model, optimizer, since=before)
        before = zero.traffic()
        optimizer.step()
    assert zero.report(inner, [optimizer]).parameters == found.parameters
    text, numbers = str(found), found.numbers()
    assert (found.stage, found.rank, found.world, found.peak) == (kind, rank, 2, None)
    planned = found.planned
    resident = (planned.parameters, planned.gradients, planned.optimizer)
    assert (found.parameters, found.gradients, found.optimizer) == pytest.approx(resident, rel=0.02)
    if stage > 1:  # DistributedDataParallel sends by itself
        assert found.sent == pytest.approx(planned.sent, rel=0.1)
    assert f"stage {kind} (" in text
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["here", "planned"]
    assert numbers["zero/resident_bytes"] == found.resident
    assert "zero/peak_bytes" not in numbers


def test_an_optimizer_that_cannot_be_planned_is_reported_without_a_plan():
    model = nn.Linear(4, 4)
    pair = [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]
    assert zero.report(model, pair).planned is None
    assert zero.report(model, torch.optim.LBFGS(model.parameters())).planned is None
    assert "planned" not in str(zero.report(model, pair))


class Around(torch.optim.Optimizer):
    """Another optimizer, with or without state of its own."""

    def __init__(self, optimizer, *, keeps):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        if keeps:
            self.state = {param: {"slow": param.detach().clone()} for param in optimizer.param_groups[0]["params"]}
        else:
            self.state = optimizer.state


@ranks.on(2)
def test_an_optimizer_that_another_wraps_is_found_unless_that_has_state(rank, world):
    model = nn.Linear(64, 64)
    model(torch.ones(1, 64)).sum().backward()
    adam = torch.optim.Adam(model.parameters())
    adam.step()
    alone, shown, around = [
        zero.report(model, one).optimizer for one in (adam, Around(adam, keeps=False), Around(adam, keeps=True))
    ]
    sharding = zero.OSS(model.parameters(), torch.optim.Adam)
    stages = [zero.report(model, one).stage for one in (sharding, Around(Around(sharding, keeps=False), keeps=False))]
    weights = sum(param.nbytes for param in model.parameters())
    assert alone == shown == pytest.approx(2 * weights, rel=0.01)
    assert around == weights
    assert stages == ["1", "1"]


def test_the_command_prints_the_environment():
    written = python("-W", "error", "-m", "zero.report").stdout
    assert "versions:" in written
    assert "transports:" in written


def test_a_model_is_planned_once_and_for_its_own_stage():
    model = nn.Linear(37, 5)
    optimizer = torch.optim.Adam(model.parameters())
    with mock.patch("zero.report.planned.plan", side_effect=zero.plan) as planning:
        first, second = zero.report(model, optimizer), zero.report(model, optimizer)
    assert planning.call_count == 1
    assert planning.call_args.kwargs["stages"] == ["0"]
    assert first.planned is second.planned is not None
    assert first.planned.parameters == first.parameters
