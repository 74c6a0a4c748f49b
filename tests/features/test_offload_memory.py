"""What offload keeps out of memory, and the memory that it uses: files, pinned memory, digests of what stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.optim.adam as adam
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam

import gpus
import ranks
import zero
from models import take_step
from zero._torch import PinnedMemory, pinned
from zero.features.offload import Disk
from zero.features.offload.digests import digest
from zero.features.streams import Streams


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def grown(rank: int, world: int, stage: int, path: Path | None) -> float:
    """By how many bytes a parameter the process grew at most while a rank alone trained with Adam; at stage 2, where
    parameters stay, without pages of files."""
    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD: have glibc give back what is freed, as jemalloc does
    width, layers = 1024, 24  # 4 MiB a layer
    nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()  # torch's own memory is not to count
    before, peak = ("RssAnon", "RssAnon") if stage == 2 else ("VmRSS", "VmHWM")
    held = resident(before)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    with torch.device("cpu" if stage == 2 else "meta"):
        inner = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    offload = None if path is None else zero.DiskOffload(path)
    if stage == 3:
        policy = ModuleWrapPolicy({nn.Linear})
        model = zero.FSDP(inner, auto_wrap_policy=policy, prefetch=zero.MEMORY_FIRST, offload=offload)
        optimizer = Adam(model.parameters(), lr=1e-4)
    else:
        model, optimizer = zero.setup(inner, Adam, stage=stage, lr=1e-4, offload=offload)
    for _ in range(2):
        take_step(optimizer, model(torch.ones(1, width)).sum())
    return (resident(peak) - held) / (layers * width * width)


@gpus.cpu_only("measures the memory of the host")
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc to see peaks")
@pytest.mark.parametrize(("stage", "most"), [(2, 9), (3, 6)])
def test_what_is_stepped_and_its_state_are_not_resident(tmp_path, stage, most):
    """Adam's state takes 8 bytes a parameter in memory, gradients 4, and so do parameters or their shards. The last
    of these are in files at stage 3 alone."""
    assert ranks.run(grown, 1, args=(stage, tmp_path), fresh=stage == 2)[0] < most
    assert ranks.run(grown, 1, args=(stage, None))[0] > 15


class Told(mmap.mmap):
    """Notes what the operating system is told of a file."""

    events: ClassVar[list[tuple[str, int]]] = []

    def madvise(self, option: int, *more: int) -> None:
        told = {mmap.MADV_WILLNEED: "reads ahead", mmap.MADV_DONTNEED: "releases"}[option]
        self.events.append((told, len(self)))
        super().madvise(option, *more)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(1)
def test_while_a_parameter_is_stepped_the_files_of_the_next_are_read(rank, world, tmp_path, stage):
    """The files of Adam's state are known by their sizes, that of the shards is the largest."""
    module = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in [(100, 10), (10, 200), (200, 15)]))
    step = adam.adam

    def noted(params: list[Tensor], *args: Any, **options: Any) -> None:
        Told.events.extend(("steps", param.nbytes) for param in params)
        step(params, *args, **options)

    with mock.patch("mmap.mmap", Told), mock.patch.object(adam, "adam", noted):
        model, optimizer = zero.setup(module, Adam, stage=stage, lr=0.1, offload=zero.DiskOffload(tmp_path))
        for _ in range(2):
            Told.events.clear()
            take_step(optimizer, model(torch.ones(1, 100)).sum())
    shards = "reads ahead", max(nbytes for _, nbytes in Told.events)
    first, second, third = (4000, 8000, 12000)[:: 1 if stage == 3 else -1]  # in the order in which they lie
    assert [event for event in Told.events if event[0] != "releases"] == [
        *(shards, ("reads ahead", second), ("reads ahead", second), ("steps", first)),
        *(shards, ("reads ahead", third), ("reads ahead", third), ("steps", second)),
        ("steps", third),
    ]


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
