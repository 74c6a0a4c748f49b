"""A GPT trained on one GPU with offload to the CPU, by zero at each stage and by FSDP2, for benchmarks/offload.py.

All compute in bfloat16 with float32 master weights and fused AdamW on the CPU. Gradients are reduced in float32, but at
stages 1 and 2 they are those of bfloat16 parameters.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from accounting import measure_process_peak
from contestants import Settings, Trained
from gpt import Block
from launch import Rank
from measure import wait_for_device

WARM_UP = 3
adamw = partial(AdamW, lr=1e-4, fused=True)


class Crossings(TorchDispatchMode):
    """Counts the bytes that copies bring to the CPU (`down`) and away from it (`up`). Numbers are not counted."""

    down = up = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator is torch.ops.aten._to_copy:
            self._note(args[0], result)
        elif operator is torch.ops.aten.copy_:
            self._note(args[1], args[0])
        elif operator is torch.ops.aten._foreach_copy_:
            for to, source in zip(*args[:2], strict=True):
                self._note(source, to)
        return result

    def _note(self, source: Tensor, to: Tensor) -> None:
        """torch converts the dtype before it copies."""
        if source.dim() and source.device.type != to.device.type:
            if to.device.type == "cpu":
                self.down += to.nbytes
            elif source.device.type == "cpu":
                self.up += to.nbytes


def at_stage(stage: int, settings: Settings, rank: Rank) -> Trained:
    model, options = settings.build(rank.device), {"stage": stage, "offload": zero.CPUOffload()}
    if stage < 3:
        return zero.setup(model.bfloat16(), adamw, **options)
    precision = zero.MixedPrecision(torch.bfloat16, torch.float32)
    return zero.setup(model, adamw, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision, **options)


def fsdp2(settings: Settings, rank: Rank) -> Trained:
    model, mesh = settings.build(rank.device), init_device_mesh(rank.device.type, (rank.world,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=rank.device.type == "cuda"),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, adamw(model.parameters())


CONTESTANTS: dict[str, Callable[[Settings, Rank], Trained]] = {
    "FSDP2": fsdp2,
    **{f"stage {stage}": partial(at_stage, stage) for stage in (1, 2, 3)},
}


def measure_training(title: str, settings: Settings, rank: Rank, *, threads: int = 1) -> dict[str, float]:
    """Medians over the steps. threads: of the CPU's step.

    down, up: bytes of a settled step between GPU and CPU; host: by how many bytes the
    process grew at most; all three an element of the model. peak: bytes on the GPU."""
    torch.set_num_threads(threads)
    wait_for_device(rank.device)
    before = measure_process_peak()
    model, optimizer = CONTESTANTS[title](settings, rank)
    batch = settings.batch(rank.device)

    def step() -> tuple[float, float]:
        """Milliseconds of forward and backward, and of the step."""
        wait_for_device(rank.device)
        begin = time.perf_counter()
        model(*batch).backward()
        wait_for_device(rank.device)
        between = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        wait_for_device(rank.device)
        return 1000 * (between - begin), 1000 * (time.perf_counter() - between)

    for _ in range(WARM_UP):
        step()
    on_gpu = rank.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    backward_ms, step_ms = (statistics.median(ms) for ms in zip(*(step() for _ in range(settings.steps)), strict=True))
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    with Crossings() as crossed:
        step()
    numel = sum(param.numel() for param in settings.build(torch.device("meta")).parameters())
    return {
        "backward_ms": backward_ms,
        "step_ms": step_ms,
        "down": crossed.down / numel,
        "up": crossed.up / numel,
        "peak": peak,
        "host": (measure_process_peak() - before) / numel,
    }
