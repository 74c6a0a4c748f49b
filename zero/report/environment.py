"""`python -m zero.report`: versions, devices, and how ranks can reach each other here, to paste into an issue.

Needs no process group, starts no rank, and never raises: what cannot be determined is printed with the reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ["numpy", "accelerate", "fsspec", "lightning", "peft", "safetensors", "tqdm", "transformers"]


def environment() -> str:
    """The report as text, a line a fact."""
    lines: list[str] = []
    for title, facts in _FACTS.items():
        lines.append(f"{title}:")
        for what, find in facts.items():
            try:
                found = find()
            except Exception as error:  # the report must come, whatever is wrong here
                found = f"could not be determined ({type(error).__name__}: {error})"
            lines.append(f"  {what}: {found}")
    return "\n".join(lines)


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads, CUDA {torch.version.cuda or 'not built in'}"


def _version(name: str, otherwise: str = "not installed") -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return otherwise


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{os.cpu_count()}, {usable} of them for this process"


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that torch can use"
    each = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return _listed(f"{one.name}, {one.total_memory / 2**30:.1f} GiB" for one in each)


def _backends() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "none: torch was built without torch.distributed"
    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    names = _listed(name for name, available in there.items() if available())
    return f"{names}; {'initialised' if dist.is_initialized() else 'not initialised'}"


def _host_memory() -> str:
    """Whether ranks of this host can read one another's memory, as far as one process can find out."""
    if sys.platform != "linux":
        return f"not on {sys.platform}: Gloo sends"
    if os.environ.get("ZERO_HOST_MEMORY") == "0":
        return "switched off by ZERO_HOST_MEMORY=0: Gloo sends"
    from zero.features.host_memory.attach import read  # the folder may be missing

    there, here = ctypes.create_string_buffer(b"12345678", 8), ctypes.create_string_buffer(8)
    try:
        read(os.getpid(), ctypes.addressof(there), ctypes.addressof(here), 8)
        found = "works" if here.raw == there.raw else "reads other bytes than are there"
    except OSError as error:
        found = f"is refused ({error})"
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    yama = f"Yama's ptrace_scope is {scope.read_text().strip()}" if scope.exists() else "no Yama"
    return f"process_vm_readv {found}; {yama}"


def _variables() -> str:
    return _listed(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("ZERO_"))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


_FACTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "versions": {
        "python": lambda: f"{platform.python_version()} on {platform.platform()}",
        "torch": _torch,
        "zero": partial(_version, "progressive-zero", "from its source"),
        **{name: partial(_version, name) for name in _PACKAGES},
    },
    "devices": {"CPU cores": _cores, "GPUs": _gpus},
    "transports": {
        "backends of torch.distributed": _backends,
        "host memory": _host_memory,
        "environment": _variables,
    },
}
