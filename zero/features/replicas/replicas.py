"""What is averaged and handed over between replicas, at each stage."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from zero._torch import at_end_of_backward, wraps_others, writes_into
from zero.comm.store_group import StoreGroup
from zero.features.replicas.membership import Membership, Round
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.measure.param_groups import SHARD_MARK
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.sdp.sharded_ddp import describe
from zero.sdp.tensors import map_tensors, nearest_leaf, tensors_in
from zero.shards.steps import Steps, put_steps
from zero.state.optimizer_state import cut, fingerprint, hand_over, shard_of
from zero.state.stepped_shards import SteppedShards

_AT_ONCE = 1 << 23
"""Elements that are averaged at a time, or those of one gradient."""


class Stateful(Protocol):
    """What has a state beside the model and the optimizer: a scheduler, a GradScaler, an iterator."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Replicas:
    """The replicas that train one model, seen from a rank of one of them. See zero.fault_tolerant.

    `step`: the number of steps that the optimizer has taken, in all replicas together.
    `count`: how many replicas took part in the last round. `index`: the place of this one among them. `names`: all.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, membership: Membership, state: Mapping[str, Stateful]
    ) -> None:
        self.step = 0
        self._model, self._membership, self._user = model, membership, state
        self._sharded = running_model(model) if isinstance(model, FSDP) else None
        self._stepped: OSS | SteppedShards
        if isinstance(optimizer, OSS):
            self._stepped = optimizer
        else:
            assert self._sharded is not None
            self._stepped = SteppedShards(optimizer, self._sharded.index.groups, self._sharded.comm)
        self._in_backward = self._steps_since_join = False
        received = membership.run("join", 0, self._exchange_state)
        if received is not None:
            self._load(received)
        self._attach(optimizer)

    @property
    def names(self) -> Sequence[str]:
        return self._membership.members

    @property
    def count(self) -> int:
        return len(self._membership.members)

    @property
    def index(self) -> int:
        return self._membership.index

    # ------------------------------------------------------------------------------------- when something is due

    def _attach(self, optimizer: Optimizer) -> None:
        """Has gradients averaged at the end of each backward that reduces them, and counts steps."""
        before = torch.compiler.disable(self._before_forward, reason="replicas may join before a forward")
        self._model.register_forward_pre_hook(before, prepend=True)
        optimizer.register_step_post_hook(self._after_step)
        if self._sharded is not None:
            put_steps(Averaged(self._average), self._sharded)
        elif isinstance(self._model, ShardedDDP):
            assert isinstance(optimizer, OSS)
            put_steps(Averaged(self._average), optimizer)
        else:
            after = torch.compiler.disable(self._after_forward, reason="hooks on outputs")
            self._model.register_forward_hook(after)

    def _before_forward(self, *_: Any) -> None:
        self._in_backward = False  # an exception may have ended the last backward
        if torch.is_grad_enabled() and self._steps_since_join and self._membership.waiting:
            self._steps_since_join = False
            self._membership.run("join", self.step, self._exchange_state)

    def _after_step(self, *_: Any) -> None:
        self.step += 1
        self._steps_since_join = True

    def _after_forward(self, _: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(partial(self._reached, nearest_leaf(tensor)))

    def _reached(self, leaf: Node | None, _: Tensor) -> None:
        """Called when a backward is at an output: one that leaves gradients, or an inner torch.autograd.grad."""
        if not self._in_backward and (leaf is None or writes_into(leaf)):
            self._in_backward = True
            at_end_of_backward(lambda: at_end_of_backward(self._backward_ends))  # after DistributedDataParallel's own

    def _backward_ends(self) -> None:
        self._in_backward = False
        if getattr(self._model, "require_backward_grad_sync", True):
            self._average()

    # ------------------------------------------------------------------------------------------ gradients

    def _holders(self) -> list[nn.Parameter]:
        """What has the gradients that this rank averages with the same rank of other replicas."""
        if self._sharded is not None:
            return [param for param in self._sharded.index if param.numel()]
        assert isinstance(self._stepped, OSS)
        shards = self._stepped.shards
        return [one for one in (shards.values() if self._stepped.gradients.arrive_sharded else shards) if one.numel()]

    def _average(self) -> None:
        """Collective over all replicas. Averages the gradients; they are kept until all ranks have the averages."""
        with torch.no_grad():
            holders = self._holders()
            averages, buffers = self._membership.run("average", self.step, partial(self._averages, holders))
            for holder, average in zip(holders, averages, strict=True):
                if average is not None and holder.grad is None:
                    holder.grad = average.to(holder.device)
                elif average is not None and holder.grad is not None:
                    holder.grad.copy_(average)
            for buffer, first in zip(self._model.buffers(), buffers, strict=False):
                buffer.copy_(first)

    def _averages(self, holders: Sequence[nn.Parameter], this: Round) -> tuple[list[Tensor | None], list[Tensor]]:
        """Returns the averages, None for gradients that no replica has, and the buffers of the first replica."""
        if this.group is None:
            return [None] * len(holders), []
        exist = torch.tensor([one.grad is not None for one in holders], dtype=torch.uint8, device="cpu")
        exist = this.group.maximum(exist)
        found: list[Tensor | None] = [None] * len(holders)
        for numbers in _batches([n for n, exists in enumerate(exist.tolist()) if exists], holders):
            gradients = [_gradient(holders[n]) for n in numbers]
            flat = torch.cat([one.detach().reshape(-1) for one in gradients]).cpu()
            for n, gradient, mean in zip(
                numbers, gradients, this.group.average(flat).split([one.numel() for one in gradients]), strict=True
            ):
                found[n] = mean.view(gradient.shape)
        shares = getattr(self._model, "broadcast_buffers", True)
        return found, [this.group.broadcast(buffer) for buffer in self._model.buffers()] if shares else []

    # ---------------------------------------------------------------------------------------------- state

    def _exchange_state(self, this: Round) -> dict[str, Any] | None:
        """Sends the state of this rank to the same rank of the replicas that join; returns it on those."""
        if this.group is None:
            return None
        if this.index in this.joining:
            return _receive(this.group, 0)
        for joiner in this.joining if this.index == 0 else ():
            _send(this.group, joiner, self._state())
        return None

    def _tensors(self) -> list[Tensor]:
        """Parameters at rest, which at stage 3 are this rank's shards, and buffers."""
        if isinstance(self._model, FSDP):
            self._model.reshard()
        elif isinstance(self._stepped, OSS):
            self._stepped.stepper.finish_gathers()
        return [one for one in (*self._model.parameters(), *self._model.buffers()) if not wraps_others(one)]

    def _state(self) -> dict[str, Any]:
        optimizer = shard_of(self._stepped, settle=False)
        optimizer.pop(SHARD_MARK, None)
        user = {name: one.state_dict() for name, one in self._user.items()}
        tensors = [one.detach() for one in self._tensors()]
        return {"built": self._built(), "step": self.step, "tensors": tensors, "optimizer": optimizer, "user": user}

    def _built(self) -> str:
        """A digest of how the model and the optimizer are sharded."""
        self._tensors()
        lines = [type(self._model).__name__, fingerprint(self._stepped), *describe(self._model), *sorted(self._user)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _load(self, state: dict[str, Any]) -> None:
        if state["built"] != self._built():
            raise ValueError(
                "this replica differs from those that train: another model, stage, wrapping or optimizer, other names "
                "in state=, or another number of ranks. Start all replicas with the same script and options."
            )
        self.step = state["step"]
        with torch.no_grad():
            for own, given in zip(self._tensors(), state["tensors"], strict=True):
                own.detach().copy_(given)
        optimizer = state["optimizer"]
        taken = cut(self._stepped, optimizer["state"].items(), is_shard=True)
        hand_over(self._stepped, taken, optimizer["param_groups"])
        for name, one in self._user.items():
            one.load_state_dict(state["user"][name])


class Averaged(Steps):
    """Averages at the end of a backward."""

    asked_by = "zero.fault_tolerant"
    does = "averages gradients over replicas when backward has ended"

    def __init__(self, average: Callable[[], None]) -> None:
        self._average = average

    def end(self, units: Any) -> None:
        self._average()


def _gradient(holder: nn.Parameter) -> Tensor:
    return torch.zeros_like(holder) if holder.grad is None else holder.grad


def _batches(numbers: Sequence[int], holders: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Yields the numbers of holders whose gradients are averaged together: of one dtype, about _AT_ONCE elements."""
    batch: list[int] = []
    for n in numbers:
        elements = sum(holders[one].numel() for one in batch) + holders[n].numel()
        if batch and (holders[batch[0]].dtype != holders[n].dtype or elements > _AT_ONCE):
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


def _send(group: StoreGroup, to: int, state: dict[str, Any]) -> None:
    """Sends nested tensors one by one, after all else in the format of torch.save."""
    tensors: list[Tensor] = []

    def without_values(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor.detach().to("meta")

    shown = io.BytesIO()
    torch.save(map_tensors(without_values, state), shown)
    data = torch.frombuffer(shown.getbuffer(), dtype=torch.uint8)
    group.send(torch.tensor([len(data)], device="cpu"), to)
    for tensor in (data, *tensors):
        group.send(tensor, to)


def _receive(group: StoreGroup, source: int) -> dict[str, Any]:
    length = group.receive(torch.empty(1, dtype=torch.int64, device="meta"), source)
    data = group.receive(torch.empty(int(length), dtype=torch.uint8, device="meta"), source)
    shown = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    received: dict[str, Any] = map_tensors(lambda tensor: group.receive(tensor, source), shown)
    return received
