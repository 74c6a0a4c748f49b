"""What is stepped lies in files or in the memory of the CPU: at stage 3 the shards, at stages 1 and 2 what OSS steps in
their place. Files lie elsewhere on a machine without a GPU, too; for the CPU there is nothing to move then."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, Adam, AdamW

import gpus
import matrix
import ranks
import zero
from models import CASES, Batch, FeedForward, Stack, take_step
from reference import same_where_the_cpu_steps
from zero.oss.optimizer import set_bucket_size
from zero.shards import masters

STAGES = [1, 2, 3]
CASE = CASES["mlp"]
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": partial(AdamW, lr=1e-2),
    "fused": partial(Adam, lr=1e-2, fused=True),
}


class Apart(zero.CPUOffload):
    """As on a GPU, from where shards must be brought to the memory of the CPU: here each is copied."""

    placed: ClassVar[list[Tensor]] = []

    def place(self, shard: Tensor) -> Tensor:
        self.placed.append(super().place(shard))
        return self.placed[-1]

    def has(self, shard: Tensor) -> bool:
        return any(shard is one for one in self.placed)


def on_cpu(stage: int, **options: float) -> Any:
    return (zero.CPUOffload if stage == 3 else Apart)(**options)


def elsewhere(where: str, path: Path) -> Any:
    return Apart() if where == "apart" else zero.DiskOffload(path)


def made(stage: int, optim: Any, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    """In buckets of a layer or less at stages 1 and 2. options: of OSS or FSDP, which stage 0 has not."""
    model = CASE.model() if model is None else model
    if stage == 0:
        return DistributedDataParallel(model, **CASE.ddp), optim(model.parameters())
    if stage == 3:
        wrapped = zero.FSDP(model, **options)
        return wrapped, optim(wrapped.parameters())
    optimizer = zero.OSS(model.parameters(), optim, **options)
    if stage == 2:
        return zero.ShardedDDP(model, optimizer, reduce_buffer_size=200), optimizer
    set_bucket_size(optimizer, 200)
    return (DistributedDataParallel(model, **CASE.ddp) if torch.distributed.is_initialized() else model), optimizer


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    dtype = next(model.parameters()).dtype
    inputs = (one.to(dtype) if isinstance(one, Tensor) else one for one in batch.inputs)
    return model(*inputs).float().square().mean()


def trained(rank: int, stage: int, optim: Any, **options: Any) -> list[Any]:
    """A backward under no_sync, one that adds up, clipping, other options, and a state that is saved and loaded."""
    model, optimizer = made(stage, optim, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    told: list[Any] = []
    for step in range(5):
        optimizer.zero_grad()
        if step in (2, 3):
            alone = step == 2 and hasattr(model, "no_sync")
            with model.no_sync() if alone else nullcontext():
                loss_of(model, CASE.batch(rank, 10)).backward()
        loss = loss_of(model, CASE.batch(rank, step))
        loss.backward()
        if step == 4:
            told.append(zero.clip_grad_norm_(model, optimizer, 0.05))
        optimizer.step()
        assert any(param.grad is not None for param in model.parameters()) or stage == 2, "gradients stay"
        scheduler.step()
        told += [loss.detach(), zero.full_state_dict(model)]
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    return told


def beside_ddp(rank: int, world: int, stage: int, name: str, options: dict[str, Any]) -> None:
    optim = OPTIMIZERS[name]
    pairs = zip(trained(rank, stage, optim, **options), trained(rank, 0, optim), strict=True)
    for number, (found, expected) in enumerate(pairs):
        if number < 6:  # before a backward is added to what was sent, and clipping, which add up in another order
            same_where_the_cpu_steps(found, expected, f"value {number}")
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


PLACEMENTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"{stage} {cut}": (stage, {"partition": cut}) for stage in STAGES for cut in ("even", "whole")},
    "3 kept": (3, {"reshard_after_forward": False}),
    "3 memory first": (3, {"prefetch": zero.MEMORY_FIRST}),
}


@matrix.combined("placement, name", PLACEMENTS, OPTIMIZERS)
def test_training_from_files_is_exact(tmp_path, placement, name):
    stage, options = PLACEMENTS[placement]
    ranks.run(beside_ddp, args=(stage, name, {**options, "offload": zero.DiskOffload(tmp_path)}))
    assert not list(tmp_path.iterdir()), "files must be gone with the processes"


@matrix.combined("name, stage", OPTIMIZERS, STAGES)
@pytest.mark.parametrize("ratio", [1.0, 0.4])
def test_training_in_other_memory_is_exact(stage, name, ratio):
    """Also where some of it stays on the device."""
    ranks.run(beside_ddp, args=(stage, name, {"offload": on_cpu(stage, ratio=ratio)}))


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_what_forward_needs_first_stays_on_the_device(rank, world, stage):
    block = partial(FeedForward, 12, 24)
    options = {"auto_wrap_policy": ModuleWrapPolicy({FeedForward})} if stage == 3 else {}
    model, optimizer = made(stage, OPTIMIZERS["sgd"], Stack(block, 12, 3), offload=on_cpu(stage, ratio=0.4), **options)
    groups = model._model.index.groups if stage == 3 else optimizer.shards.shard_groups[::-1]
    away = [group.home.apart for group in groups]
    numels = [group.layout.numel for group in groups]
    share = sum(numel for numel, is_away in zip(numels, away, strict=True) if is_away) / sum(numels)
    assert 0.4 <= share < 0.4 + max(numels) / sum(numels)
    assert away[0] is False


@pytest.mark.parametrize("ratio", [0, -1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio="):
        zero.CPUOffload(ratio=ratio)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_an_optimizer_that_is_not_elementwise_steps_all_at_once(rank, world, tmp_path, stage):
    optim = partial(Adafactor, lr=1e-2)
    pairs = [
        made(stage, optim, CASES["gpt"].model(), partition="whole", offload=offload)
        for offload in (zero.DiskOffload(tmp_path), None)
    ]
    for step in range(3):
        for model, optimizer in pairs:
            take_step(optimizer, model(*CASES["gpt"].batch(rank, step).inputs).square().mean())
        same_where_the_cpu_steps(*(zero.full_state_dict(model) for model, _ in pairs), f"step {step}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks.on(2)
def test_what_was_not_written_between_steps_is_not_compared(rank, world, dtype):
    """On a GPU all shards would be brought to the memory of the CPU for it."""
    wide = CASES["wide"]
    model, optimizer = made(2, OPTIMIZERS["adamw"], wide.model().to(dtype), offload=Apart())
    with mock.patch.object(masters, "_written", wraps=masters._written) as compared:
        for step in range(4):
            if step == 2:
                compared.reset_mock()  # weights were sent to all ranks before the first step
            take_step(optimizer, loss_of(model, wide.batch(rank, step)))
    assert not compared.called


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_parameters_of_16_bits_are_stepped_as_float32(rank, world, tmp_path, stage, offload):
    """What is stepped is float32, unless another dtype is asked for."""
    offload = zero.CPUOffload() if offload == "cpu" else zero.DiskOffload(tmp_path)
    pairs = [
        made(stage, OPTIMIZERS["adamw"], CASE.model().bfloat16(), **options)
        for options in ({"offload": offload}, {"master_dtype": torch.float32})
    ]
    for step in range(3):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(model, CASE.batch(rank, step)).backward()
            optimizer.clip_grad_norm(0.1)
            optimizer.step()
        same_where_the_cpu_steps(*(zero.full_state_dict(model) for model, _ in pairs), f"step {step}")
    for _, optimizer in pairs:
        optimizer.consolidate_state_dict(to=None)
    states = [optimizer.state_dict()["state"] for _, optimizer in pairs]
    assert "master" in states[0][0] and states[0][0]["master"].dtype is torch.float32
    same_where_the_cpu_steps(*states, "the full state")


@gpus.cpu_only("says what is without a GPU")
@ranks.on(2)
def test_without_a_gpu_shards_stay_where_they_are(rank, world):
    model = CASE.model()
    optimizer = zero.OSS(model.parameters(), SGD, lr=0.1, offload=zero.CPUOffload())
    for param in model.parameters():
        if param.requires_grad and param.is_contiguous():
            shard = optimizer.part(param)
            inside = param.data_ptr() <= shard.data_ptr() < param.data_ptr() + max(param.nbytes, 1)
            assert not shard.numel() or inside, "on the CPU shards of enough bits are where they should be"


@pytest.mark.parametrize("where", ["disk", "apart"])
@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_weights_that_are_written_between_steps_are_taken_over(rank, world, tmp_path, stage, where):
    pairs = [made(stage, OPTIMIZERS["sgd"], offload=elsewhere(where, tmp_path)), made(0, OPTIMIZERS["sgd"])]
    other = CASE.model(seed=1).state_dict()
    for step in range(3):
        for model, optimizer in pairs:
            if step == 1:
                for name, param in model.module.named_parameters():
                    param.data.copy_(other[name])
            take_step(optimizer, loss_of(model, CASE.batch(rank, step)))
        same_where_the_cpu_steps(*(zero.full_state_dict(model) for model, _ in pairs), f"step {step}")


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_losses_are_scaled_as_without(rank, world, tmp_path, stage):
    """An infinite gradient on one rank skips the step on all."""
    pairs = [made(stage, OPTIMIZERS["sgd"], offload=offload) for offload in (zero.DiskOffload(tmp_path), None)]
    scalers = [zero.GradScaler(gpus.DEVICE, init_scale=4.0) for _ in pairs]
    for step in range(3):
        for (model, optimizer), scaler in zip(pairs, scalers, strict=True):
            before = zero.full_state_dict(model)
            optimizer.zero_grad()
            loss = loss_of(model, CASE.batch(rank, step)) * (torch.inf if step == 1 and rank == 1 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            zero.clip_grad_norm_(model, optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()
            after = zero.full_state_dict(model)
            assert all(torch.equal(after[name], before[name]) for name in before) == (step == 1)
        same_where_the_cpu_steps(*(zero.full_state_dict(model) for model, _ in pairs), f"step {step}")
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 2.0]


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_hooks_and_schedulers_see_one_step(rank, world, tmp_path, stage):
    """At stage 3 one optimizer also holds a parameter that is not sharded."""
    outside = nn.Parameter(torch.ones(3))

    def optim(params: Any, **options: Any) -> SGD:
        return SGD([*params, outside] if stage == 3 else params, lr=0.1, momentum=0.9, **options)

    model, optimizer = made(stage, SGD if stage < 3 else optim, nn.Linear(5, 5), offload=zero.DiskOffload(tmp_path))
    optimizer.param_groups[0].update(lr=0.1, momentum=0.9)
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    getattr(optimizer, "optim", optimizer).register_step_post_hook(lambda *_: steps.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(2, 5)).sum() + outside.sum()).backward()
        optimizer.step()
        scheduler.step()
    assert len(steps) == (6 if stage == 3 else 3), "those of the optimizer inside are not called for each piece"
    if stage == 3:
        assert outside.tolist() == pytest.approx([1 - 0.1 - 0.05 * 1.9 - 0.025 * 2.71] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_steps_with_a_closure_and_without_take_turns(rank, world, stage, dtype):
    """With a closure the optimizer steps all at once."""
    told = []
    for offload in (on_cpu(stage), None):
        options: dict[str, Any] = {"offload": offload}
        if dtype is not torch.float32:
            half = {"mixed_precision": zero.MixedPrecision(dtype)}
            options |= half if stage == 3 else {"master_dtype": torch.float32}
        model, optimizer = made(stage, OPTIMIZERS["adamw"], CASE.model().to(dtype if stage < 3 else None), **options)

        def closure(step: int) -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = loss_of(model, CASE.batch(rank, step))  # noqa: B023
            loss.backward()
            return loss.detach()

        for step in range(4):
            told.append(optimizer.step(partial(closure, step)) if step % 2 else closure(step))
            if step % 2 == 0:
                optimizer.step()
        told.append(zero.full_state_dict(model))
    same_where_the_cpu_steps(told[:5], told[5:])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1)])
@ranks.on(2)
def test_checkpoints_go_from_files_to_memory_and_back(rank, world, tmp_path, before, after):
    pairs = {
        before: made(before, OPTIMIZERS["adamw"], offload=zero.DiskOffload(tmp_path / "shards")),
        after: made(after, OPTIMIZERS["adamw"]),
    }

    def step(pair: tuple[Any, Any], number: int) -> float:
        return take_step(pair[1], loss_of(pair[0], CASE.batch(rank, number)))

    for source, target in ((before, after), (after, before)):
        for number in range(2):
            step(pairs[source], number)
        zero.checkpoint.save(tmp_path / f"from {source}", *pairs[source])
        zero.checkpoint.load(tmp_path / f"from {source}", *pairs[target])
        for number in range(2, 5):
            losses = (torch.tensor(step(pair, number)) for pair in pairs.values())
            same_where_the_cpu_steps(*losses, f"from {source}: loss {number}")


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, ValueError, "no room for the shards of (OSS|the root unit)", r"rank 1")
def test_a_directory_that_cannot_be_used_is_refused_on_every_rank(rank, world, tmp_path, stage):
    (tmp_path / "file").write_text("in the way")
    made(stage, SGD, nn.Linear(3, 3), offload=zero.DiskOffload(tmp_path / "file" if rank else tmp_path))


@ranks.raises(2, ValueError, "offload='cpu'", "zero.CPUOffload", r"rank 1")
def test_an_offload_that_is_none_is_refused_on_every_rank(rank, world):
    made(2, SGD, nn.Linear(3, 3), offload="cpu" if rank else None)


@ranks.raises(2, ValueError, "offload DiskOffload", "shards on the device")
def test_offload_on_one_rank_only_is_refused_on_every_rank(rank, world, tmp_path):
    made(2, SGD, nn.Linear(3, 3), offload=zero.DiskOffload(tmp_path) if rank else None)
