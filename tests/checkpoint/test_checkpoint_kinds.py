"""What the matrix does not have: replicas, several optimizers, state of other shapes, dtypes and ties that differ."""

import json

import pytest
import torch
import torch.distributed as dist
from saved import CASE, Blockwise, Config, adam, differences, read_plainly, steps, tiny, train, whole, with_adam
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero
from zero.checkpoint.format import Entry, ParamShard, geometry_of


def replicated(rank, world, path, strategy):
    mesh = init_device_mesh("cpu", (2, world // 2)) if strategy == "HYBRID_SHARD" else None
    build = lambda: zero.FSDP(CASE.model(), sharding_strategy=strategy, device_mesh=mesh)  # noqa: E731
    model, other = build(), build()
    optimizer, other_optimizer = adam()(model.parameters()), adam()(other.parameters())
    steps(model, optimizer, 0, 2)
    zero.checkpoint.save(path, model, optimizer, extra={"rank": rank})
    assert zero.checkpoint.load(path, other, other_optimizer) == {"rank": rank}
    assert not differences(whole(model, optimizer), whole(other, other_optimizer))
    return whole(model, optimizer)


@pytest.mark.parametrize(("strategy", "files"), [("HYBRID_SHARD", 2), ("NO_SHARD", 1), ("SHARD_GRAD_OP", 4)])
def test_replicas_write_once_and_all_load(strategy, files, tmp_path):
    saved = ranks.run(replicated, 4, (str(tmp_path), strategy))[0]
    checkpoint = tmp_path / "00000001"
    assert len(list(checkpoint.glob("*.safetensors"))) == files
    assert not differences(saved, read_plainly(checkpoint))


@ranks.raises(4, "CheckpointError", "differ between ranks")
def test_a_problem_in_one_replica_is_raised_in_all(rank, world, tmp_path):
    path = str(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2))
    model = zero.FSDP(CASE.model(), sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    zero.checkpoint.save(path if rank != 3 else path + "x", model)


def save(rank, world, path, stage, build, step):
    """Saves after a step. The weights after another one."""
    model, optimizers = build(stage)
    step(model, optimizers)
    zero.checkpoint.save(path, model, optimizers)
    step(model, optimizers)
    return zero.full_state_dict(model)


def load(rank, world, path, stage, build, step):
    model, optimizers = build(stage)
    zero.checkpoint.load(path, model, optimizers)
    step(model, optimizers)
    return zero.full_state_dict(model)


def two_optimizers(stage):
    model = tiny()
    weights, others = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    if stage == 3:
        model = zero.FSDP(model)
        return model, [adam()(weights), torch.optim.SGD(others, lr=0.1, momentum=0.9)]
    optimizers = [zero.OSS(weights, torch.optim.Adam, lr=1e-2), zero.OSS(others, torch.optim.SGD, lr=0.1, momentum=0.9)]
    return zero.ShardedDDP(model, optimizers), optimizers


def train_both(model, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.ones(5, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_several_optimizers(tmp_path):
    how = two_optimizers, train_both
    expected = ranks.run(save, 2, (str(tmp_path), 2, *how))[0]
    found = ranks.run(load, 2, (str(tmp_path), 3, *how))[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def with_rows(stage):
    """Adafactor keeps a row and a column of each matrix."""
    return zero.setup(tiny(), torch.optim.Adafactor, stage=stage, lr=1e-2)


def test_state_of_other_shapes_than_the_parameter(tmp_path):
    how = with_rows, train
    expected = ranks.run(save, 2, (str(tmp_path), 3, *how))[0]
    for stage, world in [(0, 1), (1, 3), (2, 2), (3, 4)]:
        found = ranks.run(load, world, (str(tmp_path), stage, *how))[0]
        for name, value in expected.items():
            if name != "0.bias":  # comes before a BatchNorm: its gradient is rounding alone
                torch.testing.assert_close(found[name], value)


def save_blocks(rank, world, path):
    model = CASE.model()
    optimizer = zero.OSS(model.parameters(), Blockwise, lr=0.1, granularity=8)
    steps(DistributedDataParallel(model, **CASE.ddp), optimizer, 0, 1)
    zero.checkpoint.save(path, model, optimizer)


def test_state_whose_place_is_not_known(tmp_path):
    ranks.expect_error(
        save_blocks, 2, "CheckpointError", "absmax has shape", "partition='whole'", args=(str(tmp_path),)
    )
    assert not list(tmp_path.iterdir())


def test_dtypes_are_converted_and_integers_are_not(tmp_path):
    zero.checkpoint.save(tmp_path, tiny().bfloat16())
    model = tiny().double()
    zero.checkpoint.load(tmp_path, model)
    assert model[0].weight.dtype == torch.float64
    assert torch.equal(model[0].weight, tiny()[0].weight.bfloat16().double())
    model[1].num_batches_tracked = torch.tensor(0.0)
    with pytest.raises(zero.checkpoint.CheckpointError, match=r"num_batches_tracked \(saved int64 \[\], here float32"):
        zero.checkpoint.load(tmp_path, model)


def pair(*, tied):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if tied:
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_ties_that_differ(tied, tmp_path):
    zero.checkpoint.save(tmp_path, pair(tied=tied))
    with pytest.raises(zero.checkpoint.CheckpointError, match=r"1\.weight and 0\.weight were"):
        zero.checkpoint.load(tmp_path, pair(tied=not tied))


def test_another_order_in_memory(tmp_path):
    saved, optimizer = with_adam(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1)))
    saved(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    zero.checkpoint.save(tmp_path, saved, optimizer)
    found, found_optimizer = with_adam(
        nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1)).to(memory_format=torch.channels_last)
    )
    zero.checkpoint.load(tmp_path, found, found_optimizer)
    assert found[0].weight.is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(saved.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, found_optimizer.state[other][key])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dim", range(4))
def test_slices_of_tensor_parallel_ranks_are_counted_one_after_another(dim, channels_last):
    full = torch.arange(5.0 * 4 * 3 * 7).view(5, 4, 3, 7)
    full = full.to(memory_format=torch.channels_last) if channels_last else full
    width, stop = -(-full.shape[dim] // 3), 0
    for number in range(3):
        local = full.narrow(dim, start := min(number * width, full.shape[dim]), min(width, full.shape[dim] - start))
        if local.numel():
            own = geometry_of(local.clone())
            part = own.part(full.shape, dim, width, number)
            entry = Entry.from_json(
                json.loads(json.dumps(Entry(part.full, (ParamShard("", "", 0, 420),) * 7).to_json()))
            )
            assert entry.geometry == part.full and entry.problem() == "lacks elements from 420"
            counted = torch.cat([part.full.flat(one) for one in part.full.cut(full)])
            assert part.start == stop and torch.equal(counted[part.start : part.stop], own.flat(local))
            stop = part.stop
    assert stop == full.numel()


@ranks.raises(2, "CheckpointError", "Save and load between steps")
def test_not_while_parameters_are_summoned(rank, world, tmp_path):
    model, _ = Config().build(3)
    with model.summon_full_params():
        zero.checkpoint.save(tmp_path, model)


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


def experts():
    return zero.FSDP(with_experts(), as_one_unit=[Experts])


def mixed():
    precision = zero.MixedPrecision(param_dtype=torch.bfloat16, keep_fp32=(nn.BatchNorm1d,))
    return zero.FSDP(tiny(), mixed_precision=precision)


def mixed_buffers():
    precision = zero.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    return zero.FSDP(tiny(), mixed_precision=precision)


def from_meta():
    with torch.device("meta"):
        model = tiny()
    return zero.FSDP(model)


def ignoring():
    model = tiny()
    return zero.FSDP(model, ignored_parameters=[model[0].weight, model[2].bias])


KINDS = {kind.__name__: kind for kind in [experts, mixed, mixed_buffers, from_meta, ignoring]}


def built(kind, first):
    model, optimizer = with_adam(KINDS[kind]())
    train(model, optimizer, first)
    return model, optimizer


def go_on(model, optimizer):
    train(model, optimizer, 2)
    return whole(model, optimizer)


def save_kind(rank, world, path, kind):
    model, optimizer = built(kind, 2)
    zero.checkpoint.save(path, model, optimizer)
    return whole(model, optimizer), go_on(model, optimizer)


def load_kind(rank, world, path, kind):
    model, optimizer = built(kind, 1)
    zero.checkpoint.load(path, model, optimizer)
    return whole(model, optimizer), go_on(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_stage_3(kind, tmp_path):
    at_save, in_the_end = ranks.run(save_kind, 2, (str(tmp_path), kind))[0]
    then, later = ranks.run(load_kind, 2, (str(tmp_path), kind))[0]
    assert not differences(at_save, then) and not differences(in_the_end, later)
    then, _ = ranks.run(load_kind, 3, (str(tmp_path), kind))[2]
    assert not differences(at_save, then)
    assert not differences(at_save, read_plainly(tmp_path / "00000001"))
    plain, optimizer = with_adam(with_experts() if kind == "experts" else tiny())
    zero.checkpoint.load(tmp_path, plain, optimizer)
    assert not differences(at_save, whole(plain, optimizer))


def diverged(rank, world, path, place):
    model = ignoring() if place == "ignored" else tiny()
    if place == "state":
        model.requires_grad_(False)[2].bias.requires_grad_(True)
    optimizer = adam()([param for param in model.parameters() if param.requires_grad])
    train(model, optimizer)
    name = "0.weight" if place == "ignored" else "2.bias"
    param = dict(getattr(model, "module", model).named_parameters())[name]
    with torch.no_grad():
        changed = optimizer.state[param]["exp_avg"] if place == "state" else param
        changed.view(-1)[0] += rank
    zero.checkpoint.save(path, model, optimizer)


@pytest.mark.parametrize(
    ("place", "path"),
    [("ignored", "model/0.weight"), ("plain", "model/2.bias"), ("state", "optimizer/0/2.bias/exp_avg")],
)
def test_what_differs_between_ranks_is_not_taken_for_the_same(place, path, tmp_path):
    messages = ("no wrapper synchronises differ between ranks", f"rank 1 has {path}")
    ranks.expect_error(diverged, 2, "CheckpointError", *messages, args=(str(tmp_path), place))
    assert not list(tmp_path.iterdir())


def compile_part(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


COMPILED = {
    "all": lambda model: torch.compile(model, backend="eager"),
    "under OSS": lambda model: torch.compile(model, backend="eager"),
    "a submodule": compile_part,
    "inside FSDP": lambda model: zero.FSDP(torch.compile(model, backend="eager")),
    "around FSDP": lambda model: torch.compile(zero.FSDP(model), backend="eager"),
    "a submodule inside FSDP": lambda model: zero.FSDP(compile_part(model)),
    "inside DDP": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
}


class Counting(nn.Linear):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def counting():
    torch.manual_seed(0)
    return nn.Sequential(Counting(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@ranks.on(2)
def test_compiled_models_have_the_names_of_their_modules(rank, world, tmp_path):
    for how, wrap in COMPILED.items():
        saved, plain, loaded = counting(), counting(), counting()
        saved[0].seen = 3
        inner = (saved[0], loaded[0])
        stage_1 = how == "under OSS"
        optims = (
            [zero.OSS(one.parameters(), torch.optim.SGD, lr=0.1) for one in (saved, loaded)] if stage_1 else [None] * 2
        )
        saved, loaded = wrap(saved), wrap(loaded)
        with torch.no_grad():
            for param in saved.parameters():
                param.fill_(7.0)
        zero.checkpoint.save(f"{tmp_path}/{how}", saved, optims[0])
        zero.checkpoint.load(f"{tmp_path}/{how}", plain)
        assert all((param == 7).all() for param in plain.parameters()) and plain[0].seen == 3, how
        zero.checkpoint.save(f"{tmp_path}/{how} back", plain)
        zero.checkpoint.load(f"{tmp_path}/{how} back", loaded)
        assert all((param == 7).all() for param in loaded.parameters()) and inner[1].seen == 3, how


class Refuses(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        raise RuntimeError("no, thank you")


@ranks.raises(2, "CheckpointError", "no, thank you", timeout=20.0)
def test_what_one_rank_raises_is_raised_on_all(rank, world, tmp_path):
    model = nn.Sequential(Refuses(2, 2))
    if rank:
        model[0].set_extra_state = lambda _: None
    wrapped = DistributedDataParallel(model)
    zero.checkpoint.save(tmp_path, wrapped)
    zero.checkpoint.load(tmp_path, wrapped)


class Choosy(Counting):
    def set_extra_state(self, state):
        if state["seen"] > 5:
            raise RuntimeError("too many")
        super().set_extra_state(state)


@ranks.on(2)
def test_modules_that_took_their_extra_state_get_theirs_back_when_another_refuses(rank, world, tmp_path):
    model, optimizer = with_adam(zero.FSDP(nn.Sequential(Counting(2, 2), (Choosy if rank == 1 else Counting)(2, 2))))
    for seen, value in [(1, 1.0), (9, 2.0)]:
        for module in model.module:
            module.seen = seen
        for param in model.parameters():
            param.data.fill_(value)
        zero.checkpoint.save(f"{tmp_path}/{seen}", model, optimizer)
    zero.checkpoint.load(f"{tmp_path}/1", model, optimizer)
    before = whole(model, optimizer)
    with pytest.raises(zero.checkpoint.CheckpointError, match=r"too many.*rank 1"):
        zero.checkpoint.load(f"{tmp_path}/9", model, optimizer)
    assert not differences(before, whole(model, optimizer))
    assert [module.seen for module in model.module] == [1, 1]
