"""Stage 2: gradients, too, live only with their owner.

A backward, on every rank:
    a gradient is ready    its bucket takes it over; `param.grad` is None again
    a bucket is complete   it is sent to the owners while backward goes on; the bucket before it is waited for
    backward ends          what is incomplete is sent with zeros, everything is waited for, shards are with their owners
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from zero._torch import children_of
from zero.comm import Comm, Int8
from zero.oss.announce import announce
from zero.oss.ddp import ddp_within, refuse_within_ddp
from zero.oss.groups import on_two_devices, sent_dtype, unquantisable
from zero.oss.in_backward import refuse, steps_in_backward
from zero.oss.joining import NO_JOIN
from zero.oss.optimizer import OSS
from zero.sdp.buffers import BufferSync
from zero.sdp.gathers import PendingGathers
from zero.sdp.reducer import Reducer
from zero.sdp.unwrapped import UNWRAPPED, refuse_steps
from zero.sdp.wrapper import Wrapper


class ShardedDDP(Wrapper):
    """Data parallelism in which each gradient is reduced to its owner and freed elsewhere (ZeRO stage 2; Rajbhandari
    et al., 2020, section 5.2).

        optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=1e-3)
        model = ShardedDDP(model, optimizer)

    After backward `param.grad` is None on every rank; the averaged gradient of what this rank owns is with the
    optimizer (`optimizer.part(param).grad`), whose `step` and `zero_grad` are called as ever.

    module: its forward is called by this one's; its attributes can be read through this one.
    sharded_optimizer: the OSS, or several, that together hold every trained parameter of the module.
    process_group: as given to OSS, which is the default.
    broadcast_buffers: before a forward, buffers are those of rank 0, as with DistributedDataParallel.
    sync_models_at_startup: parameters and buffers start as those of rank 0, but for those that wrap other tensors
        (quantised), which stay as they are.
    reduce_buffer_size: elements that are reduced at a time, one parameter at least; 0 reduces each by itself. By
        default an eighth of the model, between 1 and 32 MiB.
    reduce_fp16: gradients travel as float16 (True) or as the dtype given, torch.bfloat16 or zero.Int8(), and are added
        up in float32.
    overlap_param_gather: where transfers run beside the computing (NCCL; over Gloo it changes nothing), `step` leaves
        its gathers in flight, and the next forward waits for what it reads, when it reads it. Until then parameters are
        NaN to those who read them past this wrapper and past the module's own methods: by references that were kept,
        such as the optimizer's `param_groups`. Reading through the wrapper (`parameters()`, `.module`, ...) waits, and
        so do forwards and state dicts of the inner module.

    Collective: the constructor, forward (if there are buffers), backward, `reduce`, `sync_buffers`.
    Raises ValueError, on every rank, where the module and the optimizer do not belong together or ranks differ.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | Sequence[OSS],
        process_group: torch.distributed.ProcessGroup | None = None,
        *,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int | None = None,
        reduce_fp16: bool | torch.dtype | Int8 = False,
        overlap_param_gather: bool = False,
    ) -> None:
        super().__init__()
        self._gathers: PendingGathers | None = None
        self.module = module
        self._optimizers: list[OSS] = (
            [*sharded_optimizer] if isinstance(sharded_optimizer, Sequence) else [sharded_optimizer]
        )
        known = process_group is None and bool(self._optimizers) and isinstance(self._optimizers[0], OSS)
        self._comm = self._optimizers[0].comm if known else Comm(process_group)
        names = {param: name for name, param in module.named_parameters()}
        options = f"reduce_buffer_size {reduce_buffer_size}, reduce_fp16 {reduce_fp16}"
        signature = [f"{options}, overlap_param_gather {overlap_param_gather}", *describe(module)]
        sent_as, problem = sent_dtype(reduce_fp16, "reduce_fp16")
        problem = problem or self._misfit(names) or on_two_devices(module.named_parameters())
        problem = problem or unquantisable(module.named_parameters(), sent_as, "reduce_fp16")
        self._comm.compare("the models given to ShardedDDP", signature, problem)
        if sync_models_at_startup:
            self._comm.broadcast([*module.parameters(), *module.buffers()])
        self.broadcast_buffers = broadcast_buffers
        self._buffers_in_step = BufferSync(module, [self._comm]) if broadcast_buffers else None
        for optimizer in self._optimizers:
            optimizer.expect_sharded_gradients()
            if reduce_buffer_size is not None:
                optimizer.set_bucket_size(reduce_buffer_size)
            optimizer.rename(names)
        self._reducer = Reducer(module, self._optimizers, self._comm, sent_as)
        if overlap_param_gather:
            self._gathers = PendingGathers(module, self._optimizers)
        self._announce(names)

    def _misfit(self, names: dict[nn.Parameter, str]) -> str | None:
        """What is wrong between module, optimizers and group, in words for the user."""
        if not self._optimizers:
            return "ShardedDDP was given no optimizer. Pass the zero.OSS that steps the module's parameters."
        for optimizer in self._optimizers:
            if not isinstance(optimizer, OSS):
                return (
                    f"ShardedDDP was given a {type(optimizer).__name__}. It needs the zero.OSS that shards the state: "
                    "zero.OSS(model.parameters(), optim=..., ...)."
                )
            if optimizer.comm.group is not self._comm.group:
                return "ShardedDDP and its optimizers were given different process groups. Pass the same one to both."
            if optimizer.gradients_arrive_sharded:
                return "this OSS already belongs to another ShardedDDP. Build one OSS for each."
            strangers = [
                name
                for flat in optimizer.shard_groups
                for name, param in zip(flat.names, flat.params, strict=True)
                if param not in names
            ]
            if strangers:
                return (
                    f"the optimizer has {len(strangers)} parameters that are not in the module, such as "
                    f"{strangers[0]}. Build OSS from the parameters of the same module object that is wrapped."
                )
        wrapped = ddp_within(self._inner)
        if wrapped is not None:
            return wrapped
        held = {param for optimizer in self._optimizers for flat in optimizer.shard_groups for param in flat.params}
        missing = [name for param, name in names.items() if param.requires_grad and param not in held]
        if missing:
            return (
                f"{len(missing)} trained parameters are in no optimizer, such as {missing[0]!r}: nobody would average "
                "their gradients. Add them to OSS, or freeze them with requires_grad_(False)."
            )
        return None

    def _announce(self, names: dict[nn.Parameter, str]) -> None:
        flats = [flat for optimizer in self._optimizers for flat in optimizer.shard_groups]
        held = {param for flat in flats for param in flat.params}
        others = len(names.keys() - held)
        left_out = f"{others} parameters that are frozen and in no optimizer" if others else ""
        title = f"ShardedDDP({type(self._inner).__name__})"
        announce(title, self._comm, flats, left_out, sharded="gradients")

    @property
    def comm(self) -> Comm:
        return self._comm

    @property
    def require_backward_grad_sync(self) -> bool:
        """False within no_sync, as of DistributedDataParallel."""
        return self._reducer.active

    # --------------------------------------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. Collective where the module has buffers."""
        self._reducer.before_forward()
        if self._buffers_in_step is not None:
            self._buffers_in_step.before_forward()
        with nullcontext() if self._gathers is None else self._gathers.finished_as_read():
            output = self._inner(*args, **kwargs)
        if self._buffers_in_step is not None:
            self._buffers_in_step.after_forward(reduced=self._reducer.active)
        if torch.is_grad_enabled():
            self._reducer.after_forward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here leave full gradients in `param.grad` on every rank, to be added to by later ones.

        The first backward outside sends them along. Forward and backward both belong in here.
        """
        if any(map(steps_in_backward, self._optimizers)):
            refuse("no_sync()", "Step after backward to accumulate.")
        before, self._reducer.active = self._reducer.active, False
        try:
            yield
        finally:
            self._reducer.active = before

    def reduce(self) -> None:
        """Collective. Reduces now what backwards under no_sync left in `param.grad`, without another backward."""
        self._reducer.reduce_now()

    def step_in_backward(self, optimizer: OSS) -> None:
        """See zero.step_in_backward. Raises ValueError as it does."""
        if all(optimizer is not one for one in self._optimizers):
            raise ValueError("zero.step_in_backward was given an optimizer of another ShardedDDP. Pass this one's OSS.")
        optimizer.step_in_backward()

    def sync_buffers(self) -> None:
        """Collective. Overwrites the buffers by those of rank 0 now."""
        self._comm.broadcast([*self._inner.buffers()])

    def unwrap(self) -> nn.Module:
        """Collective. The module, plain again and without gradients; see zero.unwrap."""
        self.zero_grad()
        module = self.module  # whose parameters have arrived
        self._reducer.retire(UNWRAPPED)
        refuse_steps(self._optimizers)
        return module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients everywhere: the parameters' and the optimizers' shards."""
        self._inner.zero_grad(set_to_none)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """For torch's Join, which calls it on every rank before anything is sent. Raises RuntimeError."""
        raise RuntimeError(NO_JOIN.format("ShardedDDP"))

    # ------------------------------------------------------------------------------------------ the module

    @property
    def _inner(self) -> nn.Module:
        """The module, whether or not its parameters have arrived."""
        inner = children_of(self)["module"]
        assert inner is not None
        return inner

    def __getattr__(self, name: str) -> Any:
        if name in children_of(self):  # `.module`, whose parameters are anybody's from now on
            self._finish_gathers()
            return super().__getattr__(name)
        return getattr(self.module, name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; `parameters()` and `modules()` come from here, too."""
        self._finish_gathers()
        yield from super().named_modules(*args, **kwargs)

    def _finish_gathers(self) -> None:
        if self._gathers is not None:
            self._gathers.finish()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a ShardedDDP cannot be copied or pickled. Copy or pickle its .module, and wrap the copy.")

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """The module's own. Raises ValueError for assign=True, which would leave the optimizer with other tensors."""
        if assign:
            raise ValueError("assign=True replaces the parameters that the optimizer holds. Load with assign=False.")
        return self.module.load_state_dict(state_dict, strict)


def describe(module: nn.Module, without: Collection[nn.Parameter] = ()) -> list[str]:
    """What must be the same on every rank: names, types and shapes of parameters and buffers.

    without: parameters to leave out.
    """
    tensors = [
        (name, param, "trained" if param.requires_grad else "frozen")
        for name, param in module.named_parameters()
        if param not in without
    ] + [(name, buffer, "buffer") for name, buffer in module.named_buffers()]
    return [
        f"{name}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, {kind}"
        for name, tensor, kind in tensors
    ]


def _refuse_within_ddp(module: nn.Module, left_out: Collection[str]) -> str | None:
    held = {param for one in module.modules() if isinstance(one, ShardedDDP) for param in one.parameters()}
    for name, param in module.named_parameters() if held else ():
        if param in held and param.requires_grad and name not in left_out:
            return (
                f"DistributedDataParallel was put around {name!r}, whose gradient ShardedDDP reduces to its owner. Use "
                "the model without DistributedDataParallel: ShardedDDP averages gradients itself."
            )
    return None


refuse_within_ddp(_refuse_within_ddp)
