"""`zero.fault_tolerant`: replicas of which any may die while the others train on, and which may join again.

    replica      S ranks with a process group of their own, such as a job of torchrun's, at stage 1, 2 or 3. If one of
                 its ranks dies, a shard is lost with it, and all of the replica ends
    coordinator  a process that belongs to no replica (coordinator.py). Each rank of each replica has a connection to it
                 (membership.py), so that it knows at once who is gone
    round        what all ranks of all replicas do together, or repeat without those that were lost (replicas.py):
                 "average" the gradients at the end of a backward, or hand the state to replicas that "join"
    generation   the replicas of a round. Rank r of each of them is a member of a Gloo group that is made for the
                 generation (zero/comm/store_group.py), and is dropped when one is lost or joins

A round: all ranks say that they are ready; the coordinator names the replicas that live; rank r of each exchanges its
shards with rank r of the others; all say that they are done; the coordinator tells all to keep what they have received.
If a rank fails or is gone before, it tells all to begin again. Local gradients are kept until then, so that nothing of
forward and backward is lost. One process decides, so all ranks of all replicas come to the same verdict, and a replica
that is lost has either contributed to a step everywhere or nowhere.

Averaging at the end of backward, not in the step, means that norms, clipping, loss scaling and hooks see averages. Sums
are in the order of the replicas, so the bits do not depend on the algorithm of a collective. Means over replicas of
means over their ranks are what HYBRID_SHARD computes.

A replica joins before the first forward after a step, when schedulers have been stepped, too. The oldest replica sends
it what a checkpoint would have: rank r its shards to rank r.

Tensors go between replicas through the memory of the host, also on GPUs: an NCCL communicator of which a member dies
can only be aborted, and takes the process along if that comes late. Within a replica NCCL is used as ever.
"""

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
from zero.features.replicas.replicas import Averaged, Replicas, Stateful
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.sdp.sharded_ddp import sharding_of
from zero.shards.steps import taken_problem


def fault_tolerant(
    model: nn.Module,
    optimizer: Optimizer,
    coordinator: str,
    *,
    name: str | None = None,
    state: Mapping[str, Stateful] | None = None,
) -> Replicas:
    """Collective. Averages gradients with other replicas that train the same model, of which any may die.

        replicas = zero.fault_tolerant(model, optimizer, "first-host:29400", state={"scheduler": scheduler})
        while replicas.step < 1000: ...  # forward, backward, step, as without

    A replica is a job of its own with its own default process group, all with the same number of ranks; each calls
    this. `python -m zero.features.replicas` must run at the address. The replica waits until training begins, or until
    it may join others at the end of a step; then it has their parameters, optimizer state, buffers and `state`.

    From then on each backward that reduces gradients averages them over the replicas that live, for which all wait.
    When a rank dies, its replica is lost, and the others repeat the averaging without it; a replica that was lost has
    contributed to a step everywhere or nowhere. All others train as a run of so many replicas does, bit for bit.

    model, optimizer: those that train, at stage 1, 2 or 3. coordinator: host:port.
    name: for messages, and for the order of the first replicas; by default torchrun's --rdzv-id, or host and process.
    state: what else a new replica needs, by name: schedulers, a GradScaler, or any object with `state_dict` and
        `load_state_dict` whose state torch.load(weights_only=True) reads.

    Returns Replicas, the same on all ranks of a replica, with
        `step`: how many steps the optimizer has taken since the first replica began, in all replicas alike.
        `count`, `index`, `names`: how many replicas took part in the last round, the place of this one among them, and
            what all are called. Use them to choose data; only `index` 0 need save checkpoints.

    Raises ValueError on every rank for other models, optimizers and addresses, and RuntimeError if no coordinator
    answers. Backward and forward raise RuntimeError if this replica cannot go on: it has lost a rank, did not come in
    time, no other replica is left, or the coordinator is gone.
    """
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
    return taken_problem(running_model(model) if isinstance(model, FSDP) else optimizer, Averaged)


def _address_problem(coordinator: str) -> str | None:
    host, _, port = coordinator.rpartition(":")
    if host and port.isdecimal():
        return None
    return f"coordinator={coordinator!r} is no address. Pass host:port, such as 'first-host:29400'."


def _default_name() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID") or f"{socket.gethostname()}-{os.getpid()}"
