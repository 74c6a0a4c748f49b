"""What differs between torch versions, and every name of torch's that is private. No other file uses either.

Supported is torch 2.11 and what came after it; the suite is run with 2.11, 2.13 (on which `zero` is developed) and
`NEWEST_TESTED`. A private name may change with any version, so each stands behind a function that says why no public
one does. Whoever tries `zero` with a newer torch has this file to look at.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import cache, wraps
from inspect import getclosurevars
from pathlib import Path
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import Variable, profiler
from torch.autograd.graph import Node
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function
from torch.utils import _python_dispatch, _pytree

NEWEST_TESTED = (2, 15)


@cache
def warn_if_untested() -> None:
    """Warns, once a process, where the running torch is of a newer minor version than any that was tested."""
    minor = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if minor > NEWEST_TESTED:
        tested = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(
            f"torch {torch.__version__} is newer than {tested}, the newest that this version of zero was tested with. "
            "Compare a few steps with DistributedDataParallel, and look for a newer zero.",
            stacklevel=2,
        )


# ------------------------------------------------------------------------------------------------- profiling

_UNRECORDED: AbstractContextManager[Any] = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """torch.profiler.record_function where a profiler runs. Elsewhere that would cost microseconds each time, and
    nothing public says whether one runs."""
    return record_function(name) if profiler._is_profiler_enabled else _UNRECORDED


# ------------------------------------------------------------------------------------------------- autograd


def in_a_backward() -> bool:
    """Whether autograd is running a backward in this thread now. Nothing public says so."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Has autograd call the function when the backward that is running now is complete.

    torch.autograd.graph.queue_callback does the same from torch 2.15 on; before, it had no public name.
    """
    queue: Callable[[Callable[[], None]], None] | None = getattr(torch.autograd.graph, "queue_callback", None)
    (queue or Variable._execution_engine.queue_callback)(function)


def writes_into(leaf: Node) -> bool:
    """Whether the backward that is running now writes into the leaf's `grad`. torch.autograd.grad does not.

    Nothing public says what a backward is asked for; a hook on the leaf runs too late.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # it is what torch.autograd.grad was asked for
        return False


def keeps_graph() -> bool:
    """Whether the backward that is running now was called with retain_graph=True. Nothing public says so."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def base_of(tensor: Tensor) -> Tensor | None:
    """What the tensor is a view of, None if it is none. Tensors have no public attribute for it."""
    return tensor._base


def writes_so_far(tensors: Iterable[Tensor]) -> int:
    """How often torch counted a write into any of the tensors. Its counter has no public name."""
    return sum(tensor._version for tensor in tensors)


# -------------------------------------------------------------------------------------------------- modules


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own dictionary of its children, to be read and written.

    named_children() leaves out those that are None and those that are in it twice, and assigning a child by setattr
    runs what the user's class does then.
    """
    children: dict[str, nn.Module | None] = vars(module)["_modules"]  # past __getattr__, which may ask for it
    return children


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own dictionary of its buffers, to be read and written.

    register_buffer() would need to know whether a buffer is saved, and setattr runs what the user's class does then.
    """
    return module._buffers


def state_dict_hooks_of(module: nn.Module) -> list[Any]:
    """What is called before and after its state_dict(). Hooks can be registered in public, but not listed."""
    return [*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values()]


def chosen_by_policy(policy: object, root: nn.Module) -> set[nn.Module] | None:
    """What one of torch.distributed.fsdp.wrap's policy objects chooses, None where `policy` is no such object.

    What a policy is asked by has no public name.
    """
    ask = getattr(policy, "_run_policy", None)
    return None if ask is None else set(ask(root, set(), {}))


BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
"""The class of all batch normalisation, lazy and synchronised too. Only its subclasses have public names."""


def classes_to_ignore(precision: Any) -> tuple[type[nn.Module], ...]:
    """Those that torch.distributed.fsdp.MixedPrecision leaves in float32. Its field is private, but settable."""
    return tuple(precision._module_classes_to_ignore)


def recomputed_in_backward(module: nn.Module) -> nn.Module:
    """The module in a wrapper that keeps its inputs and recomputes the rest in backward, under the module's own names.

    PyTorch's FSDP is used with this wrapper, which lies in a private module. torch.utils.checkpoint is for functions.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)


# -------------------------------------------------------------------------------------------- torch.compile

_WRAPPED = "_orig_mod"


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile(module) returned this module, or its method compile() was called. Nothing public says."""
    return module._compiled_call_impl is not None or _WRAPPED in children_of(module)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile was called with, if it returned this one; otherwise this one.

    There is no public way back. The class of what torch.compile returns is not asked for: that imports the compiler.
    """
    children = children_of(module)
    if _WRAPPED in children and (inside := children[_WRAPPED]) is not None:
        return inside
    return module


def name_without_compile(name: str) -> str:
    """A name in a model as it is without torch.compile, which puts modules into one of its own."""
    return ".".join(atom for atom in name.split(".") if atom != _WRAPPED)


def compiled_without_breaks(module: nn.Module) -> bool:
    """Whether torch.compile was called with it with fullgraph=True, or its method compile() was.

    torch keeps this with what it compiles by, which is private. Where it no longer does, tracing fails where a unit
    begins.
    """
    context = _compiled_by(module)
    return bool(getattr(context, "fullgraph", False) or getattr(context, "error_on_graph_break", False))


def compiled_to_cuda_graphs(module: nn.Module) -> bool:
    """Whether torch.compile was told to run the module as CUDA graphs.

    By mode="reduce-overhead" or "max-autotune", by its options or torch._inductor.config, or by backend="cudagraphs".
    """
    return _records_cuda_graphs(_compiled_by(module))


def called_by_cuda_graphs() -> bool:
    """The same of anything compiled whose call is on this thread's stack: functions, too. torch keeps no list of it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        of_compiler = frame.f_code.co_filename == torch._dynamo.eval_frame.__file__
        if of_compiler and _records_cuda_graphs(frame.f_locals.get("self")):
            return True
    return False


def _records_cuda_graphs(context: object) -> bool:
    """What torch.compile returns tells what the compiler is configured by, but not which backend it is."""
    config = getattr(context, "compiler_config", None) or {}
    if config.get("triton.cudagraphs"):
        return True
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", None) == "cudagraphs"


def _compiled_by(module: nn.Module) -> object:
    """What torch.compile made for the module; None if it was not called with it.

    Of compile(), which sets a function, only a function in it refers to that.
    """
    if not is_compiled(module):
        return None
    if module._compiled_call_impl is None:
        return module.dynamo_ctx
    config = getattr(module._compiled_call_impl, "get_compiler_config", None)
    return None if config is None else getclosurevars(config).nonlocals.get("self")


def call_around_compiling(start: Callable[[object], None], end: Callable[[object], None]) -> None:
    """Has torch.compile call these when it begins and when it has ended, unless it does already.

    torch.compiler has no hooks. torch.compiler.reset() forgets these.
    """
    handler = torch._dynamo.callback_handler
    if start not in handler.start_callbacks:
        handler.register_start_callback(start)
        handler.register_end_callback(end)


# ------------------------------------------------------------------------------------------- process groups


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group waits for what is on such a device. It can be set in public, but not read."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name, in small letters, of what the group sends such tensors by; None if it has nothing for them.

    torch.distributed.get_backend() tells of one device type only.
    """
    if all(kind.type != device.type for kind in group._device_types):
        return None
    return str(group._get_backend(device).name()).lower()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store by which the group's ranks found one another: another for each group, and the same on all its ranks.

    torch.distributed shows no store but that of the default group's constructor.
    """
    return dist.distributed_c10d._world.pg_map[group][1]


_Options = TypeVar("_Options")


def in_stream_order(options: _Options) -> _Options:
    """Has a collective on a GPU run on the current stream, instead of one of the group's own.

    torch.distributed's functions say so by async_op=False, and wait then. Elsewhere this changes nothing.
    """
    options.asyncOp = False  # type: ignore[attr-defined]
    return options


def another_like(group: dist.ProcessGroup, device: torch.device, store: dist.Store) -> Any:
    """A Backend of the same ranks with communicators of its own if the group sends from the device by NCCL, else None.

    torch.distributed.new_group() is collective over all ranks of the job. store: of this backend alone.
    """
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)  # of builds for GPUs
    if nccl is None or not isinstance(group._get_backend(device), nccl):
        return None
    options = nccl.Options()
    options._timeout = timeout_of(group, device)
    return nccl(store, group.rank(), group.size(), options)


def abort(group: Any, device: torch.device) -> None:
    """Ends what a ProcessGroup or Backend has launched on such a device and did not arrive. Nothing can be sent by it
    afterwards. Of a ProcessGroup torch only offers to end all backends."""
    backend = group._get_backend(device) if hasattr(group, "_get_backend") else group
    with suppress(RuntimeError):  # of a kind that cannot
        backend.abort()


def all_gather_of_one_tensor(group: Any, into: Tensor, tensor: Tensor) -> dist.Work:
    """Of a ProcessGroup or Backend. torch.distributed's functions take only groups that it has made itself."""
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    return gather(into, tensor, in_stream_order(AllgatherOptions()))  # type: ignore[no-any-return]


def all_to_all_of_one_tensor(
    group: Any, into: Tensor, tensor: Tensor, counts_in: list[int], counts_out: list[int]
) -> dist.Work:
    """The same. Counts are of elements, along the first dimension."""
    send = getattr(group, "all_to_all_single", None) or group.alltoall_base
    how = in_stream_order(dist.AllToAllOptions())
    return send(into, tensor, counts_in, counts_out, how)  # type: ignore[no-any-return]


def reduce_scatter_of_one_tensor(group: Any, into: Tensor, tensor: Tensor) -> dist.Work:
    """The same; sums."""
    scatter = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    return scatter(into, tensor, in_stream_order(dist.ReduceScatterOptions()))  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------- joining
#
# torch.distributed.algorithms.join tells what it joins only through private attributes.


def join_mark(joinable: Joinable) -> Any:
    """What a Join last said of it: `enable`, whether it may end early; `is_first_joinable`. It stays after the Join."""
    return joinable._join_config


def living_joins_of(joinable: Joinable) -> list[Join]:
    """The Joins that it is in. Looks at every object of the process."""
    joins = [one for one in gc.get_objects() if type(one) is Join]
    return [one for one in joins if any(joinable is other for other in one._joinables)]


def averaged_by(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters whose gradients it averages: those that its module had when it was built."""
    return list(ddp._module_parameters)


def divides_by_ranks_with_data(model: nn.Module | None) -> bool:
    """Whether DistributedDataParallel was told to, by Join(divide_by_initial_world_size=False)."""
    return not getattr(model, "_divide_by_initial_world_size", True)


# ----------------------------------------------------------------------------------------------- schedulers


def follow(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Has a scheduler, and those that it consists of, go on with this optimizer in the place of its own.

    A scheduler's constructor marks the step of its optimizer, and the scheduler warns where it finds another.
    """
    for one in (scheduler, *getattr(scheduler, "_schedulers", ())):
        one.optimizer = optimizer
    step, held = type(optimizer).step, ref(optimizer)

    @wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        stepped = held()
        stepped._opt_called = True  # type: ignore[union-attr]
        return step(stepped, *args, **kwargs)  # type: ignore[arg-type]

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------ optimizers


def takes_state_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be registered on its state_dict(). Not where a subclass, such as one that wraps another
    optimizer, never called the constructor of Optimizer, which makes the table of them."""
    return hasattr(optimizer, "_optimizer_state_dict_post_hooks")


# -------------------------------------------------------------------------------------------------- tensors


def copy_all(into: list[Tensor], tensors: list[Tensor]) -> None:
    """Copies each tensor, in a few kernels however many there are. The optimizers of torch do so too, by a private
    name. Without values torch would make copies in between, which on a device there are not."""
    if all(map(has_values, tensors)):
        torch._foreach_copy_(into, tensors)
    else:
        for place, tensor in zip(into, tensors, strict=True):
            place.copy_(tensor)


def add_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Adds to each tensor another, in a few kernels however many there are; see copy_all."""
    if all(map(has_values, tensors)):
        torch._foreach_add_([*into], [*tensors])
    else:
        for place, tensor in zip(into, tensors, strict=True):
            place.add_(tensor)


def norms_of(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each tensor, 0-dim, computed in a dtype, in a few kernels however many there are."""
    return list(torch._foreach_norm([*tensors], norm_type, dtype=dtype))


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies each tensor in place by a 0-dim one of their device, in a few kernels however many there are."""
    torch._foreach_mul_([*tensors], factor)


def wraps_others(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that wraps other tensors (DTensor, quantised). There is no public test for it."""
    return _python_dispatch.is_traceable_wrapper_subclass(tensor)


def wrap_others(kinds: Iterable[type]) -> bool:
    """The same of any of several classes."""
    return any(_python_dispatch.is_traceable_wrapper_subclass_type(kind) for kind in kinds)


def leaves(value: Any) -> Iterable[Any]:
    """What nested tuples, lists, dicts and what else torch knows hold. torch's own walk has no public name."""
    return _pytree.tree_iter(value)


def load_plain_values(path: Path) -> Any:
    """torch.load(weights_only=True) to the CPU, mapped.

    Torch 2.15 warns where a file has sparse tensors that looking through them takes time. Nobody here takes any.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """torch's, which documentation tells users to derive from, but which lies in a private module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch keeps the mode from being compiled, operator by operator: a tenth of what it takes."""
        return False


DEVICE_OF: Any = torch.ops.prim.device.default
"""What modes see when a fake tensor is asked for its device."""

CPU_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Attention on the CPU, of which torch.utils.flop_counter knows no formulas."""

VALUE_OF: Any = torch.ops.aten._local_scalar_dense.default
"""What `item()` and `bool()` of a tensor call."""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What operators raise that cannot run on tensors without values. They have no public name."""


def without_values() -> FakeTensorMode:
    """In this context new tensors have shapes but no memory, on any device. torch has no public name for it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def has_values(tensor: Tensor) -> bool:
    """Whether there is memory behind it, and not only a shape, as in `without_values`."""
    return not isinstance(tensor, FakeTensor)


def is_of_two_devices(error: RuntimeError) -> bool:
    """Whether it is what operators raise on such tensors that lie on two devices. They have no class for it.

    The second text is that of torch 2.11.
    """
    return any(text in str(error) for text in ("same device", "two different devices"))


def call_stepped(optimizer: Optimizer) -> None:
    """Has schedulers of the optimizer not warn that it was never stepped. What they ask has no public name."""
    vars(optimizer)["_opt_called"] = True


class SteppedByScaler:
    """An optimizer that learns when torch.amp.GradScaler is about to step it, or to skip the step.

    The scaler asks each optimizer then whether it unscales gradients itself, by a private name.
    """

    def scaler_steps(self) -> None:
        """To be overridden. May raise."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        self.scaler_steps()
        return False


class GradScaler(torch.amp.GradScaler):
    """torch's, in which the step that a subclass replaces has a name without underscore. It offers none itself."""

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales the optimizer's gradients; returns, by device, whether one was not finite."""
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16)
