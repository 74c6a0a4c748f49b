"""What the optimizer steps at stages 1 and 2, in files or in the memory of the CPU. Files lie elsewhere on a machine
without a GPU, too; for the CPU there is nothing to move then but masters."""

from __future__ import annotations

import ctypes
import os
import re
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW

import gpus
import matrix
import ranks
import zero
from models import take_step
from reference import at_stage, clip, same_where_the_cpu_steps, weights
from sidebyside import data
from zero._torch import PinnedMemory, pinned
from zero.features.offload.digests import digest
from zero.features.streams import Streams
from zero.shards import masters

STAGES = [1, 2]
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


def elsewhere(where: str, path: Path) -> Any:
    return Apart() if where == "apart" else zero.DiskOffload(path)


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 37), nn.Tanh(), nn.LayerNorm(37), nn.Linear(37, 11)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = data(5, 12, rank=rank, step=step).to(next(model.parameters()).dtype)
    return (model(inputs).float() - 1).square().mean()


def trained(rank: int, stage: int, optim: Any, **options: Any) -> list[Any]:
    """Steps with accumulation, a step without, clipping, and a state that is saved and loaded in between."""
    model, optimizer = at_stage(stage, model_of(), optim, **options)
    told: list[Any] = []
    for step in range(5):
        optimizer.zero_grad()
        if step == 2:
            with model.no_sync():
                loss_of(model, rank, 10).backward()
        elif step == 3:
            loss_of(model, rank, 11).backward()  # a second backward adds up
        loss = loss_of(model, rank, step)
        loss.backward()
        if step == 3:
            told.append(clip(model, optimizer, 0.05))
        optimizer.step()
        told += [loss.detach(), weights(model)]
        if step == 1:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
    return told


def beside_ddp(rank: int, world: int, stage: int, name: str, cut: str, offload: Any) -> None:
    optim = OPTIMIZERS[name]
    found = trained(rank, stage, optim, partition=cut, offload=offload)
    expected = trained(rank, 0, optim)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if number < 6:  # before clipping, which adds up the norm in another order
            same_where_the_cpu_steps(one, other, f"value {number}")
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@matrix.combined("stage, name, cut", STAGES, OPTIMIZERS, ["even", "whole"])
def test_training_from_files_is_exact(tmp_path, stage, name, cut):
    ranks.run(beside_ddp, args=(stage, name, cut, zero.DiskOffload(tmp_path)))
    assert not list(tmp_path.iterdir()), "files must be gone with the processes"


@matrix.combined("name, stage", OPTIMIZERS, STAGES)
def test_training_in_other_memory_is_exact(stage, name):
    ranks.run(beside_ddp, args=(stage, name, "even", Apart()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks.on(2)
def test_what_was_not_written_between_steps_is_not_compared(rank, world, dtype):
    """On a GPU all shards would be brought to the memory of the CPU for it."""
    model, optimizer = at_stage(2, model_of(dtype), OPTIMIZERS["adamw"], offload=Apart())
    with mock.patch.object(masters, "_written", wraps=masters._written) as compared:
        for step in range(4):
            if step == 2:
                compared.reset_mock()  # weights were sent to all ranks before the first step
            take_step(optimizer, loss_of(model, rank, step))
    assert not compared.called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_a_digest_tells_whatever_is_written(dtype):
    """Also changes of all elements at once that cancel out in a sum of products with odd numbers."""
    before = torch.randn(2**16, dtype=dtype)
    doubled, swapped, one = (before.clone() for _ in range(3))
    doubled *= 2
    swapped[[3, 70]] = before[[70, 3]]
    one[-1] += 1
    digests = [int(digest(values)) for values in (before, doubled, swapped, one, -before, before.flip(0))]
    assert len({*digests}) == len(digests)
    assert int(digest(before.clone())) == digests[0]


@pytest.fixture
def runtime() -> Any:
    """CUDA's, which pins everything."""
    found = mock.Mock()
    found.cudaHostRegister.return_value = 0
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.cudart", return_value=found),
    ):
        yield found


def test_pinned_memory_has_the_size_of_its_tensor_and_is_given_back(runtime):
    """torch's own allocator takes the next power of two."""
    there = pinned([5, 1000], torch.float32)
    assert (there.shape, there.dtype) == ((5, 1000), torch.float32)
    runtime.cudaHostRegister.assert_called_once_with(there.data_ptr(), 20_000, 0)
    address = there.data_ptr()
    assert not runtime.cudaHostUnregister.called
    del there
    runtime.cudaHostUnregister.assert_called_once_with(address)
    runtime.cudaHostRegister.return_value = 2
    with pytest.raises(RuntimeError, match=r"20000 bytes .* could not be pinned.*ulimit.*pin_memory=False"):
        pinned([5000], torch.float32)


def test_pinned_memory_is_used_again_once_no_view_of_it_is_left(runtime):
    """As of gradients, which are dropped after each step."""
    memory = PinnedMemory()
    first, second = memory.empty([6000], torch.float32), memory.empty([6000], torch.float32)
    address, view = first.data_ptr(), first[10:20]
    assert second.data_ptr() != address
    del first
    assert memory.empty([6000], torch.float32).data_ptr() not in (address, second.data_ptr())
    del view
    assert memory.empty([6000], torch.float32).data_ptr() == address
    del second, memory
    assert runtime.cudaHostUnregister.call_count == runtime.cudaHostRegister.call_count == 3


def test_gradients_get_pinned_memory_of_exact_size_once(runtime):
    like = pinned([2**18], torch.float32)
    with mock.patch("torch.get_device_module", return_value=mock.MagicMock()):
        streams = Streams(torch.device("cuda:0"))
    with (
        mock.patch("zero.features.streams.apart", lambda *_: True),  # noqa: PT008 - a mock keeps the tensors
        mock.patch.object(Tensor, "is_pinned", return_value=True),
        mock.patch.object(Tensor, "record_stream"),
    ):
        found = [streams.bring(torch.full([2**18 + 1], step), like).unique().tolist() for step in (1.0, 2.0, 3.0)]
    assert found == [[1], [2], [3]]
    sizes = [call.args[1] for call in runtime.cudaHostRegister.call_args_list]
    assert sizes == [2**20, 2**20 + 4]
    del like
    assert runtime.cudaHostUnregister.call_count == 2, "what was brought for a tensor goes with it"


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_parameters_of_16_bits_are_stepped_as_float32(rank, world, tmp_path, stage, offload):
    """What is stepped is float32, unless another dtype is asked for."""
    offload = zero.CPUOffload() if offload == "cpu" else zero.DiskOffload(tmp_path)
    models = [model_of(dtype=torch.bfloat16) for _ in range(2)]
    pairs = [
        at_stage(stage, models[0], OPTIMIZERS["adamw"], offload=offload),
        at_stage(stage, models[1], OPTIMIZERS["adamw"], master_dtype=torch.float32),
    ]
    for step in range(3):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            clip(model, optimizer, 0.1)
            optimizer.step()
        same_where_the_cpu_steps(*(weights(model) for model, _ in pairs), f"step {step}")
    for _, optimizer in pairs:
        optimizer.consolidate_state_dict(to=None)
    states = [optimizer.state_dict()["state"] for _, optimizer in pairs]
    assert "master" in states[0][0] and states[0][0]["master"].dtype is torch.float32
    same_where_the_cpu_steps(*states, "the full state")


@gpus.cpu_only("says what is without a GPU")
@ranks.on(2)
def test_without_a_gpu_shards_stay_where_they_are(rank, world):
    model = model_of()
    optimizer = zero.OSS(model.parameters(), SGD, lr=0.1, offload=zero.CPUOffload())
    for param in model.parameters():
        shard = optimizer.part(param)
        inside = param.data_ptr() <= shard.data_ptr() < param.data_ptr() + max(param.nbytes, 1)
        assert not shard.numel() or inside, "on the CPU shards of enough bits are where they should be"


@pytest.mark.parametrize("where", ["disk", "apart"])
@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_weights_that_are_written_between_steps_are_taken_over(rank, world, tmp_path, stage, where):
    pairs = [
        at_stage(stage, model_of(), OPTIMIZERS["sgd"], offload=elsewhere(where, tmp_path)),
        at_stage(0, model_of(), OPTIMIZERS["sgd"]),
    ]
    other = model_of(seed=1).state_dict()
    for step in range(3):
        for model, optimizer in pairs:
            if step == 1:
                for name, param in model.module.named_parameters():
                    param.data.copy_(other[name])
            take_step(optimizer, loss_of(model, rank, step))
        same_where_the_cpu_steps(*(weights(model) for model, _ in pairs), f"step {step}")


@ranks.on(2)
def test_an_optimizer_that_is_not_elementwise_steps_all_at_once(rank, world, tmp_path):
    optim = partial(Adafactor, lr=1e-2)
    pairs = [at_stage(2, model_of(), optim, offload=offload) for offload in (zero.DiskOffload(tmp_path), None)]
    for step in range(3):
        for model, optimizer in pairs:
            take_step(optimizer, loss_of(model, rank, step))
        same_where_the_cpu_steps(*(weights(model) for model, _ in pairs), f"step {step}")


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_losses_are_scaled_as_without(rank, world, tmp_path, stage):
    """An infinite gradient on one rank skips the step on all."""
    pairs = [
        at_stage(stage, model_of(), OPTIMIZERS["sgd"], offload=offload)
        for offload in (zero.DiskOffload(tmp_path), None)
    ]
    scalers = [zero.GradScaler(gpus.DEVICE, init_scale=4.0) for _ in pairs]
    for step in range(3):
        for (model, optimizer), scaler in zip(pairs, scalers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step) * (torch.inf if step == 1 and rank == 1 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm(0.1)
            scaler.step(optimizer)
            scaler.update()
        same_where_the_cpu_steps(*(weights(model) for model, _ in pairs), f"step {step}")
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 2.0]


@ranks.on(2)
def test_hooks_on_the_optimizer_see_one_step(rank, world, tmp_path):
    model, optimizer = at_stage(2, model_of(), OPTIMIZERS["adamw"], offload=zero.DiskOffload(tmp_path))
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    optimizer.optim.register_step_post_hook(lambda *_: steps.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)  # the last is handed over at the next step
    assert len(steps) == 3


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
@ranks.on(2)
def test_checkpoints_go_from_files_to_memory_and_back(rank, world, tmp_path, before, after):

    def made(stage: int) -> tuple[nn.Module, Any]:
        if stage == 3:
            model = zero.FSDP(model_of())
            return model, AdamW(model.parameters(), lr=1e-2)
        offload = zero.DiskOffload(tmp_path / "shards") if stage == before else None
        return at_stage(stage, model_of(), OPTIMIZERS["adamw"], offload=offload)

    def step(model: nn.Module, optimizer: Any, number: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rank, number)
        loss.backward()
        optimizer.step()
        return loss.detach()

    pairs = {stage: made(stage) for stage in (before, after)}
    for source, target in ((before, after), (after, before)):
        for number in range(2):
            step(*pairs[source], number)
        zero.checkpoint.save(tmp_path / f"from {source}", *pairs[source])
        zero.checkpoint.load(tmp_path / f"from {source}", *pairs[target])
        for number in range(2, 5):
            losses = (step(*pair, number) for pair in pairs.values())
            same_where_the_cpu_steps(*losses, f"from {source}: loss {number}")


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def grown(rank: int, world: int, path: Path | None) -> float:
    """By how many bytes a parameter the process grew at most, while a rank alone trained at stage 2 with Adam."""
    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD: have glibc give back what is freed, as jemalloc does
    nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()  # torch's own memory is not to count
    before = resident("RssAnon")
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    offload = None if path is None else zero.DiskOffload(path)
    optimizer = zero.OSS(model.parameters(), Adam, lr=1e-4, offload=offload)
    wrapped = zero.ShardedDDP(model, optimizer)
    for _ in range(2):
        take_step(optimizer, wrapped(torch.ones(1, 1024)).sum())
    return (resident("RssAnon") - before) / sum(param.numel() for param in model.parameters())


@gpus.cpu_only("measures the memory of the host")
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc to see what is resident")
def test_what_is_stepped_and_its_state_are_not_resident(tmp_path):
    """Parameters and gradients are, 8 bytes a parameter; Adam's state takes as much again in memory."""
    assert ranks.run(grown, 1, args=(tmp_path,), fresh=True)[0] < 9
    assert ranks.run(grown, 1, args=(None,))[0] > 15


@ranks.raises(2, ValueError, "no room for the shards of OSS", r"rank 1")
def test_a_directory_that_cannot_be_used_is_refused_on_every_rank(rank, world, tmp_path):
    (tmp_path / "file").write_text("in the way")
    offload = zero.DiskOffload(tmp_path / "file" if rank else tmp_path)
    zero.OSS(model_of().parameters(), SGD, lr=0.1, offload=offload)


@ranks.raises(2, ValueError, "offload='cpu'", "zero.CPUOffload", r"rank 1")
def test_an_offload_that_is_none_is_refused_on_every_rank(rank, world):
    zero.OSS(model_of().parameters(), SGD, lr=0.1, offload="cpu" if rank else None)


@ranks.raises(2, ValueError, "offload DiskOffload", "shards on the device")
def test_offload_on_one_rank_only_is_refused_on_every_rank(rank, world, tmp_path):
    zero.OSS(model_of().parameters(), SGD, lr=0.1, offload=zero.DiskOffload(tmp_path) if rank else None)
