"""`zero.fault_tolerant`."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zero._torch import uncompiled
from zero.comm import Comm
from zero.features.replicas.membership import Membership
from zero.features.replicas.replicas import Replicas, Stateful
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.sdp.sharded_ddp import sharding_of
from zero.shards.steps import Steps


def fault_tolerant(
    model: nn.Module,
    optimizer: Optimizer,
    coordinator: str,
    *,
    name: str | None = None,
    state: Mapping[str, Stateful] | None = None,
) -> Replicas:
    model = uncompiled(model)
    problem = _unusable(model, optimizer) or _address_problem(coordinator)
    everyone = Comm.default()
    everyone.compare("the arguments of zero.fault_tolerant", [coordinator, *sorted(state or {})], problem)
    key, called = everyone.all_gather_text(f"{uuid.uuid4()} {name or _default_name()}")[0].split(" ", 1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Replicas(model, optimizer, Membership(coordinator, key, called, rank, size), state or {})


def _unusable(model: nn.Module, optimizer: Optimizer) -> str | None:
    """Returns an error message if these are no model and optimizer that are sharded at stage 1, 2 or 3."""
    given = f"zero.fault_tolerant was given a {type(model).__name__} and a {type(optimizer).__name__}. "
    if isinstance(model, FSDP) == isinstance(optimizer, OSS):
        return given + (
            "Pass a model and its optimizer of stage 1, 2 or 3: what zero.setup(model, optim, stage=...) returns."
        )
    if isinstance(model, ShardedDDP) and [*sharding_of(model)] != [optimizer]:
        return given + "Pass the only OSS of the model."
    if isinstance(optimizer, OSS) and not isinstance(model, ShardedDDP) and optimizer.gradients.arrive_sharded:
        return given + "The OSS belongs to a ShardedDDP: pass that as the model."
    holder = running_model(model) if isinstance(model, FSDP) else optimizer
    if type(getattr(holder, "steps", None)) is not Steps:
        return given + (
            "They average or step gradients in backward already, by an earlier call or zero.step_in_backward. Call one "
            "of them once."
        )
    return None


def _address_problem(coordinator: str) -> str | None:
    host, _, port = coordinator.rpartition(":")
    if host and port.isdecimal():
        return None
    return f"coordinator={coordinator!r} is no address. Pass host:port, such as 'first-host:29400'."


def _default_name() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID") or f"{socket.gethostname()}-{os.getpid()}"
