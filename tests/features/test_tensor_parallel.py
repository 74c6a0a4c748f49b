"""Models that torch's tensor parallelism has parallelised over one dimension of a mesh, sharded over another, beside
FSDP2 on the same mesh and one process with the whole batch."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel import loss_parallel as parallel_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import plainly
import ranks
import zero
from matrix import WHOLE
from processes import ROOT, python
from zero.checkpoint.export import export

GIVEN: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
OPTIMIZERS = {name: partial(kind, **options) for name, (kind, options) in GIVEN.items()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 10, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parallel(model: Model, mesh: DeviceMesh, *, sequence: bool = False, loss: bool = False) -> Model:
    """Parallelises a model over the mesh. sequence: activations between the linear layers are cut along the tokens."""
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


def full(weights: dict[str, Any]) -> dict[str, Tensor]:
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights.items()}


def alone(optimizer: str) -> dict[str, Tensor]:
    model = Model()
    train(model, OPTIMIZERS[optimizer](model.parameters()), None)
    return model.state_dict()


def wrapped(stage: int, model: nn.Module, mesh: DeviceMesh, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    kind, options = GIVEN[optimizer]
    return zero.setup(model, kind, stage=stage, device_mesh=mesh["dp"], **options)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(4)
def test_trains_as_one_process_does(rank: int, world: int, stage: int) -> None:
    mesh = mesh_of()
    for optimizer, sequence in (("Adam", True), ("SGD", False)):
        model, optim = wrapped(stage, parallel(Model(), mesh["tp"], sequence=sequence), mesh, optimizer)
        train(model, optim, mesh["dp"].get_local_rank())
        unwrapped = zero.unwrap(model)
        assert isinstance(unwrapped.out.weight, DTensor)
        close(full(unwrapped.state_dict()), alone(optimizer))


def train(model: nn.Module, optim: torch.optim.Optimizer, rank: int | None, *, steps: int = 3) -> None:
    for tokens, targets in batches(rank, steps):
        loss_of(model(tokens), targets).backward()
        optim.step()
        optim.zero_grad()


def whole_states(plain: dict[str, Any]) -> list[tuple[int, str, Tensor]]:
    return [(n, key, value) for n, state in plain["state"].items() for key, value in sorted(state.items())]


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(4)
def test_full_weights_and_state_are_those_of_one_process_and_load_again(rank: int, world: int, stage: int) -> None:
    mesh = mesh_of()
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    model, optim = wrapped(stage, parallel(Model(), mesh["tp"], sequence=True), mesh, "Adam")
    train(model, optim, dp)
    plain = Model()
    adam = OPTIMIZERS["Adam"](plain.parameters())
    train(plain, adam, None)
    weights, state = zero.full_state_dict(model), zero.full_optimizer_state_dict(model, optim)
    close(weights, plain.state_dict())
    for (n, key, found), (m, other, expected) in zip(whole_states(state), whole_states(adam.state_dict()), strict=True):
        assert (n, key) == (m, other)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)
    assert bool(zero.full_state_dict(model, to=0)) == (dp == tp == 0)
    assert bool(zero.full_optimizer_state_dict(model, optim, to=0)) == (dp == tp == 0)
    assert zero.count_parameters(model).all == sum(param.numel() for param in plain.parameters())

    again, optimizer = wrapped(
        5 - stage, parallel(Model(), mesh["tp"], sequence=True), mesh, "Adam"
    )  # at the other stage
    zero.load_full_state_dict(again, weights)
    zero.load_full_optimizer_state_dict(again, optimizer, state)
    for one, its in ((model, optim), (again, optimizer), (plain, adam)):
        train(one, its, None if one is plain else dp, steps=2)
    close(zero.full_state_dict(model), plain.state_dict())
    close(zero.full_state_dict(again), plain.state_dict())
    again.load_state_dict(zero.unwrap(model).state_dict())  # DTensors load as well


SAVED: list[tuple[int, tuple[int, int] | None]] = [(3, (2, 2)), (2, (1, 4)), (3, None), (1, (2, 2))]
"""Stages and sizes of (dp, tp), each of which loads what the one before has saved. 10 rows are uneven over 4 ranks."""
MORE_SAVED = [(2, None), (3, (1, 4)), (3, (4, 1)), (2, (2, 2)), (0, None), (3, (2, 2))] if WHOLE else []


@pytest.mark.matrix
def test_checkpoints_load_over_other_meshes_and_without_tensor_parallelism(tmp_path: Path) -> None:
    ranks.run(save_and_load, 4, args=(tmp_path,))


def save_and_load(rank: int, world: int, run: Path) -> None:
    plain, weights, state = Model(), None, {}
    adam = OPTIMIZERS["Adam"](plain.parameters())
    for stage, sizes in [*SAVED, *MORE_SAVED]:
        model, dp, place = Model(), 4, rank
        if sizes is None:
            found, optim = zero.setup(model, torch.optim.Adam, stage=stage, lr=0.05)
        else:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            dp, place = sizes[0], mesh["dp"].get_local_rank()
            found, optim = wrapped(stage, parallel(model, mesh["tp"]), mesh, "Adam")
        if weights is not None:
            assert zero.checkpoint.load(run, found, optim) == {"last": len(weights)}
            loaded, of_optimizer = zero.full_state_dict(found), zero.full_optimizer_state_dict(found, optim)
            assert all(torch.equal(loaded[name], weights[name]) for name in plain.state_dict()), (stage, sizes)
            for (_, key, one), (_, _, other) in zip(whole_states(of_optimizer), whole_states(state), strict=True):
                assert torch.equal(one, other), (stage, sizes, key)
        for tokens, targets in batches(None, 1):
            share = slice(place * 4 // dp, (place + 1) * 4 // dp)
            loss_of(found(tokens[share]), targets[share]).backward()
            loss_of(plain(tokens), targets).backward()
            for one in (optim, adam):
                one.step()
                one.zero_grad()
        weights, state = zero.full_state_dict(found), zero.full_optimizer_state_dict(found, optim)
        close(weights, plain.state_dict())
        saving = zero.checkpoint.save(run, found, optim, extra={"last": len(weights)}, wait=stage != 2)
        saving.wait()
    last = Path(saving.path)
    index = json.loads((last / "index.json").read_text())
    assert any(isinstance(entry.get("order", [0])[0], list) for entry in index["tensors"].values())
    (file,) = export(run, run.parent / f"exported-{rank}")
    exported = load_file(file)
    for name, value in weights.items():
        assert torch.equal(exported[name], value)
        assert torch.equal(plainly.tensor(last, index["tensors"][f"model/{name}"]), value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(4)
def test_norms_count_each_element_once(rank: int, world: int, stage: int) -> None:
    mesh = mesh_of()
    model, optim = wrapped(stage, parallel(Model(), mesh["tp"], sequence=True), mesh, "SGD")
    plain = Model()
    of_both = zip(batches(mesh["dp"].get_local_rank()), batches(None), (2.0, float("inf"), 1.0), strict=True)
    for (tokens, targets), (x, y), norm_type in of_both:
        loss_of(model(tokens), targets).backward()
        loss_of(plain(x), y).backward()
        found = zero.clip_grad_norm_(model, optim, 0.1, norm_type)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(zero.grad_norm(model, optim, norm_type), torch.tensor(0.1), rtol=1e-4, atol=0)
        optim.zero_grad()
        plain.zero_grad()


IN_16_BITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def with_fsdp2(mesh: DeviceMesh, optimizer: str, policy: MixedPrecisionPolicy, *, sequence: bool) -> dict[str, Tensor]:
    """Weights after training by FSDP2 over tensor parallelism."""
    model = parallel(Model(), mesh["tp"], sequence=sequence)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    train(model, OPTIMIZERS[optimizer](model.parameters()), mesh["dp"].get_local_rank())
    return full(model.state_dict())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@ranks.on(4, fresh=True)  # torch keeps the groups of an earlier mesh
def test_has_the_numbers_of_fsdp2(rank: int, world: int) -> None:
    mesh = mesh_of()
    for sequence in (False, True):
        expected = with_fsdp2(mesh, "Adam", MixedPrecisionPolicy(), sequence=sequence)
        for stage in (1, 2, 3):
            model, optim = wrapped(stage, parallel(Model(), mesh["tp"], sequence=sequence), mesh, "Adam")
            train(model, optim, mesh["dp"].get_local_rank())
            for name, found in zero.full_state_dict(model).items():
                assert torch.equal(found, expected[name]), name
    model = zero.FSDP(parallel(Model(), mesh["tp"]), device_mesh=mesh["dp"], mixed_precision=IN_16_BITS)
    train(model, OPTIMIZERS["SGD"](model.parameters()), mesh["dp"].get_local_rank())
    close(zero.full_state_dict(model), with_fsdp2(mesh, "SGD", IN_16_BITS, sequence=False))


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(4)
def test_accumulates_without_sync_clips_and_recomputes_checkpoints(rank: int, world: int, stage: int) -> None:
    mesh = mesh_of()
    model, optim = wrapped(stage, parallel(Recomputing(), mesh["tp"], sequence=True), mesh, "SGD")
    plain = Model()
    sgd = OPTIMIZERS["SGD"](plain.parameters())
    for _ in range(2):
        for number, ((tokens, targets), (x, y)) in enumerate(
            zip(batches(mesh["dp"].get_local_rank()), batches(None), strict=True)
        ):
            with zero.no_sync(model) if number < 2 else nullcontext():
                loss_of(model(tokens), targets).backward()
            loss_of(plain(x), y).backward()
        zero.clip_grad_norm_(model, optim, 0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optim.step()
        sgd.step()
        optim.zero_grad()
        sgd.zero_grad()
    close(zero.full_state_dict(model), plain.state_dict())


class Recomputing(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(self.norm(x))


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(4)
def test_tied_embeddings_and_loss_parallel(rank: int, world: int, stage: int) -> None:
    mesh = mesh_of()
    model, optim = wrapped(stage, parallel(Model(tied=True), mesh["tp"], loss=True), mesh, "SGD")
    plain = Model(tied=True)
    sgd = OPTIMIZERS["SGD"](plain.parameters())
    for (tokens, targets), (x, y) in zip(batches(mesh["dp"].get_local_rank()), batches(None), strict=True):
        with parallel_loss():
            logits = model(tokens)
            assert isinstance(logits, DTensor)
            loss_of(logits, targets).backward()
        loss_of(plain(x), y).backward()
        optim.step()
        sgd.step()
        optim.zero_grad()
        sgd.zero_grad()
    found = zero.full_state_dict(model)
    close(found, plain.state_dict())
    assert found["out.weight"] is found["embed.weight"] or stage == 2
    with model.summon_full_params() if isinstance(model, zero.FSDP) else nullcontext():
        assert model.module.out.weight is model.module.embed.weight


@ranks.on(4)
def test_modules_see_dtensors_in_forward_and_where_parameters_are_summoned(rank: int, world: int) -> None:
    mesh, seen = mesh_of(), []
    (tokens, targets), (x, y) = batches(mesh["dp"].get_local_rank())[0], batches(None)[0]

    class Looks(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            seen.append((type(self.out.weight), self.out.weight.placements, self.out.weight.shape))
            return super().forward(tokens)

    model, plain = zero.FSDP(parallel(Looks(), mesh["tp"]), device_mesh=mesh["dp"]), Model()
    loss_of(model(tokens), targets).backward()
    loss_of(plain(x), y).backward()
    assert seen == [(DTensor, (Shard(0),), torch.Size([10, 8]))]
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    before = zero.full_state_dict(model)
    with torch.no_grad(), model.summon_full_params(with_grads=True):
        down = model.module.blocks[0].down.weight
        assert isinstance(down, DTensor) and isinstance(down.grad, DTensor) and down.placements == (Shard(1),)
        torch.testing.assert_close(down.grad.full_tensor(), plain.blocks[0].down.weight.grad)
        close({"y": model(tokens)}, {"y": plain(tokens)})
        close(zero.full_state_dict(model), before)
        model.module.blocks[0].down.weight.mul_(2)
        model.module.out.weight.grad = None
        model.module.out.weight.requires_grad_(False)
    assert model.module.out.weight.grad is None and not model.module.out.weight.requires_grad
    assert model.module.norm.weight.requires_grad and any(param.grad is not None for param in model.parameters())
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert torch.equal(zero.full_state_dict(model)["blocks.0.down.weight"], 2 * before["blocks.0.down.weight"])
    model.load_state_dict(before)
    close(zero.full_state_dict(model), before)
    shapes = set()
    model.apply(lambda module: shapes.add(module.weight.shape) if isinstance(module, nn.Linear) else None)
    assert shapes == {(12, 8), (8, 12), (10, 8)}  # what initialises weights sees whole shapes

    sharded, _ = wrapped(2, parallel(Model(), mesh["tp"]), mesh, "SGD")
    with torch.no_grad():
        sharded.state_dict()["out.weight"].mul_(2)  # on the memory of the parameter
    assert torch.equal(zero.full_state_dict(sharded)["out.weight"], 2 * before["out.weight"])


@ranks.on(4)
def test_what_cannot_be_sharded_is_refused_on_every_rank_with_the_remedy(rank: int, world: int) -> None:
    mesh = mesh_of()

    def made() -> Model:
        return parallel(Model(), mesh["tp"])

    same = ranks.refusal(lambda: zero.FSDP(made(), device_mesh=mesh["tp"]))
    assert "'embed.weight' is a DTensor" in same and "another dimension of the mesh" in same
    assert "another dimension of the mesh" in ranks.refusal(lambda: zero.FSDP(made()))
    assert "another dimension of the mesh" in ranks.refusal(lambda: zero.OSS(made().parameters()))
    other = fully_shard(Model(), mesh=mesh["dp"])
    assert "another library (FSDP2)" in ranks.refusal(lambda: zero.FSDP(other, device_mesh=mesh["dp"]))
    both = parallelize_module(Model(), mesh["tp"], {"out": ColwiseParallel()})
    fully_shard(both.out, mesh=mesh["dp"])
    assert "one dimension of a mesh" in ranks.refusal(lambda: zero.FSDP(both, device_mesh=mesh["dp"]))
    with torch.device("meta"):
        empty = Model()
    assert "to_empty()" in ranks.refusal(lambda: zero.FSDP(parallel(empty, mesh["tp"]), device_mesh=mesh["dp"]))
    group = mesh["dp"].get_group()
    told = ranks.refusal(lambda: zero.setup(made(), torch.optim.SGD, stage=0, process_group=group, lr=0.1))
    assert "Take stage 1, 2 or 3" in told
    told = ranks.refusal(lambda: zero.setup(made(), torch.optim.SGD, stage=2, device_mesh=mesh, lr=0.1))
    assert "has 2 dimensions" in told and "zero.FSDP(model, device_mesh=mesh" in told
    both = {"process_group": group, "device_mesh": mesh["dp"]}
    assert "Pass one of them" in ranks.refusal(lambda: zero.setup(made(), torch.optim.SGD, stage=1, **both))
    assert "another dimension of the mesh" in ranks.refusal(lambda: zero.setup(made(), torch.optim.SGD, stage=1))
    averaged = DistributedDataParallel(made(), device_mesh=mesh["dp"])
    told = ranks.refusal(lambda: zero.OSS(averaged.parameters(), group=group))
    assert "as DistributedDataParallel(device_mesh=) makes it" in told and "zero.setup(model, optim, stage=1" in told
    model = made()
    assert "partition" in ranks.refusal(lambda: zero.FSDP(model, device_mesh=mesh["dp"], partition="none"))
    assert isinstance(model.out.weight, DTensor)  # a model that was refused is as it was
    loss_of(model(batches(0)[0][0]), batches(0)[0][1]).backward()


@ranks.on(4)
def test_steps_that_would_be_wrong_are_refused_on_every_rank(rank: int, world: int) -> None:
    mesh = mesh_of()
    dp, (tokens, targets) = mesh["dp"], batches(0)[0]

    alone = parallel(Model(), mesh["tp"])
    oss = zero.OSS(alone.parameters(), group=dp.get_group(), lr=0.1)
    loss_of(alone(tokens), targets).backward()
    assert "no ShardedDDP has the model" in ranks.refusal(oss.step)

    model = parallel(Model(), mesh["tp"])
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp = zero.FSDP(model, device_mesh=dp, partition="whole")
    rows = torch.optim.Adafactor(fsdp.parameters())
    loss_of(fsdp(tokens), targets).backward()
    assert "Build the optimizer from the wrapped model" in ranks.refusal(before.step)
    assert "does not treat each element by itself" in ranks.refusal(rows.step)
    torch.optim.SGD(fsdp.parameters(), lr=0.1).step()

    oss = zero.OSS(parallel(again := Model(), mesh["tp"]).parameters(), torch.optim.Adafactor, dp.get_group())
    sharded = zero.ShardedDDP(again, oss)
    loss_of(sharded(tokens), targets).backward()
    assert "does not treat each element by itself" in ranks.refusal(oss.step)


@ranks.on(4)
def test_units_that_read_one_anothers_dtensors_are_refused(rank: int, world: int) -> None:
    mesh = mesh_of()

    class Reads(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = super().forward(tokens)
            return x + self.blocks[0].up.bias.sum()

    model = zero.FSDP(parallel(Reads(), mesh["tp"]), device_mesh=mesh["dp"])
    told = ranks.refusal(lambda: model(batches(0)[0][0]))
    assert "'blocks.0' are read outside of its forward" in told and "as_one_unit" in told

    tied = parallel(Model(tied=True), mesh["tp"])
    tied.head = nn.Sequential(tied.norm, tied.out)  # a unit, whose tied parameter is the root's
    zero.FSDP(tied, device_mesh=mesh["dp"], as_one_unit=[nn.Sequential])
    with torch.no_grad():
        told = ranks.refusal(lambda: tied.head(torch.ones(1, 1, 8)))
    assert "the root unit are read outside of its forward" in told


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(4, fresh=True)
def test_whatever_shards_and_steps_takes_parts(rank: int, world: int, stage: int) -> None:
    """Features that meet parts where they would meet parameters."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicas", "dp", "tp"))
    model: nn.Module
    optim: torch.optim.Optimizer
    for feature in ("offload", "hybrid")[: stage - 1]:
        made = parallel(Model(), mesh["tp"], sequence=True)
        more: dict[str, Any] = {"offload": zero.CPUOffload()} if feature == "offload" else {}
        if feature == "hybrid":
            model = zero.FSDP(made, device_mesh=mesh["replicas", "dp"], sharding_strategy="HYBRID_SHARD")
            optim = OPTIMIZERS["SGD"](model.parameters())
        elif stage == 3:
            model = zero.FSDP(made, device_mesh=mesh["dp"], **more)
            optim = OPTIMIZERS["SGD"](model.parameters())
        else:
            optim = zero.OSS(made.parameters(), torch.optim.SGD, mesh["dp"].get_group(), lr=0.1, momentum=0.9, **more)
            model = zero.ShardedDDP(made, optim)
        train(model, optim, mesh["dp"].get_local_rank())
        close(zero.full_state_dict(model), alone("SGD"))


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(4)
def test_an_overflow_in_one_part_skips_the_step_on_all_ranks(rank: int, world: int, stage: int) -> None:
    mesh = mesh_of()
    model, optim = wrapped(stage, parallel(Model(), mesh["tp"]), mesh, "SGD")
    scaler = zero.GradScaler("cpu", process_group=mesh["dp"].get_group())
    tokens, targets = batches(mesh["dp"].get_local_rank())[0]
    before = zero.full_state_dict(model)
    scaler.scale(loss_of(model(tokens), targets)).backward()
    stepped = optim.optim if isinstance(optim, zero.OSS) else optim
    gradients = [param.grad for group in stepped.param_groups for param in group["params"] if param.grad is not None]
    if rank == 0:
        next(one for one in gradients if one.numel()).view(-1)[0] = float("inf")
    scaler.step(optim)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    close(zero.full_state_dict(model), before)


@ranks.raises(4, RuntimeError, "torch.compile was called with a tensor parallel model")
def test_compiling_is_refused(rank: int, world: int) -> None:
    mesh = mesh_of()
    model = zero.FSDP(parallel(Model(), mesh["tp"]), device_mesh=mesh["dp"])
    for block in model.blocks:
        block.compile(backend="eager")
    model(batches(0)[0][0])


@pytest.mark.matrix
@pytest.mark.skipif(not WHOLE, reason="runs under make matrix: torchrun starts four processes")
def test_the_example_trains() -> None:
    script = ROOT / "docs" / "examples" / "tensor_parallel.py"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    written = python(*launcher, script, "--steps", 10).stdout
    assert "gate.weight {(64, 32)}" in written  # whole
    assert float(written.split()[3].strip(",")) < 2.5  # of 4.2 at first


@pytest.mark.matrix
@pytest.mark.skipif(not WHOLE, reason="runs under make matrix: each rank imports transformers")
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(4)
def test_a_llama_of_transformers_by_its_own_plan(rank: int, world: int, stage: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=stage == 2)

    def made() -> Any:
        torch.manual_seed(1)
        return LlamaForCausalLM(config)

    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    }
    mesh, model, plain = mesh_of(), made(), made()
    parallelize_module(model, mesh["tp"], {name: styles[style] for name, style in model.tp_plan.items()})
    model.tie_weights()
    found, optim = wrapped(stage, model, mesh, "SGD")
    sgd = OPTIMIZERS["SGD"](plain.parameters())
    torch.manual_seed(2)
    for tokens in torch.randint(32, (3, 4, 6)):
        share = tokens[2 * mesh["dp"].get_local_rank() :][:2]
        found(input_ids=share, labels=share).loss.backward()
        plain(input_ids=tokens, labels=tokens).loss.backward()
        for one in (optim, sgd):
            one.step()
            one.zero_grad()
    close(zero.full_state_dict(found), plain.state_dict())
