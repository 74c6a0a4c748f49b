"""What the matrix does not have: models and optimizers of every kind."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from saved import CASE, Counting, adam, differences, read_plainly, steps, tiny, train, whole, with_adam
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import ranks
import zero
from runs import on_mesh


class Experts(nn.Module):
    """Each rank runs the expert of its number; the last is run by none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        return self.experts[dist.get_rank() if dist.is_initialized() else 0](x)


def with_experts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Experts(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def mixed(**precision):
    return zero.FSDP(tiny(), mixed_precision=zero.MixedPrecision(param_dtype=torch.bfloat16, **precision))


def from_meta():
    with torch.device("meta"):
        model = tiny()
    return zero.FSDP(model)


def ignoring():
    model = tiny()
    return zero.FSDP(model, ignored_parameters=[model[0].weight, model[2].bias])


def kept_whole():
    """Shards that are given up while parameters are unsharded are written, and read into, without being pinned down."""
    return zero.FSDP(tiny(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), reshard_after_forward=False)


KINDS = {
    "experts": lambda: zero.FSDP(with_experts(), as_one_unit=[Experts]),
    "mixed": partial(mixed, keep_fp32=(nn.BatchNorm1d,)),
    "mixed buffers": partial(mixed, buffer_dtype=torch.bfloat16),
    "from meta": from_meta,
    "ignoring": ignoring,
    "kept whole": kept_whole,
}


def of_kind(rank, world, path, kind, saves):
    """What it was as it was saved, or loaded, and two steps later."""
    model, optimizer = with_adam(KINDS[kind]())
    train(model, optimizer, 2 if saves else 1)
    (zero.checkpoint.save if saves else zero.checkpoint.load)(path, model, optimizer)
    then = whole(model, optimizer)
    train(model, optimizer, 2)
    return then, whole(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_stage_3(kind, tmp_path):
    at_save, in_the_end = ranks.run(of_kind, 2, (str(tmp_path), kind, True))[0]
    then, later = ranks.run(of_kind, 2, (str(tmp_path), kind, False))[0]
    assert not differences(at_save, then) and not differences(in_the_end, later)
    then, _ = ranks.run(of_kind, 3, (str(tmp_path), kind, False))[2]
    assert not differences(at_save, then)
    assert not differences(at_save, read_plainly(tmp_path / "00000001"))
    plain, optimizer = with_adam(with_experts() if kind == "experts" else tiny())
    zero.checkpoint.load(tmp_path, plain, optimizer)
    assert not differences(at_save, whole(plain, optimizer))


def replicated(rank, world, path, strategy):
    options = on_mesh(world, {"replicas": 2}) if strategy == "HYBRID_SHARD" else {"sharding_strategy": strategy}
    model, optimizer = with_adam(zero.FSDP(CASE.model(), **options))
    steps(model, optimizer, 0, 1)
    zero.checkpoint.save(path, model, optimizer, extra={"rank": rank})
    assert zero.checkpoint.load(path, model, optimizer) == {"rank": rank}
    return whole(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "files"), [("HYBRID_SHARD", 2), ("NO_SHARD", 1), ("SHARD_GRAD_OP", 4)])
def test_replicas_write_once(strategy, files, tmp_path):
    saved = ranks.run(replicated, 4, (str(tmp_path), strategy))[0]
    checkpoint = tmp_path / "00000001"
    assert len(list(checkpoint.glob("*.safetensors"))) == files
    assert not differences(saved, read_plainly(checkpoint))


# --------------------------------------------------------------------------------------------------------- optimizers


def two_optimizers(stage):
    model = tiny()
    weights, others = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    momentum = partial(SGD, lr=0.1, momentum=0.9)
    if stage == 3:
        model = zero.FSDP(model)
        return model, [adam()(weights), momentum(others)]
    optimizers = [zero.OSS(weights, adam()), zero.OSS(others, momentum)]
    return zero.ShardedDDP(model, optimizers), optimizers


def with_rows(stage):
    """Adafactor keeps a row and a column of each matrix."""
    model, optimizer = zero.setup(tiny(), torch.optim.Adafactor, stage=stage, lr=1e-2)
    return model, [optimizer]


def stepped(model, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.manual_seed(0)
    model(torch.randn(5, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def step_on(rank, world, path, stage, build, saves):
    """The weights after a step that follows a save after the first step, or a load."""
    model, optimizers = build(stage)
    if saves:
        stepped(model, optimizers)
    (zero.checkpoint.save if saves else zero.checkpoint.load)(path, model, optimizers)
    stepped(model, optimizers)
    return zero.full_state_dict(model)


@pytest.mark.parametrize(
    ("build", "at", "to"),
    [
        (two_optimizers, 2, [(3, 2)]),
        pytest.param(with_rows, 3, [(0, 1), (1, 3), (2, 2), (3, 4)], marks=pytest.mark.slow),
    ],
)
def test_several_optimizers_and_state_of_other_shapes(build, at, to, tmp_path):
    expected = ranks.run(step_on, 2, (str(tmp_path), at, build, True))[0]
    for stage, world in to:
        found = ranks.run(step_on, world, (str(tmp_path), stage, build, False))[0]
        for name, value in expected.items():
            if name != "0.bias":  # comes before a BatchNorm: its gradient is rounding alone
                torch.testing.assert_close(found[name], value)


def mastered(dtype):
    model = nn.Linear(64, 64, bias=False).to(dtype)
    return model, zero.OSS(model.parameters(), SGD, lr=0.0, master_dtype=torch.float32)


def test_masters_are_those_that_were_saved_whatever_16_bits_the_parameters_have(tmp_path):
    model, optimizer = mastered(torch.float16)
    model(torch.ones(1, 64).half()).sum().backward()
    optimizer.param_groups[0]["lr"] = 1e-5
    optimizer.step()
    expected = zero.full_optimizer_state_dict(model, optimizer)["state"][0]["master"].clone()
    assert not torch.equal(expected, expected.half().float())
    zero.checkpoint.save(tmp_path, model, optimizer)
    model, optimizer = mastered(torch.bfloat16)
    zero.checkpoint.load(tmp_path, model, optimizer)
    model(torch.ones(1, 64).bfloat16()).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(zero.full_optimizer_state_dict(model, optimizer)["state"][0]["master"], expected)


def test_dtypes_are_converted(tmp_path):
    zero.checkpoint.save(tmp_path, tiny().bfloat16())
    model = tiny().double()
    zero.checkpoint.load(tmp_path, model)
    assert model[0].weight.dtype == torch.float64
    assert torch.equal(model[0].weight, tiny()[0].weight.bfloat16().double())


def test_another_order_in_memory(tmp_path):
    saved, optimizer = with_adam(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1)))
    saved(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    zero.checkpoint.save(tmp_path, saved, optimizer)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1))
    found, found_optimizer = with_adam(net.to(memory_format=torch.channels_last))
    zero.checkpoint.load(tmp_path, found, found_optimizer)
    assert found[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not differences(whole(saved, optimizer), whole(found, found_optimizer))


# ----------------------------------------------------------------------------------------------------- compiled models


def compile_part(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


COMPILED = {
    "all": lambda model: torch.compile(model, backend="eager"),
    "a submodule": compile_part,
    "inside FSDP": lambda model: zero.FSDP(torch.compile(model, backend="eager")),
    "around FSDP": lambda model: torch.compile(zero.FSDP(model), backend="eager"),
    "a submodule inside FSDP": lambda model: zero.FSDP(compile_part(model)),
    "inside DDP": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@ranks.on(2)
def test_compiled_models_have_the_names_of_their_modules(rank, world, tmp_path):
    for how, wrap in COMPILED.items():
        inner, plain, other = (nn.Sequential(Counting(), nn.BatchNorm1d(2)) for _ in range(3))
        inner[0].seen = 3
        saved, loaded = wrap(inner), wrap(other)
        with torch.no_grad():
            for param in saved.parameters():
                param.fill_(7.0)
        zero.checkpoint.save(tmp_path / how, saved)
        zero.checkpoint.load(tmp_path / how, plain)
        zero.checkpoint.load(tmp_path / how, loaded)
        assert all((param == 7).all() for model in (plain, loaded) for param in model.parameters()), how
        assert plain[0].seen == other[0].seen == 3, how
        zero.checkpoint.save(tmp_path / f"{how} back", plain)
        zero.checkpoint.load(tmp_path / f"{how} back", loaded)
