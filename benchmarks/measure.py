"""What a rank does in each of the benchmark's passes. Every pass runs in processes of its own.

The passes return plain dictionaries, which travel to the parent as JSON.
"""

import os
import resource
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import zero
from accounting import measure_process_peak, measure_resident, memory_of, return_freed_blocks_at_once
from choices import OPTIMIZERS, STAGES, predict_ddp_sent
from gpt import GPT, Block, draw_batch
from launch import Rank
from zero.comm import Comm
from zero.plan import Plan
from zero.plan.meter import nbytes

SEED = 0
WARM_UP = 2  # optimizer state appears in the first step, and DDP orders its buckets anew in the second
ACCOUNTED_STEPS = WARM_UP + 1


@dataclass(frozen=True)
class Settings:
    """What all stages have in common. The text itself is in it: a file could change from stage to stage."""

    steps: int
    layers: int
    width: int
    optim: str
    text: NDArray[np.uint8]


class Training:
    """One rank's model, optimizer and data at one stage."""

    def __init__(self, settings: Settings, stage: str, rank: Rank) -> None:
        self._rank = rank
        self._text = settings.text
        choice = OPTIMIZERS[settings.optim]
        self.model, self.optimizer = zero.setup(
            build_model(settings, rank.device),
            choice.type,
            stage=STAGES[stage].number,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            **choice.arguments,
        )

    def step(self, step: int) -> Tensor:
        loss = self.compute_gradients(step)
        self.update()
        return loss

    def compute_gradients(self, step: int) -> Tensor:
        tokens, targets = draw_batch(self._text, seed=SEED, step=step, rank=self._rank.rank)
        loss: Tensor = self.model(tokens.to(self._rank.device), targets.to(self._rank.device))
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._rank.tick()


def build_model(settings: Settings, device: torch.device) -> GPT:
    torch.manual_seed(SEED)
    return GPT(settings.layers, settings.width).to(device)


def plan_stages(settings: Settings, world: int) -> tuple[Plan, dict[str, int]]:
    """What the stages should cost, and the sizes of the model. Runs nothing."""
    model = build_model(settings, torch.device("meta"))
    choice = OPTIMIZERS[settings.optim]
    plan = zero.plan(
        model,
        world_size=world,
        optimizer=partial(choice.type, **choice.arguments),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        batch=draw_batch(settings.text, seed=SEED, step=0, rank=0),
        backend="nccl" if torch.cuda.is_available() else "gloo",
        one_host=os.environ.get("ZERO_HOST_MEMORY") != "0",
    )
    parameters = [*model.parameters()]
    return plan, {
        "parameters": sum(p.numel() for p in parameters),
        "parameters_bytes": sum(p.nbytes for p in parameters),
    }


def account_step(settings: Settings, stage: str, rank: Rank) -> dict[str, int]:
    """Bytes of a settled step, at rest and at its peak."""
    return_freed_blocks_at_once()
    with memory_of(rank.device) as memory:
        training = Training(settings, stage, rank)
        for step in range(WARM_UP):
            training.step(step)
        memory.reset_peak()
        training.compute_gradients(WARM_UP)
        resident = measure_resident(training.model, training.optimizer)
        training.update()
        peak = memory.peak()
    return {
        "parameters_bytes": resident.parameters,
        "gradients_bytes": resident.gradients,
        "optimizer_bytes": resident.optimizer,
        "peak_bytes": peak,
        "process_peak_bytes": measure_process_peak(),
    }


def time_steps(settings: Settings, stage: str, rank: Rank) -> dict[str, Any]:
    """Times and bytes sent in the steps after the warm-up, and the losses of all, as means over the ranks."""
    training = Training(settings, stage, rank)
    losses = [training.step(step) for step in range(WARM_UP)]
    sent, cpu_seconds, step_seconds = zero.traffic(), read_cpu_seconds(), []
    for step in range(WARM_UP, settings.steps):
        wait_for_device(rank.device)
        begin = time.perf_counter()
        losses.append(training.step(step))
        wait_for_device(rank.device)
        step_seconds.append(time.perf_counter() - begin)
    timed = settings.steps - WARM_UP
    sent = zero.traffic() - sent
    sent_a_step = sent.total // timed
    cpu_seconds = read_cpu_seconds() - cpu_seconds
    if STAGES[stage].ddp and not sent.reduce:  # otherwise gradients are averaged through zero, and counted
        gradients_bytes = nbytes(p for p in training.model.parameters() if p.requires_grad)
        sent_a_step += predict_ddp_sent(world=rank.world, gradients_bytes=gradients_bytes)
    return {
        "sent_bytes_per_step": sent_a_step,
        "step_ms": 1000 * statistics.median(step_seconds),
        "cpu_ms": 1000 * cpu_seconds / timed,
        "losses": average_over_ranks(losses, rank.world),
        "transport": name_transport(rank),
    }


def name_transport(rank: Rank) -> str:
    """By which zero sends between the ranks. Collective."""
    return Comm.default().transport_name(rank.device)


def average_over_ranks(losses: list[Tensor], world: int) -> list[float]:
    together = torch.stack(losses).double()
    dist.all_reduce(together)
    means: list[float] = (together / world).tolist()
    return means


def read_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
