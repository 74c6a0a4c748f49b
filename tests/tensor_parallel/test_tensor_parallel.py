"""Models that torch's tensor parallelism parallelises over one dimension of a mesh train over another as FSDP2 does on
the same mesh, and as one process does on the whole batch."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel import loss_parallel as parallel_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adafactor
from torch.utils.checkpoint import checkpoint

import assertions
import plainly
import ranks
import zero
from matrix import WHOLE, only
from runs import norm_of_gradients
from zero.shards.sharded_parameter import ShardedParameter

OPTIMIZERS: dict[str, Any] = {
    "Adam": partial(torch.optim.Adam, lr=0.05),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """recomputes: activations of the blocks."""

    def __init__(self, *, tied: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 10, bias=False)
        self.recomputes = recomputes
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.out(self.norm(x))


def mesh_of(dp: int = 2, tp: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def parallel(model: Model, mesh: DeviceMesh, *, sequence: bool = False, loss: bool = False) -> Model:
    """Parallelises a model over the mesh. sequence: activations between the linear layers are cut along the tokens.
    loss: logits stay cut."""
    cut = [Shard(1)] if sequence else [Replicate()]
    tied = model.out.weight is model.embed.weight
    plan: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut[0])}
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=cut[0])
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=cut[0])
        if sequence:
            plan[f"blocks.{number}.norm"] = SequenceParallel(use_local_output=True)
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
    out = Shard(-1) if loss else Replicate()
    plan["out"] = ColwiseParallel(input_layouts=cut[0], output_layouts=out, use_local_output=not loss)
    parallelize_module(model, mesh, plan)
    if tied:
        model.out.weight = model.embed.weight
    return model


def batches(rank: int | None, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """The batches of one data parallel rank of two; of all with None."""
    torch.manual_seed(3)
    given = [(torch.randint(10, (4, 6)), torch.randint(10, (4, 6))) for _ in range(steps)]
    return given if rank is None else [(x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]) for x, y in given]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model: nn.Module, optim: torch.optim.Optimizer, rank: int | None) -> None:
    for tokens, targets in batches(rank, 2):
        loss_of(model(tokens), targets).backward()
        optim.step()
        optim.zero_grad()


def full(weights: dict[str, Any]) -> dict[str, Tensor]:
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights.items()}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)


class Beside:
    """`model` at a stage over the dimension "dp" of the mesh, and `plain`, which one process trains."""

    def __init__(self, stage: int, mesh: DeviceMesh, optim: str = "SGD", *, tied: bool = False, **how: bool) -> None:
        self.dp = mesh["dp"].get_local_rank()
        self.plain = Model(tied=tied)
        self.plain_optimizer = OPTIMIZERS[optim](self.plain.parameters())
        made = parallel(Model(tied=tied, recomputes=how.pop("recomputes", False)), mesh["tp"], **how)
        self.model, self.optimizer = zero.setup(made, OPTIMIZERS[optim], stage=stage, device_mesh=mesh["dp"])

    def backwards(self, number: int, *, sync: bool = True) -> None:
        (tokens, targets), (x, y) = batches(self.dp)[number], batches(None)[number]
        with nullcontext() if sync else zero.no_sync(self.model):
            loss_of(self.model(tokens), targets).backward()
        loss_of(self.plain(x), y).backward()

    def clip(self, most: float, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
        """The norms."""
        found = clip_grad_norm_(self.model.parameters(), most, norm_type)
        return found, nn.utils.clip_grad_norm_(self.plain.parameters(), most, norm_type)

    def step(self) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def compare(self) -> dict[str, Tensor]:
        """The weights, whole."""
        weights: dict[str, Tensor] = zero.full_state_dict(self.model, to=None)
        close(weights, self.plain.state_dict())
        return weights


pytestmark = pytest.mark.slow


def values(state: dict[str, Any]) -> list[tuple[int, str, Tensor]]:
    return [(n, key, value) for n, of in state["state"].items() for key, value in sorted(of.items())]


@pytest.mark.parametrize("stage", [2, 3] if WHOLE else [3])
@ranks.on(4)
def test_full_weights_and_state_are_those_of_one_process_and_load_again(rank, world, stage):
    mesh = mesh_of()
    both, again = (Beside(number, mesh, "Adam", sequence=True) for number in (stage, 5 - stage))
    for number in range(2):
        both.backwards(number)
        both.step()
    weights, state = both.compare(), zero.full_optimizer_state_dict(both.model, both.optimizer, to=None)
    for (*key, found), (*other, expected) in zip(values(state), values(both.plain_optimizer.state_dict()), strict=True):
        assert key == other
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)
    assert bool(zero.full_state_dict(both.model, to=0)) == (rank == 0)
    assert bool(zero.full_optimizer_state_dict(both.model, both.optimizer, to=0)) == (rank == 0)

    zero.load_full_state_dict(again.model, weights)  # at another stage
    zero.load_full_optimizer_state_dict(again.model, again.optimizer, state)
    again.plain, again.plain_optimizer = both.plain, both.plain_optimizer
    again.backwards(2)
    again.step()
    again.compare()
    plain = zero.unwrap(both.model)
    assert isinstance(plain.out.weight, DTensor)
    again.model.load_state_dict(plain.state_dict())  # DTensors load as well
    close(zero.full_state_dict(again.model, to=None), weights)


SAVED: list[tuple[int, tuple[int, int] | None]] = [(3, (2, 2)), (3, None), (1, (1, 4))]
"""Stages and sizes of (dp, tp), each of which loads what the one before has saved. 10 rows are uneven over 4 ranks."""
MORE_SAVED = [(2, (2, 2)), (3, (1, 4)), (2, None), (3, (4, 1)), (0, None), (3, (2, 2))] if WHOLE else []


@pytest.mark.matrix
@ranks.on(4)
def test_checkpoints_load_over_other_meshes_and_without_tensor_parallelism(rank, world, tmp_path):
    run = tmp_path
    plain, adam = Model(), OPTIMIZERS["Adam"]
    plain_optimizer = adam(plain.parameters())
    weights: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    tokens, targets = batches(None)[0]
    for stage, sizes in [*SAVED, *MORE_SAVED]:
        if sizes is None:
            dp, place = 4, rank
            found, optim = zero.setup(Model(), adam, stage=stage)
        else:
            mesh = mesh_of(*sizes)
            dp, place = sizes[0], mesh["dp"].get_local_rank()
            found, optim = zero.setup(parallel(Model(), mesh["tp"]), adam, stage=stage, device_mesh=mesh["dp"])
        if weights:
            assert zero.checkpoint.load(run, found, optim) == {"last": len(weights)}
            loaded = zero.full_state_dict(found, to=None)
            assert all(torch.equal(loaded[name], weights[name]) for name in plain.state_dict()), (stage, sizes)
            for one, other in zip(
                values(zero.full_optimizer_state_dict(found, optim, to=None)), values(state), strict=True
            ):
                assert torch.equal(one[-1], other[-1]), (stage, sizes, one[:2])
        share = slice(place * 4 // dp, (place + 1) * 4 // dp)
        loss_of(found(tokens[share]), targets[share]).backward()
        loss_of(plain(tokens), targets).backward()
        for one in (optim, plain_optimizer):
            one.step()
            one.zero_grad()
        weights, state = zero.full_state_dict(found, to=None), zero.full_optimizer_state_dict(found, optim, to=None)
        close(weights, plain.state_dict())
        saving = zero.checkpoint.save(run, found, optim, extra={"last": len(weights)}, wait=stage != 2)
        saving.wait()
    index = json.loads((Path(saving.path) / "index.json").read_text())["tensors"]
    assert any("slices" in entry for entry in index.values())
    for name, value in weights.items():
        assert torch.equal(plainly.tensor(Path(saving.path), index[f"model/{name}"]), value), "read without zero"


@pytest.mark.parametrize("stage", [1, 3] if WHOLE else [3])
@ranks.on(4)
def test_norms_count_each_element_once(rank, world, stage):
    both = Beside(stage, mesh_of(), sequence=True)
    for number, norm_type in enumerate((2.0, float("inf"), 1.0)):
        both.backwards(number)
        torch.testing.assert_close(*both.clip(0.1, norm_type), rtol=1e-5, atol=1e-6)
        norm = norm_of_gradients(both.model, norm_type)
        torch.testing.assert_close(norm, torch.tensor(0.1), rtol=1e-4, atol=0)
        both.step()
    both.compare()


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(4)
def test_accumulates_without_sync_clips_and_recomputes_checkpoints(rank, world, stage):
    both = Beside(stage, mesh_of(), sequence=True, recomputes=True)
    for number in range(2):
        both.backwards(number, sync=number == 1)
    both.clip(0.5)
    both.step()
    both.compare()


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(4)
def test_tied_embeddings_and_loss_parallel(rank, world, stage):
    both = Beside(stage, mesh_of(), tied=True, loss=True)
    for number in range(2):
        with parallel_loss():
            both.backwards(number)
        both.step()
    found = both.compare()
    assert found["out.weight"] is found["embed.weight"] or stage == 2
    assert both.model.module.out.weight is both.model.module.embed.weight or stage == 3


IN_16_BITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def with_fsdp2(mesh: DeviceMesh, optim: str, policy: MixedPrecisionPolicy, *, sequence: bool) -> dict[str, Tensor]:
    model = parallel(Model(), mesh["tp"], sequence=sequence)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    train(model, OPTIMIZERS[optim](model.parameters()), mesh["dp"].get_local_rank())
    return full(model.state_dict())


@only
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@ranks.on(4, fresh=True)  # torch keeps the groups of an earlier mesh
def test_has_the_numbers_of_fsdp2(rank, world):
    mesh = mesh_of()
    dp = mesh["dp"].get_local_rank()
    expected = with_fsdp2(mesh, "Adam", MixedPrecisionPolicy(), sequence=True)
    for stage in (1, 3):
        both = Beside(stage, mesh, "Adam", sequence=True)
        train(both.model, both.optimizer, dp)
        for name, found in zero.full_state_dict(both.model, to=None).items():
            assert torch.equal(found, expected[name]), name
    model = zero.FSDP(parallel(Model(), mesh["tp"]), device_mesh=mesh["dp"], precision=IN_16_BITS)
    train(model, OPTIMIZERS["SGD"](model.parameters()), dp)
    close(zero.full_state_dict(model, to=None), with_fsdp2(mesh, "SGD", IN_16_BITS, sequence=False))


@only
@ranks.on(4, fresh=True)
def test_offload_and_replicas_take_parts(rank, world):
    """Features that meet parts where they would meet parameters."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicas", "dp", "tp"))
    plain, sgd = Model(), OPTIMIZERS["SGD"]
    train(plain, sgd(plain.parameters()), None)
    offloaded: dict[str, Any] = {"device_mesh": mesh["dp"], "offload": zero.CPUOffload()}
    hybrid: dict[str, Any] = {"device_mesh": mesh["replicas", "dp"], "sharding_strategy": "HYBRID_SHARD"}
    for stage, how in ((2, offloaded), (3, offloaded), (3, hybrid)):
        made = parallel(Model(), mesh["tp"], sequence=True)
        model: Any = zero.FSDP(made, **hybrid) if how is hybrid else None
        pair = (model, sgd(model.parameters())) if model else zero.setup(made, sgd, stage=stage, **how)
        train(*pair, mesh["dp"].get_local_rank())
        close(zero.full_state_dict(pair[0], to=None), plain.state_dict())


@ranks.on(4)
def test_an_overflow_in_one_part_skips_the_step_on_all_ranks(rank, world):
    mesh = mesh_of()
    both = Beside(3, mesh)
    scaler = torch.amp.GradScaler("cpu")
    tokens, targets = batches(both.dp)[0]
    before = zero.full_state_dict(both.model, to=None)
    scaler.scale(loss_of(both.model(tokens), targets)).backward()
    if rank == 0:
        gradients = [param.grad for param in both.model.parameters() if param.grad is not None]
        next(one for one in map(assertions.plain, gradients) if one.numel()).view(-1)[0] = float("inf")
    scaler.step(both.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    close(zero.full_state_dict(both.model, to=None), before)


# What modules see of DTensors that are sharded, and what cannot be sharded or stepped: refused on every rank.


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
    return zero.OSS(model.parameters(), process_group=mesh["dp"].get_group())


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
    (averaged, ["DistributedDataParallel(device_mesh=)", "zero.setup(model, optimizer, stage=1"]),
]


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


@ranks.on(4)
def test_steps_that_would_be_wrong_are_refused_on_every_rank(rank, world):
    mesh = mesh_of()
    dp, (tokens, targets) = mesh["dp"], batches(0)[0]

    alone = parallel(Model(), mesh["tp"])
    oss = zero.OSS(alone.parameters(), process_group=dp.get_group(), lr=0.1)
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


@ranks.raises(2, RuntimeError, "torch.compile", "tensor parallel")
def test_compiling_is_refused(rank, world):
    mesh = mesh_of(dp=1)
    model = zero.FSDP(parallel(Model(), mesh["tp"]), device_mesh=mesh["dp"])
    model.blocks[0].compile(backend="eager")
    model(batches(0)[0][0])
