"""Stage 2: gradients, too, live only with their owner.

A backward, on every rank:
    a gradient is ready    its bucket takes it over; `param.grad` is None again
    a bucket is complete   it is sent to the owners while backward goes on; the bucket before it is waited for
    backward ends          what is incomplete is sent with zeros, everything is waited for, parts are with their owners
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zero.oss.comm import Comm
from zero.oss.groups import sent_dtype
from zero.oss.optimizer import OSS
from zero.sdp.bucket import GradBucket
from zero.sdp.buffers import BufferSync
from zero.sdp.gathers import PendingGathers, finish_all
from zero.sdp.tensors import at_end_of_backward, in_a_backward, nearest_leaf, tensors_in, writes_into


class ShardedDDP(nn.Module):
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
    sync_models_at_startup: parameters and buffers start as those of rank 0.
    reduce_buffer_size: elements that are reduced at a time, one parameter at least; 0 reduces each by itself. By
        default an eighth of the model, between 1 and 32 MiB.
    reduce_fp16: gradients travel as float16 (True) or as the dtype given, such as torch.bfloat16, and are added up in
        float32.
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
        reduce_fp16: bool | torch.dtype = False,
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
        told = [f"{options}, overlap_param_gather {overlap_param_gather}", *describe(module)]
        sent_as, problem = sent_dtype(reduce_fp16, "reduce_fp16")
        self._comm.compare("the models given to ShardedDDP", told, problem or self._misfit(names))
        if sync_models_at_startup:
            self._comm.broadcast([*module.parameters(), *module.buffers()])
        self._buffers_in_step = BufferSync(module, [self._comm]) if broadcast_buffers else None
        for optimizer in self._optimizers:
            optimizer.expect_gradients_in_parts()
            if reduce_buffer_size is not None:
                optimizer.set_bucket_size(reduce_buffer_size)
            optimizer.rename(names)
        self._reducer = Reducer(module, self._optimizers, self._comm, sent_as)
        if overlap_param_gather:
            self._gathers = PendingGathers(module, self._optimizers)

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
            if optimizer.gradients_arrive_in_parts:
                return "this OSS already belongs to another ShardedDDP. Build one OSS for each."
            strangers = [
                name
                for flat in optimizer.flat_groups
                for name, param in zip(flat.names, flat.params, strict=True)
                if param not in names
            ]
            if strangers:
                return (
                    f"the optimizer has {len(strangers)} parameters that are not in the module, such as "
                    f"{strangers[0]}. Build OSS from the parameters of the same module object that is wrapped."
                )
        held = {param for optimizer in self._optimizers for flat in optimizer.flat_groups for param in flat.params}
        missing = [name for param, name in names.items() if param.requires_grad and param not in held]
        if missing:
            return (
                f"{len(missing)} trained parameters are in no optimizer, such as {missing[0]!r}: nobody would average "
                "their gradients. Add them to OSS, or freeze them with requires_grad_(False)."
            )
        return None

    @property
    def comm(self) -> Comm:
        return self._comm

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
        """Backwards in here leave whole gradients in `param.grad` on every rank, to be added to by later ones.

        The first backward outside sends them along. Forward and backward both belong in here.
        """
        before, self._reducer.active = self._reducer.active, False
        try:
            yield
        finally:
            self._reducer.active = before

    def reduce(self) -> None:
        """Collective. Reduces now what backwards under no_sync left in `param.grad`, without another backward."""
        self._reducer.reduce_now()

    def sync_buffers(self) -> None:
        """Collective. Overwrites the buffers by those of rank 0 now."""
        self._comm.broadcast([*self._inner.buffers()])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients everywhere: the parameters' and the optimizers' parts."""
        self._inner.zero_grad(set_to_none)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    # ------------------------------------------------------------------------------------------ the module

    @property
    def _inner(self) -> nn.Module:
        """The module, whether or not its parameters have arrived."""
        inner = self._modules["module"]
        assert inner is not None
        return inner

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_modules"]:  # `.module`, whose parameters are anybody's from now on
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


class Reducer:
    """Drives the buckets through a backward.

    `active`: whether gradients are reduced now, or left where they are (no_sync).
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[OSS], comm: Comm, sent_as: torch.dtype | None = None
    ) -> None:
        self.active = True
        self._module, self._optimizers, self._comm, self._sent_as = module, optimizers, comm, sent_as
        self._buckets: list[GradBucket] = []
        self._deliver: list[Callable[[int, Tensor | None], None]] = []
        self._places: dict[Tensor, tuple[int, int]] = {}
        self._channel = comm.channel(f"the backward of ShardedDDP({type(module).__name__})")
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._hooks_on_leaves: list[RemovableHandle] = []
        self._ran_trained: set[Tensor] = set()
        """What was trained in some forward since the last backward, and may have been frozen since."""
        self._replaced = False
        self._in_backward = False
        self._launched = 0
        self._in_flight: int | None = None
        self._notice_groups()
        for param in self._places:
            before = _reducers[param]() if param in _reducers else None
            if before is not None:
                before._retire()
            _reducers[param] = ref(self)
        self._hook_trained()

    def _notice_groups(self) -> None:
        """Makes a bucket of each flat group that the optimizers have now (add_param_group, set_bucket_size)."""
        groups = {flat: optimizer for optimizer in self._optimizers for flat in optimizer.flat_groups}
        if [bucket.flat for bucket in self._buckets] == list(groups):
            return
        self._buckets = [GradBucket(flat, sent_as=self._sent_as) for flat in groups]
        self._deliver = [_delivery(bucket, groups[bucket.flat]) for bucket in self._buckets]
        self._places = {
            param: (number, index)
            for number, bucket in enumerate(self._buckets)
            for index, param in enumerate(bucket.flat.params)
        }
        self._largest_bucket = max(bucket.flat.full.nbytes for bucket in self._buckets)
        self._largest_param = max(param.nbytes for param in self._places)

    def before_forward(self) -> None:
        if self._replaced:
            raise RuntimeError(
                "this ShardedDDP was replaced by another around the same parameters, which has their gradients now. "
                "Call the new one, and drop this one and its optimizer."
            )
        if self._in_backward and not in_a_backward():
            self._abandon()
        if not self._in_backward:
            while self._hooks_on_leaves:
                self._hooks_on_leaves.pop().remove()
            self._notice_groups()
            self._hook_trained()

    def after_forward(self, output: Any) -> None:
        """Backward begins at the outputs: from there its end can be awaited, also where it is entered anew within."""
        if self.active:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    hook = tensor.register_hook(partial(self._reached, nearest_leaf(tensor)))
                    if tensor.is_leaf:  # it outlives the graph
                        self._hooks_on_leaves.append(hook)

    def _reached(self, leaf: Node | None, _: Tensor) -> None:
        """A backward is at an output: one that leaves gradients, on all ranks, or an inner torch.autograd.grad."""
        if leaf is None or writes_into(leaf):
            self._begin()

    def _hook_trained(self) -> None:
        arrived = _without_keeping(self)
        for param in self._places:
            if param.requires_grad:
                self._ran_trained.add(param)
            if param.requires_grad and param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(arrived)

    def _notice_trained(self) -> None:
        """Collective where other parameters are trained than in the last backward."""
        changed = [bucket.notice_trained(self._ran_trained) for bucket in self._buckets]
        self._ran_trained.clear()
        if any(changed):
            trained = [bucket.flat.names[index] for bucket in self._buckets for index in bucket.trained]
            self._comm.compare("the parameters that are trained", trained)

    def _retire(self) -> None:
        """Another ShardedDDP has the parameters."""
        self._replaced = True
        for hook in [*self._hooks.values(), *self._hooks_on_leaves]:
            hook.remove()

    def _arrived(self, param: Tensor) -> None:
        if not self.active:
            return
        self._begin()
        number, index = self._places[param]
        bucket = self._buckets[number]
        if number < self._launched:
            bucket.refuse_late(index)
        bucket.take_from(param, index)
        self._make_room(bucket)
        if bucket.complete:
            self._launch_complete()

    def _begin(self) -> None:
        if not self._in_backward:
            finish_all(self._optimizers)  # of a graph from before the last step
            self._notice_trained()
            self._in_backward = True
            at_end_of_backward(self._finish)

    def _launch_complete(self) -> None:
        """Launches, in the order that is the same on all ranks, what is complete up to the first that is not."""
        while self._launched < len(self._buckets) and self._buckets[self._launched].complete:
            self._launch_next()

    def _launch_next(self) -> None:
        if self._launched == 0:
            self._comm.agree(self._channel)
        self._finish_in_flight()
        bucket = self._buckets[self._launched]
        if bucket.trained:
            bucket.launch()
            self._in_flight = self._launched
        self._launched += 1
        if self._launched < len(self._buckets):
            self._make_room(self._buckets[self._launched])

    def _make_room(self, filling: GradBucket) -> None:
        """Waits for the bucket in flight while what fills the next is little: two buckets' bytes are all there may be.

        A bucket in flight takes its gradients and as much to receive them in; in their place 1/W of it stays, and as
        much of the next is not there yet. Where transfers run beside the computing, waiting would cost their overlap.
        """
        upcoming = filling.taken_bytes + self._largest_param
        if (
            self._in_flight is not None
            and upcoming * self._comm.world > self._largest_bucket
            and not self._comm.runs_beside(filling.flat.full)
        ):
            self._finish_in_flight()

    def _finish_in_flight(self) -> None:
        if self._in_flight is not None:
            self._buckets[self._in_flight].finish(self._deliver[self._in_flight])
            self._in_flight = None

    def _finish(self) -> None:
        """At the end of backward, on every rank, whatever it used."""
        if self._launched < len(self._buckets):
            self._refuse_replaced()
        while self._launched < len(self._buckets):
            self._buckets[self._launched].take_leftovers()
            self._launch_next()
        self._finish_in_flight()
        self._launched = 0
        self._in_backward = False

    def reduce_now(self) -> None:
        self.before_forward()
        self._notice_trained()
        self._finish()

    def _refuse_replaced(self) -> None:
        """Where a gradient did not come, the parameter may be one that the module no longer has."""
        for name, param in self._module.named_parameters():
            if param.requires_grad and param not in self._places:
                raise RuntimeError(
                    f"{name!r} is in no optimizer of this ShardedDDP: it was replaced (by load_state_dict with "
                    "assign=True, say) or added since, and its gradient would be nobody's. Wrap the model again, "
                    "with an OSS built from its present parameters, or add it by add_param_group."
                )

    def _abandon(self) -> None:
        """An exception ended the last backward before its end."""
        for bucket in self._buckets:
            bucket.abandon()
        self._launched = 0
        self._in_flight = None
        self._in_backward = False


_reducers: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By parameter, the Reducer that takes its gradients."""


def _without_keeping(reducer: Reducer) -> Callable[[Tensor], None]:
    """Its hook on parameters. What autograd calls lies where the garbage collector does not look for cycles."""
    weakly = ref(reducer)

    def arrived(param: Tensor) -> None:
        there = weakly()
        if there is not None:
            there._arrived(param)

    return arrived


def describe(module: nn.Module, without: Collection[nn.Parameter] = ()) -> list[str]:
    """What must be the same on every rank: names, types and shapes of parameters and buffers.

    without: parameters to leave out.
    """
    told = [
        (name, param, "trained" if param.requires_grad else "frozen")
        for name, param in module.named_parameters()
        if param not in without
    ] + [(name, buffer, "buffer") for name, buffer in module.named_buffers()]
    return [
        f"{name}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, {kind}"
        for name, tensor, kind in told
    ]


def _delivery(bucket: GradBucket, optimizer: OSS) -> Callable[[int, Tensor | None], None]:
    """Puts a part's gradient where the optimizer takes it, or adds it to what is there."""

    def deliver(index: int, gradient: Tensor | None) -> None:
        part = optimizer.part(bucket.flat.params[index])
        if gradient is not None and gradient.dtype is not part.dtype:
            gradient = gradient.to(part.dtype)
        if part.grad is None:
            part.grad = gradient
        elif gradient is not None:
            part.grad += gradient

    return deliver
