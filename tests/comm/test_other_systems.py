"""Systems that lack what Linux has: zero is imported and trains over Gloo. What they lack is taken away on Linux."""

import ctypes
import importlib
import mmap
import os
import select
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import zero
from transports import READS

WINDOWS = {
    os: "fork register_at_fork pidfd_open posix_fadvise posix_fallocate setpriority PRIO_PROCESS sched_getaffinity",
    mmap: "MAP_PRIVATE MAP_ANONYMOUS MADV_DONTFORK MADV_DONTNEED MADV_HUGEPAGE MADV_WILLNEED",
    select: "poll epoll",
    socket: "SO_PEERCRED MSG_NOSIGNAL SOCK_SEQPACKET TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT",
}
MACOS = {
    os: "pidfd_open posix_fadvise posix_fallocate sched_getaffinity",
    mmap: "MADV_DONTFORK MADV_HUGEPAGE",
    select: "epoll",
    socket: "SO_PEERCRED MSG_NOSIGNAL",
}


class WithoutReading(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "process_vm_readv":
            raise AttributeError(name)
        return super().__getattr__(name)


def no_library(*args: Any, **kwargs: Any) -> Any:
    raise OSError("there is no such library")


def take(names: dict[Any, str], platform: str = sys.platform) -> None:
    sys.platform = platform
    for module, of_module in names.items():
        for name in of_module.split():
            vars(module).pop(name, None)


LACKING: dict[str, Callable[[], object]] = {
    "process_vm_readv": lambda: setattr(ctypes, "CDLL", WithoutReading),
    "libc": lambda: setattr(ctypes, "CDLL", no_library),
    "register_at_fork": lambda: take({os: "register_at_fork"}),
    "macOS": lambda: (take(MACOS, "darwin"), setattr(ctypes, "CDLL", WithoutReading)),
    "Windows": lambda: (take(WINDOWS, "win32"), setattr(ctypes, "CDLL", no_library)),
}


def trains(rank: int, world: int, lacking: str, folder: Path) -> tuple[str, list[list[float]]]:
    for name in [name for name in sys.modules if name.split(".")[0] == "zero"]:
        del sys.modules[name]
    LACKING[lacking]()
    again: Any = importlib.import_module("zero")
    found = []
    for stage, offload in [(0, None), (1, None), (2, None), (3, None), (3, again.DiskOffload(folder))]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        model, optimizer = again.setup(model, torch.optim.Adam, stage=stage, lr=0.1, offload=offload)
        losses = []
        for step in range(4):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    comm: Any = importlib.import_module("zero.comm").Comm()
    return comm.transport_name(torch.device("cpu")), found


@pytest.mark.slow
@pytest.mark.parametrize("lacking", LACKING)
def test_all_stages_train_over_gloo_as_ddp_does(lacking, tmp_path):
    expected = "host memory" if lacking == "register_at_fork" else "gloo"
    for transport, (plainly, *others) in ranks.run(trains, 2, (lacking, tmp_path), fresh=True):
        assert len({*plainly}) == 4
        assert others == [pytest.approx(plainly, rel=1e-6)] * 4
        assert transport == (expected if READS else "gloo")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,mps:gloo"])
@ranks.raises(2, ValueError, r'no backend for mps: move the model to the CPU by model\.to\("cpu"\) first')
def test_a_model_on_mps_is_refused_on_every_rank(rank, world, stage, backend):
    on_mps = {"return_value": [torch.device("mps")]}
    with (
        mock.patch("zero.oss.options.devices_of", **on_mps),
        mock.patch("zero.fsdp.choice.UnitChoice.devices", **on_mps),
    ):
        group = dist.new_group(backend=backend)
        zero.setup(nn.Linear(3, 3), torch.optim.Adam, stage=stage, process_group=group)
