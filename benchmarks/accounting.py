"""How many bytes a training step keeps alive: tensors counted exactly, and the process's own peak.

A storage is the memory behind a tensor; see zero.plan.meter for how it is counted.
"""

import ctypes
import resource
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from zero.oss.gradients import full_gradient
from zero.plan.meter import Meter as CpuMemory
from zero.plan.meter import nbytes


class Memory(AbstractContextManager[Any], Protocol):
    """Counts the bytes of tensors while it is entered."""

    def live(self) -> int: ...

    def peak(self) -> int: ...

    def reset_peak(self) -> None: ...


def memory_of(device: torch.device) -> Memory:
    return CudaMemory() if device.type == "cuda" else CpuMemory()


class CudaMemory(AbstractContextManager["CudaMemory"]):
    """What CUDA's allocator itself has handed out."""

    def __exit__(self, *_: object) -> None: ...

    def live(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class Resident:
    """Bytes on this rank between a backward pass and the optimizer's step."""

    parameters: int
    gradients: int
    optimizer: int


def measure_resident(model: nn.Module, optimizer: Optimizer) -> Resident:
    # OSS steps an optimizer of its own over this rank's shards; their gradients and state are found there.
    inner = optimizer.optim if isinstance(optimizer, zero.OSS) else optimizer
    parameters = list(model.parameters())
    stepped = [p for group in inner.param_groups for p in group["params"]]
    return Resident(
        parameters=nbytes([*parameters, *model.buffers()]),
        gradients=nbytes(grad for p in [*parameters, *stepped] if (grad := full_gradient(p)) is not None),
        optimizer=nbytes(v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)),
    )


def return_freed_blocks_at_once() -> None:
    """Tells glibc to give freed blocks from 256 KiB up back to the system.

    Otherwise it keeps many of them, and the process's peak says more of the C library than of the program.
    """
    if sys.platform == "linux":
        mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
        ctypes.CDLL(None).mallopt(mmap_threshold, 256 * 1024)


def measure_process_peak() -> int:
    """The most memory that this process ever held, in bytes, the interpreter and its libraries included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
