"""What modules see of DTensors that are sharded, and what cannot be sharded or stepped: refused on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel import Beside, Model, batches, close, loss_of, mesh_of, parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor

import ranks
import zero
from zero.shards.sharded_parameter import ShardedParameter


@pytest.mark.slow
@ranks.on(4)
def test_modules_see_dtensors_in_forward_and_where_parameters_are_summoned(rank, world):
    both, seen = Beside(3, mesh_of()), list[Any]()
    model, module = both.model, both.model.module
    module.out.register_forward_pre_hook(lambda out, _: seen.append((out.weight.placements, out.weight.shape)))
    both.backwards(0)
    assert seen == [((Shard(0),), torch.Size([10, 8]))]
    assert {type(param) for param in model.parameters()} == {ShardedParameter}
    before, (x, _) = zero.full_state_dict(model, to=None), batches(None)[0]
    with torch.no_grad(), model.summon_full_params(with_grads=True):
        down = module.blocks[0].down.weight
        assert isinstance(down.grad, DTensor) and down.placements == (Shard(1),)
        torch.testing.assert_close(down.grad.full_tensor(), both.plain.blocks[0].down.weight.grad)
        close({"y": model(x)}, {"y": both.plain(x)})
        down.mul_(2)
        module.out.weight.grad = None
        module.out.weight.requires_grad_(False)
    assert module.out.weight.grad is None and not module.out.weight.requires_grad
    assert module.norm.weight.requires_grad and any(param.grad is not None for param in model.parameters())
    assert torch.equal(zero.full_state_dict(model, to=None)["blocks.0.down.weight"], 2 * before["blocks.0.down.weight"])
    model.load_state_dict(before)
    close(zero.full_state_dict(model, to=None), before)
    shapes = set()
    model.apply(lambda module: shapes.add(module.weight.shape) if isinstance(module, nn.Linear) else None)
    assert shapes == {(12, 8), (8, 12), (10, 8)}, "what initialises weights sees whole shapes"


def on_meta(mesh: DeviceMesh) -> Model:
    with torch.device("meta"):
        model = Model()
    return parallel(model, mesh["tp"])


def averaged(mesh: DeviceMesh, made: Model) -> object:
    model = DistributedDataParallel(made, device_mesh=mesh["dp"])
    return zero.OSS(model.parameters(), group=mesh["dp"].get_group())


def setup(made: Model, stage: int, **how: Any) -> object:
    return zero.setup(made, SGD, stage=stage, lr=0.1, **how)


ANOTHER = "another dimension of the mesh"
REFUSED: list[tuple[Callable[[DeviceMesh, Model], object], list[str]]] = [
    (lambda mesh, made: zero.FSDP(made, device_mesh=mesh["tp"]), ["'embed.weight' is a DTensor", ANOTHER]),
    (lambda mesh, made: zero.FSDP(made), [ANOTHER]),
    (lambda mesh, made: zero.OSS(made.parameters()), [ANOTHER]),
    (lambda mesh, made: setup(made, 1), [ANOTHER]),
    (lambda mesh, made: zero.FSDP(fully_shard(Model(), mesh=mesh["dp"]), device_mesh=mesh["dp"]), ["FSDP2"]),
    (lambda mesh, made: zero.FSDP(on_meta(mesh), device_mesh=mesh["dp"]), ["to_empty()"]),
    (lambda mesh, made: setup(made, 0, process_group=mesh["dp"].get_group()), ["stage 1, 2 or 3"]),
    (lambda mesh, made: setup(made, 2, device_mesh=mesh), ["2 dimensions", "zero.FSDP(model, device_mesh=mesh"]),
    (
        lambda mesh, made: setup(made, 1, process_group=mesh["dp"].get_group(), device_mesh=mesh["dp"]),
        ["process_group", "device_mesh"],
    ),
    (averaged, ["DistributedDataParallel(device_mesh=)", "zero.setup(model, optim, stage=1"]),
]


@pytest.mark.slow
@ranks.on(4)
def test_what_cannot_be_sharded_is_refused_on_every_rank_with_the_remedy(rank, world):
    mesh = mesh_of()
    for number, (build, words) in enumerate(REFUSED):
        told = ranks.refusal(lambda: build(mesh, parallel(Model(), mesh["tp"])))  # noqa: B023
        assert told and all(word in told for word in words), (number, told)
    model = parallel(Model(), mesh["tp"])
    assert "partition" in ranks.refusal(lambda: zero.FSDP(model, device_mesh=mesh["dp"], partition="none"))
    assert isinstance(model.out.weight, DTensor), "a model that was refused is as it was"
    loss_of(model(batches(0)[0][0]), batches(0)[0][1]).backward()


@pytest.mark.slow
@ranks.on(4)
def test_steps_that_would_be_wrong_are_refused_on_every_rank(rank, world):
    mesh = mesh_of()
    dp, (tokens, targets) = mesh["dp"], batches(0)[0]

    alone = parallel(Model(), mesh["tp"])
    oss = zero.OSS(alone.parameters(), group=dp.get_group(), lr=0.1)
    loss_of(alone(tokens), targets).backward()
    assert "ShardedDDP" in ranks.refusal(oss.step)

    model = parallel(Model(), mesh["tp"])
    before = SGD(model.parameters(), lr=0.1)
    fsdp = zero.FSDP(model, device_mesh=dp, partition="whole")
    rows = Adafactor(fsdp.parameters())
    loss_of(fsdp(tokens), targets).backward()
    assert "from the wrapped model" in ranks.refusal(before.step)
    assert "each element by itself" in ranks.refusal(rows.step)
    SGD(fsdp.parameters(), lr=0.1).step()

    oss = zero.OSS(parallel(again := Model(), mesh["tp"]).parameters(), Adafactor, dp.get_group())
    loss_of(zero.ShardedDDP(again, oss)(tokens), targets).backward()
    assert "each element by itself" in ranks.refusal(oss.step)


class Reads(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x + self.blocks[0].up.bias.sum()


@pytest.mark.slow
@ranks.on(4)
def test_units_that_read_one_anothers_dtensors_are_refused(rank, world):
    mesh = mesh_of()
    model = zero.FSDP(parallel(Reads(), mesh["tp"]), device_mesh=mesh["dp"])
    told = ranks.refusal(lambda: model(batches(0)[0][0]))
    assert "'blocks.0'" in told and "as_one_unit" in told

    tied = parallel(Model(tied=True), mesh["tp"])
    tied.head = nn.Sequential(tied.norm, tied.out)  # a unit, whose tied parameter is the root's
    zero.FSDP(tied, device_mesh=mesh["dp"], as_one_unit=[nn.Sequential])
    with torch.no_grad():
        assert "the root unit" in ranks.refusal(lambda: tied.head(torch.ones(1, 1, 8)))


@pytest.mark.slow
@ranks.raises(2, RuntimeError, "torch.compile", "tensor parallel")
def test_compiling_is_refused(rank, world):
    mesh = mesh_of(dp=1)
    model = zero.FSDP(parallel(Model(), mesh["tp"]), device_mesh=mesh["dp"])
    model.blocks[0].compile(backend="eager")
    model(batches(0)[0][0])
