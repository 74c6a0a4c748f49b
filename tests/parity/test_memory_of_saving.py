"""No save, load, summon or unwrap takes more bytes of the device than a step of the same run, and none takes more of
the host than its result on the rank that asked for it, plus one unit.

On the CPU the device is the host. Here whatever is moved by `.to("cpu")` or `.cpu()`, or made by `device="cpu"`, gets
memory that counts as the host's, as it does on a GPU, and everything else is the device's. What a thread makes is not
counted. `make gpu` asks torch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

import gpus
import ranks
import zero
from inner import Meter, while_gloo_lets_go
from zero.checkpoint.export import export
from zero.fsdp.full_weights import Recipient
from zero.plan.meter import _lies_within as lies_within

UNITS, WIDTH = 8, 512


class Apart(Meter):
    """Counts the device alone, and the host by `on_host`."""

    def __init__(self) -> None:
        super().__init__()
        self._host: WeakSet[torch.UntypedStorage] = WeakSet()
        self.host_peak = 0

    def counts(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage not in self._host and not any(lies_within(storage, host) for host in [*self._host])

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._host

    def on_host(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        return self.made(tensor.detach().clone) if copy or not self.is_on_host(tensor) else tensor

    def made(self, make: Callable[[], Tensor]) -> Tensor:
        with _disable_current_modes():
            made = make()
        self.given(made)
        return made

    def given(self, tensor: Tensor) -> None:
        """Of the user's, in the memory of the host."""
        self._host.add(tensor.untyped_storage())
        self.host_peak = max(self.host_peak, self.on_host_now())

    def on_host_now(self) -> int:
        return sum(storage.nbytes() for storage in [*self._host])

    @contextmanager
    def moving(self) -> Iterator[None]:
        torchs = Tensor.to

        def to(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
            if "cpu" in (*args, named.get("device")):
                tensor = self.on_host(tensor, copy=named.get("copy", False))
            return torchs(tensor, *args, **{name: value for name, value in named.items() if name != "copy"})

        copies = mock.patch.object(Recipient, "moved", Recipient.copy)  # else what is on the CPU already would stay
        patched = {"to": to, "cpu": lambda tensor: self.on_host(tensor), "is_cpu": property(self.is_on_host)}
        with copies, mock.patch.multiple(Tensor, **patched), MadeOnHost(self):
            yield


class MadeOnHost(TorchFunctionMode):
    """Has a meter count for the host what is made by `device="cpu"`."""

    def __init__(self, meter: Apart) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        make = partial(func, *args, **(kwargs or {}))
        named = isinstance((kwargs or {}).get("device"), str) and func is not Tensor.to
        return self._meter.made(make) if named else make()


class OnGpu:
    """The device as its allocator counts it. Nobody counts the host."""

    host_peak = 0

    def __enter__(self) -> OnGpu:
        return self

    def __exit__(self, *_: object) -> None: ...

    def moving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_host_now(self) -> int:
        return 0

    def given(self, tensor: Tensor) -> None: ...

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class Run:
    """A run at a stage, metered. `step`: the most bytes of the device in a step. folder: that all ranks see."""

    def __init__(self, stage: int, meter: Apart | OnGpu, rank: int, folder: str) -> None:
        torch.manual_seed(0)
        options: Any = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential})} if stage == 3 else {}
        self.meter, self.rank, self.folder = meter, rank, folder
        self.model, self.optimizer = zero.setup(net(), Adam, stage=stage, **options)
        for _ in range(2):
            self._train()
        self.step = self.peak(self._train)

    def _train(self) -> None:
        self.model(torch.ones(2, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self, run: Callable[[], Any]) -> int:
        self.meter.reset_peak()
        run()
        return self.meter.peak()


def net() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS)))


P = UNITS * (WIDTH * WIDTH + WIDTH) * 4
"""Bytes of the parameters."""
UNIT = P // UNITS


def streamed(run: Run, to: int | None) -> None:
    stream = zero.full_tensors(run.model, run.optimizer, to=to)
    while next(stream, None) is not None:  # keeps none, as a loop would that has a name for it
        pass


def given(run: Run, make: Callable[[], Any]) -> Any:
    with _disable_current_modes(), torch.device("cpu"):
        made = make()
    for tensor in tree_iter(made):
        if isinstance(tensor, Tensor):
            run.meter.given(tensor)
    return made


def state() -> Any:
    params = [*net().parameters()]
    of = {
        number: {key: torch.ones_like(param) for key in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(3.0)}
        for number, param in enumerate(params)
    }
    return {"state": of, "param_groups": Adam(params).state_dict()["param_groups"]}


def loads(run: Run, everywhere: bool, iterates: bool = False) -> None:
    there = everywhere or run.rank == 0
    full = given(run, lambda: net().state_dict()) if there else None
    zero.load_full_state_dict(run.model, iter(full.items()) if full and iterates else full)


def forget_state(run: Run) -> None:
    getattr(run.optimizer, "optim", run.optimizer).state.clear()


def loads_state(run: Run, everywhere: bool) -> None:
    forget_state(run)
    full = given(run, state) if everywhere or run.rank == 0 else None
    zero.load_full_optimizer_state_dict(run.model, run.optimizer, full)


def checkpoint(run: Run, *, wait: bool) -> None:
    zero.checkpoint.save(f"{run.folder}/run", run.model, run.optimizer, wait=wait).wait()


def resumed(run: Run) -> None:
    forget_state(run)
    zero.checkpoint.load(f"{run.folder}/run", run.model, run.optimizer)


def exported(run: Run, dtype: torch.dtype) -> None:
    export(f"{run.folder}/run", f"{run.folder}/{dtype} of {run.rank}", dtype=dtype)


def summoned(run: Run, **options: bool) -> None:
    if options.get("with_grads"):
        run.model(torch.ones(2, WIDTH)).square().mean().backward()
    with run.model.summon_full_params(**options):
        pass
    run.optimizer.zero_grad()


ON_HOST = {"offload_to_cpu": True}
WAYS: dict[str, tuple[Callable[[Run], Any], float, set[int]]] = {
    # what is called, bytes on the host of its result or of what it was given, in P, and the stages
    "weights to rank 0": (lambda run: zero.full_state_dict(run.model, to=0), 1, {0, 1, 2, 3}),
    "weights to all": (lambda run: zero.full_state_dict(run.model, to=None), 1, {0, 1, 2, 3}),
    "state_dict()": (lambda run: run.model.state_dict(), 1, {3}),
    "state to rank 0": (lambda run: zero.full_optimizer_state_dict(run.model, run.optimizer, to=0), 2, {0, 1, 2, 3}),
    "state to all": (lambda run: zero.full_optimizer_state_dict(run.model, run.optimizer, to=None), 2, {0, 1, 2, 3}),
    "streams to rank 0": (lambda run: streamed(run, 0), 0, {0, 1, 2, 3}),
    "streams to all": (lambda run: streamed(run, None), 0, {0, 1, 2, 3}),
    "consolidated": (lambda run: run.optimizer.consolidate_state_dict(0), 2, {1, 2}),
    "checkpoint": (lambda run: checkpoint(run, wait=True), 0, {0, 1, 2, 3}),
    "checkpoint behind, a copy by all": (lambda run: checkpoint(run, wait=False), 3 / 2, {0, 1, 2, 3}),
    "checkpoint loaded": (resumed, 0, {0, 1, 2, 3}),
    "checkpoint exported": (lambda run: exported(run, torch.float32), 0, {3}),
    "checkpoint exported in 16 bits": (lambda run: exported(run, torch.bfloat16), 0, {3}),
    "weights from rank 0": (lambda run: loads(run, False), 1, {0, 1, 2, 3}),
    "weights from all": (lambda run: loads(run, True), 1, {0, 1, 2, 3}),
    "weights from rank 0 by an iterator": (lambda run: loads(run, False, True), 1, {0, 1, 2, 3}),
    "state from rank 0": (lambda run: loads_state(run, False), 2, {0, 1, 2, 3}),
    "state from all": (lambda run: loads_state(run, True), 2, {0, 1, 2, 3}),
    "summoned to the host of rank 0": (lambda run: summoned(run, **ON_HOST, writeback=False, rank0_only=True), 1, {3}),
    "summoned to the host of all": (lambda run: summoned(run, **ON_HOST), 1, {3}),
    "summoned": (summoned, 0, {3}),
    "summoned with gradients": (lambda run: summoned(run, with_grads=True), 0, {3}),
    "unwrapped": (lambda run: zero.unwrap(run.model), 0, {0, 1, 2, 3}),
}
ON_DEVICE = {"summoned": 1, "summoned with gradients": 2 + 1 / 2, "unwrapped": 1 / 2}
"""What is asked for on the device itself at stage 3, in P: there may be this and a unit beside what lives, if that is
more than a step. Beside full gradients there are those of shards; unwrapped weights take the place of shards."""

AT_ONCE = {
    "zero.comm.transport.BATCH": UNIT,
    "zero.state.gathered.AT_ONCE": UNIT,
    "zero.fsdp.full_weights.AT_ONCE": UNIT,
    "zero.checkpoint.files.BUFFER": UNIT // 2,  # of which an export may have two
}
"""Bytes that go at once, as much as a unit of this small model."""


def measured(rank: int, world: int, stage: int, folder: str) -> dict[str, tuple[float, float]]:
    """By way in: bytes of the device over those allowed, and of the host, in P, beyond those of the result."""
    found = {}
    with OnGpu() if gpus.ON else Apart() as meter, meter.moving(), while_gloo_lets_go(), ExitStack() as stack:
        for patched in AT_ONCE.items():
            stack.enter_context(mock.patch(*patched))
        run = Run(stage, meter, rank, folder)
        for name, (way, result, stages) in WAYS.items():
            if stage in stages:
                before = meter.host_peak = meter.on_host_now()
                allowed, kept = run.step, list[Any]()
                if stage == 3 and name in ON_DEVICE:
                    allowed = max(allowed, run.peak(lambda: None) + int(ON_DEVICE[name] * P) + UNIT)
                device = run.peak(lambda way=way, kept=kept: kept.append(way(run)))
                asked = rank == 0 or name.endswith("all") or name == "state_dict()"
                found[name] = device / allowed, (meter.host_peak - before) / P - result * asked
                kept.clear()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_way_takes_more_of_the_device_than_a_step_nor_of_the_host_than_its_result(stage, tmp_path):
    for rank, found in enumerate(ranks.run(measured, args=(stage, str(tmp_path)))):
        for name, (device, host) in found.items():
            print(f"stage {stage}, rank {rank}, {name:36} device {device:5.2f} host {host:+5.2f}")
            assert device <= 1, (rank, name, device)
            assert gpus.ON or host * P <= 1.01 * UNIT, (rank, name, host)
