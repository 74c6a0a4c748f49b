"""A model that runs on tensors without values while memory is counted (meter.py), by a transport that sends nothing."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import cache, partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zero._torch.recording import VALUE_OF
from zero._torch.tensors import NEEDS_VALUES, copying_without_values, let_move, with_values, without_values
from zero.comm import Comm, Work
from zero.comm.comm import sent
from zero.comm.host_memory import CHUNK, QueuedWork
from zero.comm.link import Link, Transports
from zero.comm.oplog import Log
from zero.comm.streams import HostStreams
from zero.comm.transport import SIXTEEN_BITS, Local, Message, SumWork, summed_as
from zero.fsdp.choice import params_by_unit
from zero.plan.meter import Meter
from zero.shards.offload import Offload
from zero.wrap.tensors import tensors_in

# The device that stands for the host's memory, to which offload moves shards. It is never the model's own device, and
# torch can copy to and from it in a rehearsal.
_HOST = "meta"

_LSTM: Any = torch.ops.aten.mkldnn_rnn_layer.default


class Rehearsal(Meter):
    """Counts live bytes, and returns 0 where the value of a tensor without values is read."""

    in_forward = False
    of_cpus = False  # whether what is rehearsed runs on CPUs, whose kernels this process can ask

    def counts(self, tensor: Tensor) -> bool:
        return not on_host(tensor)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = func(*args, **kwargs)
        except NEEDS_VALUES:
            # zero and optimizers read some values on the host: whether a rank has found a problem, the norm of a
            # parameter. 0 means that there is none. What a forward computes may depend on the values that it reads.
            if func is not VALUE_OF or self.in_forward:
                raise
            return args[0].dtype.is_floating_point * 0.0
        if func is not _LSTM or not self.of_cpus:
            return result
        *outputs, workspace = result  # which is empty without values
        shapes = tuple(tensor.shape for tensor in args[:7])
        return *outputs, workspace.new_empty(_workspace_of_lstm(shapes, args[0].dtype, *args[9:], reverse=args[7]))


@cache
def _workspace_of_lstm(shapes: Iterable[torch.Size], dtype: torch.dtype, *options: Any, reverse: bool) -> int:
    """The bytes that oneDNN's kernel keeps for backward, which only the kernel tells: it is run, on zeros."""
    with with_values():
        tensors = [torch.zeros(shape, dtype=dtype, device="cpu") for shape in shapes]
        return int(_LSTM(*tensors, reverse, [], *options)[-1].nbytes)


@contextmanager
def rehearsing(model: nn.Module, device: str) -> Iterator[tuple[nn.Module, Rehearsal]]:
    """Yields a copy of the model without values, on the device. New tensors have none here, either."""
    with ExitStack() as stack:
        stack.callback(sent.update, Counter(sent))
        stack.callback(sent.clear)  # this is called first
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch warns that such tensors have no address; the model's own were shown
        if torch.get_default_device().type != device:  # a mode, which takes time
            stack.enter_context(torch.device(device))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # blocks, and steps, may be compiled
        mode = without_values()
        with mode:
            moved = dict[int, Any]()
            for one in (*model.parameters(), *model.buffers()):
                moved[id(one)] = faked(one, device)
                if isinstance(one, nn.Parameter):
                    moved[id(one)] = nn.Parameter(moved[id(one)], requires_grad=one.requires_grad)
                    let_move(moved[id(one)])
        try:
            with copying_without_values(mode):
                model = deepcopy(model, moved)
        except Exception as error:
            raise ValueError(
                f"the {type(model).__name__} cannot be copied ({error}), and a copy is what is planned. Plan it "
                "before it holds such objects."
            ) from error
        stack.enter_context(mode)
        rehearsal = stack.enter_context(Rehearsal())
        yield model, rehearsal


def faked(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def run(model: nn.Module, module: nn.Module, batch: Sequence[Any], rehearsal: Rehearsal, device: str) -> Tensor | None:
    """The loss of a forward, or a sum of what the model returns; None if nothing requires a gradient."""
    try:
        rehearsal.in_forward = True
        outputs = [tensor for tensor in tensors_in(model(*batch)) if tensor.requires_grad]
        rehearsal.in_forward = False
        if len(outputs) == 1 and not outputs[0].dim():
            return outputs[0]
        return torch.stack([output.float().sum() for output in outputs]).sum() if outputs else None
    except NEEDS_VALUES as error:
        raise RuntimeError(
            "the activations cannot be measured without running the model: its forward needs values, as .item() and "
            f"masks by value do ({error}). Plan without a batch, and add the bytes of your step's activations."
        ) from error
    except TypeError as error:
        try:
            refuse_misfit(module.forward, *batch)
        except TypeError as problem:
            raise ValueError(
                f"{type(module).__name__}.forward cannot be called with the batch (positional arguments: "
                f"{len(batch)}): {problem}. Pass all positional arguments, in order. For arguments by keyword only, "
                "wrap the model in a module that passes them."
            ) from error
        raise
    except RuntimeError as error:
        held = ((f"{at}.{name}", value) for at, one in module.named_modules() for name, value in vars(one).items())
        elsewhere = [name.lstrip(".") for name, one in held if isinstance(one, Tensor) and one.device.type != device]
        if not elsewhere or "device" not in str(error):
            raise
        raise RuntimeError(
            f"the activations are measured on {device}, but these attributes are tensors elsewhere: "
            f"{', '.join(elsewhere)} ({error}). Make them buffers, which move with the model: "
            'self.register_buffer("name", tensor, persistent=False).'
        ) from error


def refuse_misfit(function: Callable[..., Any], *arguments: Any) -> None:
    """Raises TypeError for arguments that a function does not take, if its signature is known."""
    with suppress(ValueError):
        inspect.signature(function).bind(*arguments)


class _Touch(torch.autograd.Function):
    """Computes nothing with a parameter, but gives it a gradient."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, param: Tensor) -> Tensor:
        ctx.like = param.shape, param.stride(), param.dtype, param.device
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        shape, stride, dtype, device = ctx.like
        wanted = ctx.needs_input_grad[1]
        return gradients[0], torch.empty_strided(shape, stride, dtype=dtype, device=device) if wanted else None


def walk(module: nn.Module, units: dict[str, nn.Module]) -> None:
    """Has units run one after another without activations. Gradients arrive from the last parameter to the first."""
    owned = {unit: [name for name, _ in named] for unit, named in params_by_unit(module, units).items()}
    touch: Callable[[Tensor, Tensor], Tensor] = _Touch.apply

    def touched(names: Sequence[str], passed: Tensor) -> Tensor:
        return reduce(touch, map(module.get_parameter, names), passed)

    for unit in filter(None, owned):
        units[unit].forward = partial(touched, owned[unit])
    unit_of = {name: unit for unit, names in owned.items() for name in names}
    steps: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, _ in module.named_parameters():
        unit = unit_of[name]
        steps[unit or name] = units[unit] if unit else partial(touched, [name])
    module.forward = lambda passed: reduce(lambda passed, step: step(passed), steps.values(), passed)


class Offloaded(Offload):
    """Shards are on the host, and only what is on the model's device is counted."""

    active = True

    def __init__(self, offload: Any) -> None:
        """offload: what zero.CPUOffload or DiskOffload stands for."""
        self._offload = offload

    def of_groups(self, numels: Sequence[int]) -> list[Offload]:
        return [self if offload.active else offload for offload in self._offload.of_groups(numels)]

    def place(self, shard: Tensor) -> Tensor:
        return shard.to(_HOST)

    def has(self, shard: Tensor) -> bool:
        return on_host(shard)


class BesideComputing(HostStreams):
    """The streams of a GPU: a result is there once launched, and what it reads is kept until it is waited for."""

    def arriving(self, transfer: Work, comm: Comm, keeps: object) -> Work:
        result = transfer.wait()
        return QueuedWork(partial(lambda kept: result, keeps), [])


def on_host(tensor: Tensor) -> bool:
    return tensor.device.type == _HOST


# The name of the rehearsed transport; "nccl" stands for all backends that overlap.
Rehearsed = Literal["gloo", "host memory", "nccl"]


class Unsent(Local):
    """A transport by which one rank of a group of any size runs its operations, and nothing is sent.

    It allocates the buffers that the transport `like` would allocate, so that memory can be metered, but does not write
    received values. Tensors may have no values. All other ranks are assumed to do the same as this rank.
    """

    def __init__(self, rank: int, world: int, like: Rehearsed) -> None:
        self.name, self.overlaps, self.reads_memory = f"{like}, rehearsed", like == "nccl", like == "host memory"
        self._rank, self._world = rank, world
        self._queue: list[QueuedWork] = []

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        return self._transfer([full], lambda: None)

    def reduce(self, messages: Sequence[Message], times: float, channel: int) -> Work:
        sent, own = [message for message, _ in messages], [counts[self._rank] for _, counts in messages]
        if self.overlaps and sent[0].dtype not in SIXTEEN_BITS:  # of one host, which takes more in 16 bits
            sums = sent[0].new_empty(own[0])
            return self._transfer([*sent, sums], lambda: sums)

        def summed(rows: Sequence[Tensor], times: float = 1) -> Tensor:
            total = rows[0].new_empty(sum(own), dtype=summed_as(rows[0].dtype))
            if self.overlaps:
                for message_rows, share in zip(rows, total.split(own), strict=True):
                    torch.sum(message_rows, 0, dtype=total.dtype, out=share)
            return total

        if self.reads_memory:  # by the chunks that HostMemory reads from all ranks at a time

            def read() -> Tensor:
                chunks = sent[0].new_empty(self._world, min(CHUNK // sent[0].element_size(), max(1, *own)))
                return summed([chunks[:, : min(chunks.shape[1], n)] for n in own])

            return self._transfer(sent, read)
        received = [message.new_empty(self._world, counts[self._rank]) for message, counts in messages]
        work = self._transfer([*sent, *received], lambda: received)
        return SumWork(summed, work, times)

    def _transfer(self, buffers: Sequence[Tensor], finish: Callable[[], Any]) -> Work:
        return QueuedWork(partial(lambda held: finish(), buffers), self._queue if self.reads_memory else [])

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        if self.reads_memory:
            if tensor.nbytes <= CHUNK:
                tensor.new_empty(self._world + (not maximum), tensor.numel())  # and the sums
            else:  # of each rank's share, and a chunk of sums, as they go where what is summed lies
                share = -(-tensor.numel() // self._world)
                tensor.new_empty(self._world + 1, min(CHUNK // tensor.element_size(), share))
        return self._transfer([tensor], lambda: tensor)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self._world


def rehearsed(rank: int, world: int, like: Rehearsed) -> Comm:
    """One rank of a simulated group that sends nothing."""
    link = Link(None)
    if world > 1:
        link.rank, link.world, link.log = rank, world, Log(rank, world)
        unsent = Unsent(rank, world, like)
        link.transports = Transports(lambda kind: unsent)
        link.overlaps = lambda device: unsent.overlaps  # type: ignore[method-assign]
    return Comm(link)
