"""`python -m zero.report`: versions, devices, and how ranks can reach each other here, to paste into an issue.

Needs no process group, starts no rank, and never raises: what cannot be determined is printed with the reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_EXTRAS = ["accelerate", "fsspec", "lightning", "peft", "safetensors", "tqdm", "transformers"]


def environment() -> str:
    """The report as text, a line a fact."""
    lines: list[str] = []
    for title, facts in [("versions", _versions), ("devices", _devices), ("transports", _transports)]:
        lines.append(f"{title}:")
        try:
            for fact in facts():
                lines.append(f"  {fact}")
        except Exception as error:  # the report must come, whatever is wrong here
            lines.append(f"  could not be determined ({type(error).__name__}: {error})")
    return "\n".join(lines)


def _versions() -> Iterator[str]:
    yield f"python {platform.python_version()} on {platform.platform()}"
    yield _attempt("torch", _torch)
    yield f"zero {_version('progressive-zero') or 'from its source'}"
    for name in ["numpy", *_EXTRAS]:
        yield f"{name} {_version(name) or 'is not installed'}"


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads, CUDA {torch.version.cuda or 'not built in'}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"{os.cpu_count()} CPU cores, {usable} of them for this process"
    yield from _attempt("GPUs", _gpus).splitlines()


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that torch can use"
    each = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return _listed(f"{one.name}, {one.total_memory / 2**30:.1f} GiB" for one in each)


def _transports() -> Iterator[str]:
    yield _attempt("backends of torch.distributed", _backends)
    yield _attempt("host memory", _host_memory)
    set_here = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("ZERO_")}
    yield f"environment: {_listed(f'{name}={value}' for name, value in set_here.items())}"


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
    refused = _read_own_memory()
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    yama = scope.read_text().strip() if scope.exists() else None
    meaning = {
        None: "no Yama: processes of one user may",
        "0": "ptrace_scope 0: processes of one user may",
        "1": "ptrace_scope 1: ranks of one launcher may, once each has permitted it",
        "2": "ptrace_scope 2: administrators only",
        "3": "ptrace_scope 3: nobody",
    }
    return f"process_vm_readv {refused or 'works'}; {meaning.get(yama, f'ptrace_scope {yama}')}"


def _read_own_memory() -> str | None:
    """Why this process cannot read its own memory as ranks read one another's; None if it can."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return "is not there"
    call.restype = ctypes.c_ssize_t
    there, here = ctypes.create_string_buffer(b"12345678", 8), ctypes.create_string_buffer(8)
    ranges = [(ctypes.c_size_t * 2)(ctypes.addressof(one), 8) for one in (here, there)]
    if call(os.getpid(), ranges[0], ctypes.c_ulong(1), ranges[1], ctypes.c_ulong(1), ctypes.c_ulong(0)) != 8:
        return f"is refused ({os.strerror(ctypes.get_errno())})"
    return None if here.raw == there.raw else "reads other bytes than are there"


def _attempt(what: str, find: Callable[[], str]) -> str:
    try:
        return f"{what}: {find()}"
    except Exception as error:
        return f"{what}: could not be determined ({type(error).__name__}: {error})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
