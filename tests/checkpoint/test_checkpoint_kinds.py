"""What the matrix does not have: replicas, several optimizers, state of other shapes, dtypes and ties that differ."""

import pytest
import torch
from saved import CASE, Config, adam, differences, read_plainly, steps, tiny, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero


def train(model, optimizer, count=2):
    torch.manual_seed(0)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()


# ---------------------------------------------------------------------------------------------------------- replicas


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


def other_hybrid_problem(rank, world, path):
    mesh = init_device_mesh("cpu", (2, 2))
    model = zero.FSDP(CASE.model(), sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    zero.checkpoint.save(path if rank != 3 else path + "x", model)


def test_a_problem_in_one_replica_is_raised_in_all(tmp_path):
    ranks.expect_error(other_hybrid_problem, 4, "CheckpointError", "differ between ranks", args=(str(tmp_path),))


# --------------------------------------------------------------------------------------------------- several optimizers


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
    return zero.full_state_dict(model)


def save_both(rank, world, path, stage):
    model, optimizers = two_optimizers(stage)
    train_both(model, optimizers)
    zero.checkpoint.save(path, model, optimizers)
    return train_both(model, optimizers)


def load_both(rank, world, path, stage):
    model, optimizers = two_optimizers(stage)
    zero.checkpoint.load(path, model, optimizers)
    return train_both(model, optimizers)


def test_several_optimizers(tmp_path):
    expected = ranks.run(save_both, 2, (str(tmp_path), 2))[0]
    found = ranks.run(load_both, 2, (str(tmp_path), 3))[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


# --------------------------------------------------------------------------------------------- state of other shapes


def with_rows(stage, partition="auto"):
    """Adafactor keeps a row and a column of each matrix."""
    model, optimizer = zero.setup(tiny(), torch.optim.Adafactor, stage=stage, partition=partition, lr=1e-2)
    return model, optimizer


def save_rows(rank, world, path, stage):
    model, optimizer = with_rows(stage)
    train(model, optimizer)
    zero.checkpoint.save(path, model, optimizer)
    train(model, optimizer)
    return zero.full_state_dict(model)


def load_rows(rank, world, path, stage):
    model, optimizer = with_rows(stage)
    zero.checkpoint.load(path, model, optimizer)
    train(model, optimizer)
    return zero.full_state_dict(model)


def test_state_of_other_shapes_than_the_parameter(tmp_path):
    expected = ranks.run(save_rows, 2, (str(tmp_path), 3))[0]
    for stage, world in [(0, 1), (1, 3), (2, 2), (3, 4)]:
        found = ranks.run(load_rows, world, (str(tmp_path), stage))[0]
        for name, value in expected.items():
            if name != "0.bias":  # comes before a BatchNorm: its gradient is rounding alone
                torch.testing.assert_close(found[name], value)


class Blockwise(torch.optim.SGD):
    """Keeps one number for every 16 elements."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["absmax"] = torch.zeros(-(-param.numel() // 16))
        return super().step(closure)


def save_blocks(rank, world, path):
    model = CASE.model()
    optimizer = zero.OSS(model.parameters(), Blockwise, lr=0.1, partition="even")
    steps(DistributedDataParallel(model, **CASE.ddp), optimizer, 0, 1)
    zero.checkpoint.save(path, model, optimizer)


def test_state_whose_place_is_not_known(tmp_path):
    ranks.expect_error(
        save_blocks, 2, "CheckpointError", "absmax has shape", "partition='whole'", args=(str(tmp_path),)
    )
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------- dtypes, ties, order


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
    saved = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1))
    optimizer = adam()(saved.parameters())
    saved(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    zero.checkpoint.save(tmp_path, saved, optimizer)
    found = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1)).to(memory_format=torch.channels_last)
    found_optimizer = adam()(found.parameters())
    zero.checkpoint.load(tmp_path, found, found_optimizer)
    assert found[0].weight.is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(saved.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, found_optimizer.state[other][key])


def summoned(rank, world, path):
    model, _ = Config().build(3)
    with model.summon_full_params():
        zero.checkpoint.save(path, model)


def test_not_while_parameters_are_summoned(tmp_path):
    ranks.expect_error(summoned, 2, "CheckpointError", "Save and load between steps", args=(str(tmp_path),))


def compiled_and_plain(rank, world, path):
    model = CASE.model()
    zero.checkpoint.save(path, torch.compile(model))
    zero.checkpoint.load(path, model)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_compiled_model_has_the_names_of_its_module(tmp_path):
    compiled_and_plain(0, 1, tmp_path)


class Refuses(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        raise RuntimeError("no, thank you")


def refusing(rank, world, path):
    model = nn.Sequential(Refuses(2, 2))
    if rank:
        model[0].set_extra_state = lambda _: None
    wrapped = DistributedDataParallel(model)
    zero.checkpoint.save(path, wrapped)
    zero.checkpoint.load(path, wrapped)


def test_what_one_rank_raises_is_raised_on_all(tmp_path):
    ranks.expect_error(refusing, 2, "CheckpointError", "no, thank you", args=(str(tmp_path),), timeout=20.0)
