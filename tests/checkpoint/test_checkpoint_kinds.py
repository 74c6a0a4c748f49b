"""What the matrix does not have: models and optimizers of every kind."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from saved import CASE, Counting, adam, differences, read_plainly, steps, tiny, train, whole, with_adam
from torch import Tensor, nn
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


def mixed():
    """Buffers too, but for those of norms."""
    kept = {"keep_fp32": (nn.BatchNorm1d,), "buffer_dtype": torch.bfloat16}
    return zero.FSDP(tiny(), precision=zero.MixedPrecision(param_dtype=torch.bfloat16, **kept))


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
    "mixed": mixed,
    "from meta": from_meta,
    "ignoring": ignoring,
    "kept whole": kept_whole,
}


def of_kinds(rank, world, path, saves):
    found = {}
    for kind, make in KINDS.items():
        model, optimizer = with_adam(make())
        train(model, optimizer, 2 if saves else 1)
        (zero.checkpoint.save if saves else zero.checkpoint.load)(f"{path}/{kind}", model, optimizer)
        then = whole(model, optimizer)
        train(model, optimizer, 2)
        found[kind] = then, whole(model, optimizer)
    return found


@pytest.mark.slow
def test_every_kind_of_stage_3(tmp_path):
    saved = ranks.run(of_kinds, 2, (str(tmp_path), True))[0]
    again, on_three = (ranks.run(of_kinds, world, (str(tmp_path), False))[0] for world in (2, 3))
    for kind, (at_save, in_the_end) in saved.items():
        assert not differences(at_save, again[kind][0]) and not differences(in_the_end, again[kind][1]), kind
        assert not differences(at_save, on_three[kind][0]), kind
        assert not differences(at_save, read_plainly(tmp_path / kind / "00000001")), kind
        plain, optimizer = with_adam(with_experts() if kind == "experts" else tiny())
        zero.checkpoint.load(tmp_path / kind, plain, optimizer)
        assert not differences(at_save, whole(plain, optimizer)), kind


@pytest.mark.slow
@ranks.on(4)
def test_replicas_write_once(rank, world, tmp_path):
    model, optimizer = with_adam(zero.FSDP(CASE.model(), **on_mesh(world, {"replicas": 2})))
    steps(model, optimizer, 0, 1)
    checkpoint = zero.checkpoint.save(tmp_path, model, optimizer, extra={"rank": rank}).path
    assert zero.checkpoint.load(tmp_path, model, optimizer) == {"rank": rank}
    assert len(list(checkpoint.glob("*.safetensors"))) == 2
    assert not differences(whole(model, optimizer), read_plainly(checkpoint))


def two_optimizers(stage):
    """Adafactor keeps a row and a column of each matrix."""
    model = tiny()
    weights, others = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    kinds = partial(torch.optim.Adafactor, lr=1e-2), partial(SGD, lr=0.1, momentum=0.9)
    if stage == 3:
        model = zero.FSDP(model, partition="whole")
        return model, [kind(params) for kind, params in zip(kinds, (weights, others), strict=True)]
    optimizers = [zero.OSS(params, kind) for kind, params in zip(kinds, (weights, others), strict=True)]
    return zero.ShardedDDP(model, optimizers), optimizers


def stepped(model, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.manual_seed(0)
    model(torch.randn(5, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def step_on(rank, world, path, stage, saves):
    """The weights after a step that follows a save after the first step, or a load."""
    model, optimizers = two_optimizers(stage)
    if saves:
        stepped(model, optimizers)
    (zero.checkpoint.save if saves else zero.checkpoint.load)(path, model, optimizers)
    stepped(model, optimizers)
    return zero.full_state_dict(model, to=None)


def test_several_optimizers_and_state_of_other_shapes(tmp_path):
    expected = ranks.run(step_on, 2, (str(tmp_path), 2, True))[0]
    for world in (2, 3):
        found = ranks.run(step_on, world, (str(tmp_path), 3, False))[0]
        for name, value in expected.items():
            if name != "0.bias":  # comes before a BatchNorm: its gradient is rounding alone
                torch.testing.assert_close(found[name], value)


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


COMPILED = {
    "inside FSDP": lambda model: zero.FSDP(torch.compile(model, backend="eager")),
    "around FSDP": lambda model: torch.compile(zero.FSDP(model), backend="eager"),
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
        assert all(
            (param.as_subclass(Tensor) == 7).all() for model in (plain, loaded) for param in model.parameters()
        ), how
        assert plain[0].seen == other[0].seen == 3, how


# `extra`, and modules' extra state.


def save_own(rank, world, path):
    extra = {"own": rank, "shared": (1, None), "nan": math.nan}
    zero.checkpoint.save(path, DistributedDataParallel(tiny()), extra=extra)
    return zero.checkpoint.load(path, DistributedDataParallel(tiny()))


def test_what_differs_between_ranks_returns_to_the_same_ranks_alone(tmp_path):
    found = ranks.run(save_own, 2, (str(tmp_path),))
    with pytest.warns(UserWarning, match=r"^extra\['own'\] differed between the 2 ranks"):
        alone = zero.checkpoint.load(tmp_path, tiny())
    assert [one.pop("own") for one in found] == [0, 1]
    for one in [*found, alone]:
        assert math.isnan(one.pop("nan")) and one == {"shared": (1, None)}


def test_buffers_and_extra_state_of_modules(tmp_path):
    model, other = Counting({"steps": 5}), Counting()
    for module, value in ((model, 2.0), (other, 0.0)):
        module.register_buffer("mean", torch.full((2,), value))
        module.register_buffer("scratch", torch.full((2,), value), persistent=False)
    zero.checkpoint.save(tmp_path, model)
    zero.checkpoint.load(tmp_path, other)
    assert other.seen == {"steps": 5} and (other.mean == 2).all() and (other.scratch == 0).all()


def test_values_of_every_kind_come_back_as_they_were(tmp_path):
    extra = {
        "none": None,
        "infinite": float("-inf"),
        "nested": {"a": [(1, {"b": (2.5, "c")})], "$": 1},
        "keys": {1: "one", (2, 3): "pair"},
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::-1],
        "tensor": torch.arange(4, dtype=torch.bfloat16).view(2, 2),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "complex": 1 - 2j,
        "number": np.int64(1 << 40),
    }
    zero.checkpoint.save(tmp_path, tiny(), extra=extra)
    found = zero.checkpoint.load(tmp_path, tiny())
    assert list(found) == list(extra)
    extra["number"] = 1 << 40  # numpy's numbers come back as Python's
    for name, value in extra.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and np.array_equal(found[name], value)
            assert found[name].flags.writeable
        elif isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)
        else:
            assert found[name] == value


REFUSED = [
    (np.array([object()], dtype=object), "a numpy.ndarray"),
    ({1, 2}, "a builtins.set"),
    (Path("a"), "a pathlib.PosixPath"),
    (torch.ones(2).to_sparse(), "torch.sparse_coo"),
    (adam, "a builtins.function"),
]


def test_what_cannot_be_kept_is_named(tmp_path):
    for value, words in REFUSED:
        with pytest.raises(zero.checkpoint.CheckpointError, match=rf"extra\['a'\]\['b'\] .*{words}"):
            zero.checkpoint.save(tmp_path, tiny(), extra={"a": {"b": value}})
