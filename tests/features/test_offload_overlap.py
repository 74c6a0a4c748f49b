"""CPUOffload(overlap=True): the thread that steps beside the training takes now more, now less time, and everything is
as if nothing overlapped."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import matrix
import ranks
import zero
from features.test_oss_offload import Apart
from models import FeedForward, Stack
from sidebyside import data
from zero.features.offload.beside import Widening
from zero.oss.optimizer import set_bucket_size

WIDTH = 12
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": partial(AdamW, lr=1e-2),
    "fused": lambda params: AdamW(
        params, lr=torch.tensor(1e-2, device="cpu"), fused=True
    ),  # a scheduler writes into the tensor
}


class Slow:
    """Steps take some time."""

    random = random.Random(0)

    def step_part(self, part: Any) -> None:
        time.sleep(self.random.choice([0, 0.002, 0.02]))
        super().step_part(part)  # type: ignore[misc]


def wrapped(stage: int, optim: Any, offload: Any, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    block = partial(FeedForward, WIDTH, 2 * WIDTH)
    net = Stack(block, WIDTH, 3, blocks=3)
    if stage == 3:
        model: nn.Module = zero.FSDP(net, auto_wrap_policy=ModuleWrapPolicy({FeedForward}), offload=offload, **options)
        return model, optim(model.parameters())
    if stage == 1:
        model, optimizer = zero.setup(net.to(**options), optim, stage=1, params=net.parameters(), offload=offload)
        set_bucket_size(optimizer, 200)
        return model, optimizer
    optimizer = zero.OSS(net.to(**options).parameters(), optim, offload=offload)
    return zero.ShardedDDP(net, optimizer, reduce_buffer_size=200), optimizer


def overlapping(stage: int, steps: type = Slow, **options: float) -> Any:
    """steps: how long a step takes, or what becomes of it."""
    return type("Overlapping", (steps, zero.CPUOffload if stage == 3 else Apart), {})(overlap=True, **options)


def offload_of(stage: int, overlap: bool, ratio: float = 1.0) -> Any:
    if overlap:
        return overlapping(stage, ratio=ratio)
    return zero.CPUOffload() if stage == 3 else Apart()


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (model(data(5, WIDTH, rank=rank, step=step).to(dtype)).float() - 1).square().mean()


def losses_and_weights(
    rank: int, stage: int, optim: Any, offload: Any, *, in_backward: bool = False, dtype: Any = torch.float32
) -> list[Any]:
    """Accumulates, clips, and changes the options after each step."""
    options = {} if dtype is torch.float32 else {"dtype": dtype}
    if options and stage == 3:
        options = {"mixed_precision": zero.MixedPrecision(param_dtype=dtype)}
    model, optimizer = wrapped(stage, optim, offload, **options)
    scheduler = LambdaLR(optimizer, lambda step: 0.8**step)
    if in_backward:
        zero.step_in_backward(model, optimizer)
    told: list[Any] = []
    inputs = torch.float32 if stage == 3 else dtype
    for step in range(6):
        for part in range(3 if step == 2 and not in_backward else 1):
            with model.no_sync() if part == 0 and step == 2 and not in_backward else nullcontext():
                loss = loss_of(model, rank, step + 10 * part, inputs)
                loss.backward()
        if step in (1, 4) and not in_backward:
            told.append(zero.clip_grad_norm_(model, optimizer, 0.05))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        told.append(loss.detach())
        if step == 3:
            told.append(zero.full_state_dict(model))
            told.append(zero.full_optimizer_state_dict(model, optimizer))
    return [*told, zero.full_state_dict(model)]


def same(rank: int, world: int, stage: int, name: str, options: dict[str, Any], ratio: float = 1.0) -> None:
    found, expected = (
        losses_and_weights(rank, stage, OPTIMIZERS[name], offload_of(stage, overlap, ratio), **options)
        for overlap in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@matrix.combined("stage, name", [1, 2, 3], OPTIMIZERS)
def test_training_is_the_same_bit_for_bit(stage, name):
    ranks.run(same, args=(stage, name, {}))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"in_backward": True}], ids=["16 bits", "in backward"])
def test_in_16_bits_and_in_backward(stage, options):
    if stage == 1 and "in_backward" in options:
        pytest.skip("stage 1 does not step in backward")
    ranks.run(same, args=(stage, "adamw", options))


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(1)
def test_a_process_alone_overlaps(rank, world, stage):
    same(rank, world, stage, "adamw", {})


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_from_files_training_is_the_same(rank, world, tmp_path, stage):
    found, expected = (
        losses_and_weights(rank, stage, OPTIMIZERS["adamw"], zero.DiskOffload(tmp_path, overlap=overlap))
        for overlap in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_with_a_share_on_the_device_training_is_the_same(rank, world, stage):
    same(rank, world, stage, "sgd", {}, ratio=0.4)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_what_forward_needs_first_stays_on_the_device(rank, world, stage):
    model, optimizer = wrapped(stage, OPTIMIZERS["sgd"], offload_of(stage, True, ratio=0.4))
    if stage == 3:
        groups = model._model.index.groups
    else:
        groups = optimizer.shards.shard_groups[::-1]
    away = [group.home.apart for group in groups]
    numels = [group.layout.numel for group in groups]
    share = sum(numel for numel, is_away in zip(numels, away, strict=True) if is_away) / sum(numels)
    assert 0.4 <= share < 0.4 + max(numels) / sum(numels)
    assert away[0] is False


@pytest.mark.parametrize("in_backward", [False, True])
@ranks.on(2)
def test_a_step_is_pending_on_every_rank_alike(rank, world, in_backward):
    """Also on a rank that owns nothing of a unit: units whose steps are pending are not gathered ahead."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    policy, offload = ModuleWrapPolicy({nn.Linear}), zero.CPUOffload(overlap=True)
    model = zero.FSDP(net, auto_wrap_policy=policy, offload=offload, partition="whole")
    optimizer = SGD(model.parameters(), lr=0.05)
    if in_backward:
        zero.step_in_backward(model, optimizer)
    groups = model._model.index.groups
    loss_of(model, rank, 0).backward()
    optimizer.step()
    assert all(group.pending_step is not None for group in groups)


@pytest.mark.parametrize("ratio", [0, -1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio="):
        zero.CPUOffload(ratio=ratio)


READERS: dict[str, Any] = {
    "full weights": lambda model, optimizer: zero.full_state_dict(model),
    "its own weights": lambda model, optimizer: model.state_dict(),
    "listed parameters": lambda model, optimizer: [param.detach().clone() for param in model.parameters()],
    "those of the module inside": lambda model, optimizer: [
        param.detach().clone() for param in model.module.parameters()
    ],
    "the state": lambda model, optimizer: [
        value.clone() for param in model.parameters() for value in optimizer.state.get(param, {}).values()
    ],
    "the optimizer's state dict": lambda model, optimizer: zero.full_optimizer_state_dict(model, optimizer),
    "an evaluation": lambda model, optimizer: loss_of(model.eval(), 0, 0).detach(),
    "summoned": lambda model, optimizer: _summoned(model),
}


def _summoned(model: Any) -> list[Tensor]:
    with zero.FSDP.summon_full_params(model), torch.no_grad():
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_whoever_reads_between_step_and_forward_waits(rank, world, stage):
    for reader in READERS.values():
        told = []
        for overlap in (True, False):
            model, optimizer = wrapped(stage, OPTIMIZERS["adamw"], offload_of(stage, overlap))
            loss_of(model, rank, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(reader(model, optimizer))
        torch.testing.assert_close(*told, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_until_then_references_to_parameters_are_nan(rank, world, stage):
    model, optimizer = wrapped(stage, OPTIMIZERS["sgd"], offload_of(stage, True))
    params = [*model.parameters()]
    loss_of(model, rank, 0).backward()
    optimizer.step()
    assert all(param.isnan().all() for param in params)
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        next(param for param in params if param.numel() > 1).mul_(2)
    [*model.parameters()]
    assert not any(param.isnan().any() for param in params)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_a_checkpoint_has_what_was_stepped(rank, world, tmp_path, stage):
    model, optimizer = wrapped(stage, OPTIMIZERS["adamw"], offload_of(stage, True))
    loss_of(model, rank, 0).backward()
    optimizer.step()
    zero.checkpoint.save(tmp_path / "one", model, optimizer)
    expected = zero.full_state_dict(model), zero.full_optimizer_state_dict(model, optimizer)
    loss_of(model, rank, 1).backward()
    optimizer.step()
    zero.checkpoint.load(tmp_path / "one", model, optimizer)
    found = zero.full_state_dict(model), zero.full_optimizer_state_dict(model, optimizer)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_steps_that_overlap_and_such_that_cannot_take_turns(rank, world, stage):
    """With a closure the optimizer steps the shards itself, which were not to be read in 16 bits."""
    told = []
    for overlap in (True, False):
        options = {"dtype": torch.bfloat16} if stage < 3 else {"mixed_precision": zero.MixedPrecision(torch.bfloat16)}
        model, optimizer = wrapped(stage, OPTIMIZERS["adamw"], offload_of(stage, overlap), **options)
        dtype = torch.bfloat16 if stage < 3 else torch.float32

        def closure(step: int) -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = loss_of(model, rank, step, dtype)  # noqa: B023
            loss.backward()
            return loss.detach()

        for step in range(4):
            told.append(optimizer.step(partial(closure, step)) if step % 2 else closure(step))
            if step % 2 == 0:
                optimizer.step()
        told.append(zero.full_state_dict(model))
    torch.testing.assert_close(told[:5], told[5:], rtol=0, atol=0)


class Waits(Slow):
    """Steps begin once they may."""

    begins = threading.Event()

    def step_part(self, part: Any) -> None:
        assert self.begins.wait(timeout=10)
        super().step_part(part)


class Fails(Slow):
    """The step of a group raises an error on one rank."""

    def step_part(self, part: Any) -> None:
        if torch.distributed.get_rank() == 1:
            raise MemoryError("out of memory of the test")
        super().step_part(part)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2, timeout=20)
def test_an_error_in_the_thread_is_raised_on_every_rank_by_the_next_forward(rank, world, stage):
    offload = overlapping(stage, Fails)
    model, optimizer = wrapped(stage, OPTIMIZERS["sgd"], offload)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    kind, words = (MemoryError, "out of memory of the test") if rank == 1 else (RuntimeError, "rank 1")
    with pytest.raises(kind, match=words):
        loss_of(model, rank, 1)


class Dies(Slow):
    """A process ends in the step of a group."""

    def step_part(self, part: Any) -> None:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step_part(part)


def killed(rank: int, world: int, path: Path, stage: int) -> str:
    model, optimizer = wrapped(stage, OPTIMIZERS["sgd"], overlapping(stage, Dies))
    loss_of(model, rank, 0).backward()
    optimizer.step()
    return ranks.refusal(lambda: zero.checkpoint.save(path, model, optimizer))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_where_a_rank_dies_in_a_step_the_others_raise_and_no_checkpoint_is_left(tmp_path, stage):
    with pytest.raises(ranks.RankError) as raised:
        ranks.run(killed, 2, args=(tmp_path / "one", stage), timeout=20, fresh=True)
    assert "rank 1" in raised.value.outcomes[0].value
    with pytest.raises(zero.checkpoint.CheckpointError):
        zero.checkpoint.load(tmp_path / "one", nn.Linear(1, 1))


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2, timeout=20)
def test_gradients_that_are_written_while_they_are_read_are_an_error(rank, world, stage):
    offload = overlapping(stage, Waits)
    offload.begins.clear()
    model, optimizer = wrapped(stage, OPTIMIZERS["sgd"], offload)
    loss_of(model, rank, 0).backward()
    gradients = [part.grad for part in (map(optimizer.part, model.parameters()) if stage == 2 else model.parameters())]
    optimizer.step()
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()
    offload.begins.set()
    assert "were written while a step beside" in ranks.refusal(lambda: loss_of(model, rank, 1))


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2, timeout=20)
def test_zeros_in_place_of_gradients_wait_and_dropping_them_does_not(rank, world, stage):
    offload = overlapping(stage, Waits)
    model, optimizer = wrapped(stage, OPTIMIZERS["sgd"], offload)
    for set_to_none in (True, False):
        offload.begins.clear()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        if set_to_none:
            model.zero_grad()  # a step may not begin yet
        offload.begins.set()
        model.zero_grad(set_to_none=False)
        loss_of(model, rank, 1)


@pytest.mark.parametrize("stage", [1, 3])
@ranks.on(2)
def test_a_step_that_a_scaler_skips_is_skipped(rank, world, stage):
    model, optimizer = wrapped(stage, OPTIMIZERS["sgd"], offload_of(stage, True))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = zero.full_state_dict(model)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * loss_of(model, rank, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        now = zero.full_state_dict(model)
        assert all(map(torch.equal, before.values(), now.values())) == (factor > 1)


class Late:
    """An event. Copies of gradients arrive one after another."""

    def __init__(self, error: str = "") -> None:
        self.happened, self._error = threading.Event(), error

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        assert self.happened.wait(10)
        if self._error:
            raise RuntimeError(self._error)


@ranks.on(1, bare=True)
def test_gradients_of_16_bits_are_widened_in_the_thread_a_few_at_a_time(rank, world):
    events = [Late() for _ in range(9)]
    gradients = [torch.zeros(1000) for _ in events]
    begun: list[Widening] = []

    def bring(_: Tensor) -> None:
        for number, (event, gradient) in enumerate(zip(events, gradients, strict=True)):
            begun.append(Widening(torch.full([1000], number + 0.5, dtype=torch.bfloat16), event, gradient))

    reached = torch.ones(1, requires_grad=True)
    reached.register_hook(bring)
    bringing = threading.Thread(target=reached.sum().backward)
    bringing.start()
    bringing.join(0.2)
    assert len(begun) == 4, "memory for more is not taken before one of these is widened"
    for event in events:
        event.happened.set()
    bringing.join(10)
    for number, (widening, gradient) in enumerate(zip(begun, gradients, strict=True)):
        widening.synchronize()
        assert widening.query()
        assert gradient.unique().tolist() == [number + 0.5]
        assert gradient._version == 0, "only writes of others count"


@ranks.on(1, bare=True)
def test_what_goes_wrong_in_widening_is_raised_where_the_gradient_is_waited_for(rank, world):
    event = Late("the device was lost")
    event.happened.set()
    widening = Widening(torch.ones(3, dtype=torch.bfloat16), event, torch.zeros(3))
    with pytest.raises(RuntimeError, match="the device was lost"):
        widening.synchronize()


class Graphs:
    """A backend that counts what it is given to compile."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.number += 1
        return graph.forward


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@ranks.on(2)
def test_a_compiled_wrapper_is_not_compiled_anew_in_each_step_and_trains_to_the_same_bits(rank, world):
    weights, graphs = [], []
    for overlap in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        optimizer = zero.OSS(net.parameters(), AdamW, lr=0.05, offload=offload_of(2, overlap))
        model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=200)
        backend = Graphs()
        compiled: Any = torch.compile(model, backend=backend)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(compiled, rank, step).backward()
            optimizer.step()
        weights.append(model.state_dict())
        graphs.append(backend.number)
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    assert 0 < graphs[1] <= 2 * graphs[0], "of the first forward, and of those with something to wait for"


class Noted:
    begun = threading.Event()

    def step_part(self, part: Any) -> None:
        self.begun.set()
        super().step_part(part)  # type: ignore[misc]


@ranks.on(1, bare=True)
def test_the_thread_does_not_step_while_something_is_compiled(rank, world):
    """torch's optimizers would round otherwise."""
    model, optimizer = wrapped(3, OPTIMIZERS["adamw"], overlapping(3, Noted))
    loss_of(model, rank, 0).backward()
    with torch._dynamo.convert_frame.compile_lock:
        optimizer.step()
        assert not Noted.begun.wait(0.3)
    assert Noted.begun.wait(10)
