"""A settled training step as one CUDA graph: the host launches all of its kernels and transfers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch.autograd import writes_so_far
from zero._torch.tensors import as_plain_tensors, tree_flatten, tree_iter, tree_map
from zero.comm.streams import STEP_GRAPH
from zero.comm.together import Together
from zero.fsdp.model import models_of
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.wrappers import Wrapped, comms_of, each, stepped_by, unwrapped

T = TypeVar("T")

WARM_UP = 11
"""Steps by the host before one is recorded: as many as DistributedDataParallel asks for (stage 0). No forward after
them looks for writes in the one that is recorded, and optimizers have their state."""

COMPARED = 100
"""Ranks compare their operations after so many replays."""


def graphed(step: Callable[..., T], model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> Callable[..., T]:
    """Collective. Returns a function that trains as `step` does, from its 12th call on by replaying one CUDA graph.

        def step(inputs, targets):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = zero.graphed(step, model, optimizer)
        for inputs, targets in batches:
            loss = step(inputs, targets)

    step: trains a whole step, from forward to `zero_grad`, and is called with tensors of the same shapes and dtypes
        each time, or nests of them. Other arguments stay what they are. Code of its own on the host, hooks too, runs no
        more once it is recorded. It returns tensors, or nests of them, as copies.
    model, optimizer: those that train, as zero.setup or the wrappers returned them: also a module that contains wrapped
        ones, and several optimizers. Those of torch take capturable=True. A rate that changes is a tensor on the GPU,
        lr=torch.tensor(1e-3, device="cuda"): schedulers write into it.

    The graph keeps the memory of a step, and with reshard_after_forward=False shards keep theirs while parameters are
    unsharded. Drop the function before destroy_process_group(). At stages 0 and 1 call zero.setup and this within
    `with torch.cuda.stream(torch.cuda.Stream()):`, as DistributedDataParallel adds up gradients on the stream on which
    it was built, and the default one cannot be recorded.

    On other devices than GPUs `step` itself is returned. Raises ValueError on every rank for offloaded parameters,
    optimizers that cannot be recorded, and a DistributedDataParallel on the default stream. Each call raises
    RuntimeError where a rank is lost, and for what is no longer as it was when the step was recorded. What waits for
    the device, such as loss scaling and `loss.item()`, cannot be part of it.
    """
    (inner, wrappers), optimizers = unwrapped(model), each(optimizer)
    device = next(param for one in optimizers for param in params_of(one)).device
    if device.type != "cuda":
        return step
    stepped = [stepped_by(inner, wrappers, one) for one in optimizers]
    cuda: Any = torch.get_device_module(device)
    stream, on_default = cuda.current_stream(), cuda.current_stream() == cuda.default_stream()
    for one, of_one in zip(optimizers, stepped, strict=True):
        if any(group.offload.active for group in of_one.shard_groups):
            raise ValueError(
                "zero.graphed was given parameters that are offloaded: the host steps them, and a CUDA graph has "
                "nothing of the host's. Leave out `offload`, or train without zero.graphed."
            )
        if any(group.get("capturable") is False for group in one.param_groups):
            raise ValueError(
                f"zero.graphed was given an optimizer ({type(one).__name__}) whose steps read numbers from the "
                "device. Build it with capturable=True."
            )
        for key, value in ((key, value) for group in one.param_groups for key, value in group.items()):
            if isinstance(value, Tensor) and value.device.type != "cuda":
                raise ValueError(
                    f"zero.graphed was given an optimizer whose {key} is a tensor on the {value.device}, which a graph "
                    f"would read once, when it is recorded. Make it on the GPU: {key}=torch.tensor(..., device='cuda')."
                )
    if on_default and any(isinstance(one, DistributedDataParallel) for one in wrappers):
        raise ValueError(
            "zero.graphed was given a DistributedDataParallel on the default stream, which cannot be recorded. Call "
            "zero.setup and zero.graphed within `with torch.cuda.stream(torch.cuda.Stream()):`."
        )
    for unit in (unit for model, _ in models_of(inner) for unit in model.units):
        unit.reshard()  # a forward without backward may have left it unsharded
        for group in unit.groups:
            group.shard_in_full = False  # a replay reads the shard where it was
    where = cuda.Stream(device) if on_default else stream
    return _Graphed(step, inner, wrappers, optimizers, [one.optim for one in stepped], cuda, where)


class _Graphed:
    """The step. model, wrappers: the module, and what wraps it. inner: the optimizers in OSSs, or the same. cuda:
    torch.cuda. stream: on which steps by the host run."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        wrappers: Sequence[Wrapped],
        optimizers: Sequence[Optimizer],
        inner: Sequence[Optimizer],
        cuda: Any,
        stream: Any,
    ) -> None:
        self._step, self._wrappers, self._optimizers, self._inner = step, wrappers, optimizers, inner
        self._comms = comms = comms_of(wrappers)
        self._loads = loads = list[None]()
        self._units = [unit for one, _ in models_of(model) for unit in one.units]
        self._modules = [*model.modules()]
        # What loads gives it state in other memory. Of this list and not of this object, which the hook would keep.
        for one in inner:
            finalize(self, one.register_load_state_dict_post_hook(lambda _: loads.append(None)).remove)
        self._cuda, self._stream = cuda, stream
        self._together = Together(comms, "a step of zero.graphed")
        self._replay = [comm.channel("a replay of zero.graphed") for comm in comms]
        self._calls_left, self._replays = WARM_UP, 0
        self._graph: Any = None
        self._inputs: list[Any] = []
        self._nest: Any = None
        self._outputs: Any = None
        self._settings: dict[str, Any] = {}
        self._held: list[Any] = []

    def __call__(self, *args: Any, **named: Any) -> Any:
        cuda, stream = self._cuda, self._stream
        with self._together:
            if self._calls_left:
                # By the host, on the stream on which it will be recorded, to which belongs what torch keeps from step
                # to step.
                self._calls_left -= 1
                stream.wait_stream(cuda.current_stream())
                with cuda.stream(stream):
                    result = tree_map(_copy, self._step(*args, **named))
                cuda.current_stream().wait_stream(stream)
                return result
            if self._graph is None:
                self._record(args, named)
        # Before this rank says that it replays: what is raised here leaves the group as it is. Ranks that replay
        # meanwhile are told once this one launches anything else, or ends.
        now = self._settings_now()
        for name, value in now.items() if now != self._settings else ():
            if self._settings.get(name) != value:
                raise RuntimeError(
                    f"{name} has changed since the step of zero.graphed was recorded, and a replay would not see it. "
                    "Options that change, such as lr, are tensors that are written in place, as schedulers do: "
                    "lr=torch.tensor(1e-3, device='cuda'). After any other change call zero.graphed again."
                )
        found, nest = tree_flatten((args, named))
        kinds, expected = [_kind(arg) for arg in found], [_kind(arg) for arg in self._inputs]
        if kinds != expected or nest != self._nest:
            raise RuntimeError(
                f"the step of zero.graphed was recorded with {expected}, and is called with {kinds}. Pad batches to "
                "one shape, or call the function that was given to zero.graphed for the others."
            )
        try:
            for comm, channel in zip(self._comms, self._replay, strict=True):
                comm.log.failure.refuse_if_broken()
                comm.log.record(channel)
            for into, arg in zip(self._inputs, found, strict=True):
                if isinstance(into, Tensor):
                    into.copy_(arg, non_blocking=True)
            for unit in self._units:
                if unit.needed_by:  # a forward without backward has left it, with weights from before this step
                    unit.reshard()
            for one in self._optimizers:
                if isinstance(one, OSS):
                    one.full_state = None
            self._replays += 1
            if self._replays % COMPARED == 0:
                self._together.agree()
            self._graph.replay()
        except BaseException as error:
            # Others may be in a replay already, which waits for this rank on the device, and compares nothing.
            for comm in self._comms:
                comm.log.failure.mark_broken(f"rank {comm.log.own} has raised {type(error).__name__}: {error}")
            raise
        return tree_map(_copy, self._outputs)

    def _record(self, *given: Any) -> None:
        """Collective. Records a step, which runs nothing."""
        args, named = tree_map(_copy, given)
        self._inputs, self._nest = tree_flatten((args, named))
        before, counted, graph = self._gradients(), self._on_host(), self._cuda.CUDAGraph()
        try:
            # Other threads, such as NCCL's watchdog, ask for events meanwhile.
            with STEP_GRAPH, self._cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._outputs = self._step(*args, **named)
        except Exception as error:
            raise RuntimeError(
                "the step of zero.graphed could not be recorded as a CUDA graph. What makes the host wait for the "
                "device cannot be part of it: loss scaling, `loss.item()`, printing a tensor, an optimizer without "
                f"capturable=True. {type(error).__name__}: {error}"
            ) from error
        after = self._gradients()
        if [gradient is None for gradient in before] != [gradient is None for gradient in after]:
            raise RuntimeError(
                "the step of zero.graphed began without gradients, and leaves some, or the other way round: a replay "
                "would not go on from them. Have it end with optimizer.zero_grad()."
            )
        if counted != self._on_host():
            kinds = " or ".join(type(one).__name__ for one in self._inner)
            raise RuntimeError(
                f"{kinds} counts its steps, or keeps other state, on the host, where a replay does not run. Take one "
                "that keeps all of it on the GPU, as torch's with capturable=True."
            )
        self._together.agree()
        self._graph, self._settings = graph, self._settings_now()
        # As long as these exist, no other tensor has their id.
        self._held = [value for one in self._optimizers for group in one.param_groups for value in group.values()]

    def _settings_now(self) -> dict[str, Any]:
        """What a step reads on the host."""
        found: dict[str, Any] = {
            "model.training": [module.training for module in self._modules],
            "model.no_sync()": [one.require_backward_grad_sync for one in self._wrappers],
            "the optimizer's state": len(self._loads),
            "the sharding of the model": [unit.summoned or not unit.exists for unit in self._units],
        }
        for number, group in enumerate(group for one in self._optimizers for group in one.param_groups):
            for key, value in group.items():
                if key == "params":
                    found[f"requires_grad of the parameters of group {number}"] = [p.requires_grad for p in value]
                else:
                    found[f"{key} of group {number}"] = id(value) if isinstance(value, Tensor) else value
        return found

    def _on_host(self) -> list[Any]:
        """What the optimizer keeps in the memory of the host: numbers, and how often its tensors were written."""
        kept = (leaf for one in self._inner for state in one.state.values() for leaf in tree_iter(state))
        here = [leaf for leaf in kept if not isinstance(leaf, Tensor) or leaf.device.type == "cpu"]
        return [writes_so_far([leaf]) if isinstance(leaf, Tensor) else leaf for leaf in here]

    def _gradients(self) -> list[Tensor | None]:
        with as_plain_tensors():
            return [param.grad for one in self._optimizers for param in params_of(one)]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _kind(value: Any) -> Any:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else value
