"""Stage 2: optimizer state and gradients are sharded. Each gradient is reduced to its owner and freed elsewhere.

A backward, on every rank:
    a gradient is ready    its bucket takes it, and sets `param.grad` to None
    a bucket is complete   waits for the bucket in flight, and launches the reduce of this one while backward goes on
    backward ends          launches incomplete buckets with zeros for missing gradients, and waits for all buckets
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero._torch.compiling import named_as_compiled
from zero._torch.modules import children_of, parameters_of
from zero.comm import Comm
from zero.comm.together import alike
from zero.oss.optimizer import OSS, retire, set_bucket_size
from zero.sdp.reducer import Reducer
from zero.shards.announce import announce
from zero.shards.arguments import refuse_two_devices
from zero.shards.cut import claim, release
from zero.shards.owned_shards import LoadsMasters, gather_masters
from zero.shards.shapes import refuse_unsendable
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import put_into, show_everywhere, take_out_of
from zero.wrap.buffers import BufferSync
from zero.wrap.ddp import refuse_ddp_within
from zero.wrap.gradients import refuse_left
from zero.wrap.precision import as_precision, uncast
from zero.wrap.wrapper import UNWRAPPED, Wrapper, as_weights, describe, refuse_scripted, retire_all

if TYPE_CHECKING:
    from zero.wrap.precision import GivenPrecision

_AVERAGES = (
    "whose gradient ShardedDDP reduces to its owner. Remove DistributedDataParallel: ShardedDDP averages gradients "
    "itself."
)


_GIVEN = "the models given to ShardedDDP"


class ShardedDDP(Wrapper):
    """Data parallelism in which each gradient is reduced to its owner and freed elsewhere (ZeRO stage 2; Rajbhandari
    et al., 2020, section 5.2).

        optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=1e-3)
        model = ShardedDDP(model, optimizer)

    After backward `param.grad` is the averaged gradient, of which each rank holds a shard: it answers as the full one,
    by all ranks together, also to torch's `clip_grad_norm_`. This rank's shard is `optimizer.part(param).grad`.
    Call the optimizer's `step` and `zero_grad` as usual; `param.grad = None` drops the gradient, too.

    module: the model. Its attributes can be read through the wrapper.
    sharded_optimizer: the OSS, or several OSS that together hold every trained parameter of the module.
    process_group: the process group that OSS was given; by default that of the (first) OSS.
    broadcast_buffers: broadcasts the buffers from rank 0 before a forward, as DistributedDataParallel does.
    sync_module_states: broadcasts parameters and buffers from rank 0 in the constructor, except for tensors that wrap
        other tensors (quantised ones). sync_models_at_startup: FairScale's name for it.
    reduce_buffer_size: number of elements of a bucket, which has at least one parameter; 0 reduces each parameter by
        itself. By default a sixteenth of the model, between 1 and 32 MiB;
        on GPUs an eighth, or up to a twentieth of a large model or 256 MiB.
    precision: as of zero.setup. OSS stores the parameters in 16 bits, and gets the same; ShardedDDP casts the inputs of
        the module, and sends gradients as the reduce_dtype of a MixedPrecision.

    `casts`: the hooks that cast inputs, for as long as the wrapper exists. `rounded`: parameters that are in no
        optimizer, and were float32.

    Collective: the constructor, forward (if there are buffers), backward, `reduce`, `sync_buffers`.
    Raises ValueError, on every rank, if module and optimizer do not belong together, or if they differ between ranks.
    """

    _full = False

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | Sequence[OSS],
        process_group: torch.distributed.ProcessGroup | None = None,
        *,
        broadcast_buffers: bool = True,
        sync_module_states: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int | None = None,
        precision: GivenPrecision = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._optimizers: list[OSS] = (
            [*sharded_optimizer] if isinstance(sharded_optimizer, Sequence) else [sharded_optimizer]
        )
        of_optimizer = process_group is None and bool(self._optimizers) and isinstance(self._optimizers[0], OSS)
        self._comm = self._optimizers[0].comm if of_optimizer else Comm(process_group)
        names = {parts.of(param): name for name, param in module.named_parameters()}
        with alike([self._comm], _GIVEN) as lines:
            policy = as_precision(precision)
            self._refuse_misfit(names)
            refuse_two_devices(module.named_parameters())
            refuse_unsendable([*module.named_parameters(), *module.named_buffers()])
            lines += [f"reduce_buffer_size {reduce_buffer_size}, {policy}", *describe(module)]
        held = {param for optimizer in self._optimizers for param in optimizer.shards.places}
        put_into(module, {param for param in parameters_of(module) if parts.of(param) not in held})
        show_everywhere(module)
        if sync_module_states and sync_models_at_startup:
            self._comm.broadcast([*parameters_of(module), *module.buffers()])
        self.broadcast_buffers = broadcast_buffers
        self._buffer_sync = BufferSync(module, [self._comm]) if broadcast_buffers else None
        for optimizer in self._optimizers:
            optimizer.gradients.are_sharded = not self._full
            if reduce_buffer_size is not None:
                set_bucket_size(optimizer, reduce_buffer_size)
            optimizer.shards.rename(optimizer.param_groups, names)
        kind = type(self).__name__
        sent_as = policy.reduce_dtype
        self._reducer = Reducer(module, self._optimizers, self._comm, kind, full=self._full, sent_as=sent_as)
        self.casts = policy.prepare(module.modules())
        self.rounded: dict[nn.Parameter, torch.dtype] = {}  # of what no optimizer has, and the original dtypes
        if policy.param_dtype is not None:
            self.casts.append(policy.register_cast(module, root=True))
        finalize(self, _remove, self.casts)  # whoever goes on without the wrapper has the plain module
        claim(parameters_of(module), self, _AVERAGES)
        self._announce(names)

    def _refuse_misfit(self, names: dict[nn.Parameter, str]) -> None:
        """Raises ValueError if module, optimizers and group do not belong together."""
        if isinstance(self.module, Wrapper):
            raise ValueError(
                f"the module is a {type(self.module).__name__} already, as in a notebook whose cell runs again. Wrap "
                "what zero.unwrap(model) returns."
            )
        refuse_scripted(self.module, inside=False)
        refuse_left(self.module.named_parameters())
        if not self._optimizers and not self._full:
            raise ValueError("ShardedDDP was given no optimizer. Pass the zero.OSS that holds the module's parameters.")
        for optimizer in self._optimizers:
            if not isinstance(optimizer, OSS):
                raise ValueError(
                    f"ShardedDDP was given a {type(optimizer).__name__}. Pass an optimizer that shards its state: "
                    "zero.OSS(model.parameters(), optim=..., ...)."
                )
            if optimizer.comm.group is not self._comm.group:
                raise ValueError(
                    "ShardedDDP and its optimizers were given different process groups. Pass the same group to both."
                )
            if optimizer.gradients.are_sharded:
                raise ValueError("this OSS already belongs to another ShardedDDP. Build one OSS for each ShardedDDP.")
            foreign = [place.name for param, place in optimizer.shards.places.items() if param not in names]
            if foreign and not self._full:
                raise ValueError(
                    f"the optimizer has {len(foreign)} parameters that are not in the module, such as {foreign[0]}. "
                    "Build OSS from the parameters of the same module object that is wrapped."
                )
        refuse_ddp_within(self.module)
        held = {param for optimizer in self._optimizers for param in optimizer.shards.places}
        missing = [name for param, name in names.items() if param.requires_grad and param not in held]
        if missing and self._optimizers:
            raise ValueError(
                f"{len(missing)} trained parameters are in no optimizer, such as {missing[0]!r}: their gradients would "
                "not be averaged. Add them to OSS, or freeze them with requires_grad_(False)."
            )

    def _announce(self, names: dict[nn.Parameter, str]) -> None:
        groups = [group for optimizer in self._optimizers for group in optimizer.shards.shard_groups]
        frozen = len(names) - sum(len(group.params) for group in groups)
        left_out = f"{frozen} parameters that are frozen and in no optimizer" if frozen else ""
        title = f"{type(self).__name__}({type(self.module).__name__})"
        announce(title, self._comm, groups, left_out, stage=1 if self._full else 2)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward reduces gradients: False within no_sync, as for DistributedDataParallel. It may be set."""
        return self._reducer.active

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._reducer.active = sync

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`, and the hooks on it, whose errors all ranks raise, too."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            if self._reducer is not None:
                self._reducer.tell(error)
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module. Collective if the module has buffers."""
        self._reducer.before_forward()
        if self._buffer_sync is not None:
            self._buffer_sync.before_forward()
        output = self.module(*args, **kwargs)
        if self._buffer_sync is not None:
            self._buffer_sync.after_forward(reduced=self._reducer.active)
        if torch.is_grad_enabled():
            self._reducer.after_forward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which backward accumulates full gradients in `param.grad` on every rank, unreduced.

        The first backward outside reduces them, too. Run both forward and backward inside.
        """
        before, self._reducer.active = self._reducer.active, False
        try:
            yield
        finally:
            self._reducer.active = before

    def reduce(self) -> None:
        """Collective. Reduces the gradients accumulated under no_sync now, without another backward."""
        self._reducer.reduce_now()

    def sync_buffers(self) -> None:
        """Collective. Broadcasts the buffers from rank 0 now."""
        self._comm.broadcast([*self.module.buffers()])

    def unwrap(self) -> nn.Module:
        """Collective. Returns the plain module, without gradients and hooks; see zero.unwrap. What `precision` has
        rounded has the values of the masters again."""
        for optimizer in self._optimizers:
            for group in optimizer.shards.rounded:
                for param, full in gather_masters(group).items():
                    param.data = full
            optimizer.shards.rounded_to = {}  # they are masters of nothing any more, whoever keeps the optimizer
        for param, dtype in self.rounded.items():
            param.data = param.data.to(dtype)
        for param in parameters_of(self.module):
            param.grad = None
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._reducer.retire(UNWRAPPED)
        release(parameters_of(self.module), self)
        uncast(self.module)
        _remove(self.casts)
        take_out_of(self.module)
        if not self._full:
            retire_all(self._optimizers, saves=True)
            retire(self._optimizers)
        return self.module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and those of the optimizers' shards."""
        self.module.zero_grad(set_to_none)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in children_of(self) else getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's own state dict, under the module's own names."""
        weights = self.module.state_dict(*args, **kwargs)
        return weights if args or "destination" in kwargs else as_weights(weights)

    def __getstate__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled. Copy or pickle its .module, and wrap the copy. For "
            "averages of weights pass the module: AveragedModel(model.module)."
        )

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads into the module, by its names with or without `_orig_mod.` in them.

        Raises ValueError for assign=True, which would replace the optimizer's parameters.
        """
        if assign:
            raise ValueError("assign=True replaces the parameters that the optimizer holds. Load with assign=False.")
        with LoadsMasters():
            return self.module.load_state_dict(named_as_compiled(self.module, state_dict), strict)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class AveragingDDP(ShardedDDP):
    """Stage 1 of zero.setup: data parallelism in which every rank gets the averages of all gradients, in `param.grad`,
    while the optimizer's state is sharded. Without optimizers it waits for those that `adopt` is called with.

    It is a ShardedDDP whose gradients stay full: what is said of that one's arguments, methods and calls holds. Between
    `zero_grad()` and the next backward gradients take no memory, unlike DistributedDataParallel's.
    """

    _full = True

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, or of a file, which has the module alone: as with DistributedDataParallel it may be made on one
        rank, and nothing of it is a shard."""
        return {**vars(self), "_optimizers": [], "_reducer": None, "_buffer_sync": None, "_comm": None, "casts": []}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._reducer is not None:
            return super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a copy of what zero.setup(stage=1) returned has no optimizer, and averages no gradients. Evaluate it "
                "under torch.no_grad(); to train it call zero.setup(copy.module, ...)."
            )
        return self.module(*args, **kwargs)

    def adopt(self, optimizer: OSS) -> None:
        """Averages from here on what this one steps, too. Call it on every rank at the same point."""
        self._optimizers.append(optimizer)
        self._reducer.take_groups()


def comm_of(model: ShardedDDP) -> Comm:
    """The ranks that train a model."""
    return model._comm
