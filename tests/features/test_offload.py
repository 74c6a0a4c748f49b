"""Shards in the memory of the CPU and in files. Without a GPU, CPUOffload has nothing to move."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.optim.adam as adam
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adafactor, Adam, AdamW

import gpus
import matrix
import ranks
import zero
from models import CASES, take_step
from sidebyside import SideBySide, sgd, stage_3
from zero.comm.wire import PLAIN
from zero.features.offload import Disk
from zero.features.writes import GroupWrites
from zero.state.weights import _Gradients


def fused_adam(params: Any) -> Adam:
    return Adam(params, lr=1e-2, fused=True)


def train(rank: int, world: int, offload: Any, optim: Any, options: dict[str, Any], name: str = "mlp") -> None:
    case = CASES[name]
    torch.manual_seed(0)
    tolerance = 1e-4 if gpus.ON else 0.0  # the CPU's step rounds otherwise than the GPU's
    both = SideBySide(case.model(), partial(stage_3, offload=offload, **options), optim, tolerance=tolerance)
    for step in range(3):
        batch = case.batch(rank, step)
        both.step(lambda model: model(*batch.inputs).square().mean())  # noqa: B023
        gradients = [param.grad for param in both.model.parameters() if param.grad is not None]
        assert gradients, "a step must leave the gradients where they are"
    batches = case.batch(rank, 3), case.batch(rank, 4)
    both.step(*(lambda model, batch=batch: model(*batch.inputs).square().mean() for batch in batches), unsent=1)
    saved = both.optimizer.state_dict()
    both.optimizer.load_state_dict(saved)  # copies of state, which are in memory until the next step
    both.step(lambda model: model(*case.batch(rank, 5).inputs).square().mean())


OPTIONS: dict[str, dict[str, Any]] = {
    "even": {},
    "whole": {"partition": "whole"},
    "kept": {"reshard_after_forward": False},
    "memory first": {"prefetch": zero.MEMORY_FIRST},
}


@matrix.combined("options, optim", OPTIONS.values(), [sgd, partial(AdamW, lr=1e-2), fused_adam])
def test_training_from_files_is_exact(tmp_path, optim, options):
    ranks.run(train, args=(zero.DiskOffload(tmp_path), optim, options))
    assert not list(tmp_path.iterdir()), "files must be gone with the processes"


def test_training_offloaded_to_the_cpu_is_exact():
    ranks.run(train, args=(zero.CPUOffload(), sgd, {}))


def test_an_optimizer_that_is_not_elementwise_steps_all_at_once(tmp_path):
    optim = partial(Adafactor, lr=1e-2)
    ranks.run(train, args=(zero.DiskOffload(tmp_path), optim, {"partition": "whole"}, "gpt"))


@ranks.on(2)
def test_hooks_and_schedulers_see_one_step(rank, world, tmp_path):
    """One optimizer holds parameters that are sharded and one that is not; its hooks and scheduler see single steps."""
    torch.manual_seed(0)
    model = zero.FSDP(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), offload=zero.DiskOffload(tmp_path))
    outside = nn.Parameter(torch.ones(3))
    optimizer = SGD([*model.parameters(), outside], lr=0.1, momentum=0.9)
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(2, 5)).sum() + outside.sum()).backward()
        optimizer.step()
        scheduler.step()
    assert len(steps) == 3
    assert outside.tolist() == pytest.approx([1 - 0.1 - 0.05 * 1.9 - 0.025 * 2.71] * 3)


class Wide(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def held(rank: int, world: int, path: Path | None) -> tuple[int, int]:
    """Bytes of shards and optimizer state, and by how much the process grew at most while it trained with them."""
    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD: have glibc give back what is freed, as jemalloc does
    width, layers = 1024, 24  # 4 MiB a layer
    nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()  # torch's own memory is not to count
    with torch.device("meta"):
        inner = Wide(width, layers)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    offload = None if path is None else zero.DiskOffload(path)
    model = zero.FSDP(
        inner, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), prefetch=zero.MEMORY_FIRST, offload=offload
    )
    optimizer = Adam(model.parameters(), lr=1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
    return 12 * sum(param.numel() for param in model.parameters()), resident("VmHWM") - before


@gpus.cpu_only("measures the memory of the host")
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc to see peaks")
def test_less_is_resident_than_parts_and_state_are_large(tmp_path):
    """Gradients stay in memory, a third of what shards and state take; besides them what is used at a time."""
    state, peak = ranks.run(held, 1, args=(tmp_path,))[0]
    assert state == 12 * 24 * 1024 * 1024
    assert peak < 0.5 * state
    _, in_memory = ranks.run(held, 1, args=(None,))[0]
    assert in_memory > 1.25 * state


class Told(mmap.mmap):
    """Notes what the operating system is told of a file."""

    events: ClassVar[list[tuple[str, int]]] = []

    def madvise(self, option: int, *more: int) -> None:
        told = {mmap.MADV_WILLNEED: "reads ahead", mmap.MADV_DONTNEED: "releases"}[option]
        self.events.append((told, len(self)))
        super().madvise(option, *more)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(1)
def test_while_a_parameter_is_stepped_the_files_of_the_next_are_read(rank, world, tmp_path, stage, overlap):
    """The files of Adam's state are known by their sizes, that of the shards is the largest."""
    module = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in [(100, 10), (10, 200), (200, 15)]))
    offload, step = zero.DiskOffload(tmp_path, overlap=overlap), adam.adam

    def noted(params: list[Tensor], *args: Any, **options: Any) -> None:
        Told.events.extend(("steps", param.nbytes) for param in params)
        step(params, *args, **options)

    with mock.patch("mmap.mmap", Told), mock.patch.object(adam, "adam", noted):
        model, optimizer = zero.setup(module, Adam, stage=stage, lr=0.1, offload=offload)
        for _ in range(2):
            Told.events.clear()
            optimizer.zero_grad()
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            [*model.parameters()]  # waits for the steps
    shards = "reads ahead", max(nbytes for _, nbytes in Told.events)
    first, second, third = (4000, 8000, 12000)[:: 1 if stage == 3 else -1]  # in the order in which they lie
    assert [event for event in Told.events if event[0] != "releases"] == [
        *(shards, ("reads ahead", second), ("reads ahead", second), ("steps", first)),
        *(shards, ("reads ahead", third), ("reads ahead", third), ("steps", second)),
        ("steps", third),
    ]


@ranks.on(2)
def test_a_checkpoint_goes_from_files_to_files(rank, world, tmp_path):
    case = CASES["gpt"]
    torch.manual_seed(rank)
    models = [zero.FSDP(case.model(), offload=zero.DiskOffload(tmp_path / "shards")) for _ in range(2)]
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]

    def step(model: zero.FSDP, optimizer: AdamW, number: int) -> float:
        return take_step(optimizer, model(*case.batch(rank, number).inputs).square().mean())

    for number in range(2):
        step(models[0], optimizers[0], number)
    zero.checkpoint.save(tmp_path / "run", models[0], optimizers[0])
    zero.checkpoint.load(tmp_path / "run", models[1], optimizers[1])
    losses = [[step(*pair, number) for number in range(2, 5)] for pair in zip(models, optimizers, strict=True)]
    assert losses[0] == losses[1]


@ranks.raises(2, ValueError, "no room for the shards of the root unit", r"rank 1")
def test_a_directory_that_cannot_be_used_is_refused_on_every_rank(rank, world, tmp_path):
    (tmp_path / "file").write_text("in the way")
    zero.FSDP(nn.Linear(3, 3), offload=zero.DiskOffload(tmp_path / "file" if rank else tmp_path))


def test_a_tensor_in_a_file_keeps_its_values_and_its_order_in_memory(tmp_path):
    disk = Disk(tmp_path)
    for tensor in (torch.randn(4, 3), torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), torch.ones(0, 2)):
        placed = disk.place(tensor)
        disk.used(placed)
        assert torch.equal(placed, tensor.cpu()) and placed.stride() == tensor.stride()
        placed += 1
        disk.used(placed)
        assert torch.equal(placed, tensor.cpu() + 1)
    assert disk.place(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_was_written_in_forward_on_a_gpu_goes_to_a_shard_in_the_memory_of_the_cpu():
    with FakeTensorMode():
        full, shard = torch.empty(8, device="cuda"), torch.empty(8, device="cpu")
        on_gpu = SimpleNamespace(gathered_as=PLAIN, own_of_full=full, shard=shard)
        GroupWrites(on_gpu).take_over()  # type: ignore[arg-type]


def test_full_gradients_go_back_to_where_the_shards_are():
    param = nn.Parameter(torch.empty(4, device="meta"))  # which stands for another device
    group = SimpleNamespace(
        params=[param],
        shard=param.data,
        spans=[0],
        comm=SimpleNamespace(rank=0),
        layout=SimpleNamespace(segment=lambda rank: slice(0, 4)),
        views_of_shard=lambda shard: [shard],
    )
    gradients = _Gradients.__new__(_Gradients)
    gradients._group, gradients._shards = group, [torch.empty(4, device="meta")]  # type: ignore[assignment]
    gradients._full, param.grad = torch.empty(8), gradients._shards[0]
    gradients.end(keep=True)
    assert param.grad is not None and param.grad.is_meta
