"""Models that are tensor parallel over one dimension of a mesh train over another as FSDP2 does on the same mesh, and
as one process does on the whole batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import OPTIMIZERS, Beside, Model, batches, close, full, loss_of, mesh_of, parallel, train
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel as parallel_loss

import assertions
import plainly
import ranks
import zero
from matrix import WHOLE, only
from runs import norm_of_gradients

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
    """Weights after training by FSDP2 over tensor parallelism."""
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
