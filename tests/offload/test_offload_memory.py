"""Bytes between device and CPU in a settled step with CPUOffload, bytes that each holds, and the numbers: on the
simulated GPU. The bytes are those that docs/precision_and_memory.md has for this rank's shards, and nothing else."""

import gc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Adam

import assertions
import gpus
import matrix
import zero
from inner import set_bucket_size
from optimizers import ELEMENTWISE
from simulated.memory import FROM_CPU, NUMBERS, TO_CPU, Race
from simulated.scenarios import HALF, SCENARIOS, WORLD, block, built, in_two_backwards, ones, sgd, step, with_clipping
from simulated.world import Simulated, pinning, simulated, small_pieces
from zero.comm.streams import PinnedMemory
from zero.offload import digest
from zoo import Block, Stack

pytestmark = gpus.cpu_only("the GPU is a simulated one")

WIDTH = 64
NUMEL = WIDTH * WIDTH
"""Of each of the four parameters. Nothing is padded: a quarter of it ends where a shard may end."""
OWNED = 4 * NUMEL // WORLD
FEW = 4096  # bytes of counts of steps, and of a sample of gradients
adam = partial(Adam, foreach=True)


class Matrix(Block):
    """A unit at stage 3."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Matrices(nn.Module):
    """Three blocks, and a parameter of the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Matrix(), Matrix(), Matrix())
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x.repeat(1, WIDTH // 8)))


def in_buckets(there: Simulated, stage: int, *, dtype: torch.dtype = torch.float32, **how: Any) -> tuple[Any, Any]:
    """Each parameter has a bucket at stages 1 and 2."""
    if stage == 3:
        return built(there, 3, Matrices(), **how)
    model, optimizer = built(there, 1, Matrices().to(dtype), **how)
    set_bucket_size(optimizer, NUMEL)
    return zero.ShardedDDP(model, optimizer) if stage == 2 else model, optimizer


def crossed(there: Simulated, model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes of one step after two. Nobody lists the parameters in between."""
    inputs = ones(model)
    for _ in range(3):
        there.memory.crossed.clear()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    return dict(there.memory.crossed)


SENT = [(1, torch.float32, WORLD, 4), (2, torch.float32, WORLD, 4), (2, torch.bfloat16, WORLD, 4)]
SENT += [(1, torch.bfloat16, WORLD, 4), (2, torch.bfloat16, 1, 4)]


@matrix.combined("case, ratio", SENT, [1.0, 0.5])
def test_gradients_go_to_the_cpu_and_stepped_shards_come_back_in_the_dtype_of_the_parameters(case, ratio):
    stage, dtype, world, leaving = case
    with simulated() as there:
        how = {"world": world, "offload": zero.CPUOffload(ratio=ratio)}
        found = crossed(there, *in_buckets(there, stage, dtype=dtype, **how))
    owned = ratio * 4 * NUMEL // world
    assert found == {TO_CPU: leaving * owned, FROM_CPU: dtype.itemsize * owned, NUMBERS: 4 * ratio}


@pytest.mark.parametrize(
    ("options", "ratio", "gathered", "world"),
    [
        ({"precision": HALF}, 1.0, 2 * 2 + 2, WORLD),  # what ran last and the root stay unsharded for backward
        ({"precision": HALF}, 1.0, 2 * 3 + 1, 1),  # the block that ran last does not
        ({"reshard_after_forward": False}, 1.0, 4, WORLD),
        ({}, 0.5, 2 + 1, WORLD),  # of two units, of which one stays unsharded for backward
    ],
    ids=["16 bits", "one rank", "kept", "half"],
)
def test_at_stage_3_shards_go_to_the_device_for_forward_and_for_backward(options, ratio, gathered, world):
    """In float32 also where the device computes in 16 bits.

    gathered: units, some of them twice, in multiples of float32's bytes.
    """
    with simulated() as there:
        home = zero.CPUOffload(ratio=ratio)
        found = crossed(there, *in_buckets(there, 3, world=world, offload=home, **options))
    assert found == {TO_CPU: 4 * ratio * 4 * NUMEL // world, FROM_CPU: 4 * gathered * NUMEL // world}


@matrix.combined("stage, ratio", [1, 2, 3], [1.0, 0.5])
def test_with_adam_the_cpu_holds_16_bytes_of_an_element_that_a_rank_owns(stage, ratio):
    """4 of what is stepped, 8 of Adam's state, and 4 of the gradient: at stage 1 only during the step. Of what is not
    offloaded, the device holds shards at stage 3 and the state."""
    with simulated() as there:
        memory = there.memory
        model, optimizer = in_buckets(there, stage, optim=adam, offload=zero.CPUOffload(ratio=ratio))
        step(model, optimizer)
        optimizer.zero_grad()
        at_rest, on_device = memory.on_cpu(), memory.on_device()
        model(torch.ones(2, 8)).sum().backward()
        before_step = memory.on_cpu()
        memory.reset_peaks()
        optimizer.step()
        in_step, after_step = memory.peaks()[1], memory.on_cpu()
    offloaded, stays = ratio * OWNED, (1 - ratio) * OWNED
    assert 12 * offloaded <= at_rest < 12 * offloaded + FEW
    held = 12 * stays if stage == 3 else 16 * NUMEL + 8 * stays
    assert held <= on_device < held + FEW
    gradients = 0 if stage == 1 else 4 * offloaded
    for when in (before_step, after_step):
        assert gradients <= when - at_rest < gradients + FEW
    computing = 4 * (offloaded if stage == 3 else NUMEL // WORLD)  # as many values again as torch steps at once
    assert 16 * offloaded <= in_step < 16 * offloaded + computing + FEW


def with_a_closure(model: nn.Module, optimizer: Any) -> None:
    """The optimizer steps all at once."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(ones(model)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    step(model, optimizer)


def with_written_weights(model: nn.Module, optimizer: Any) -> None:
    """Written so that some sum over the weights would not tell."""
    for number in range(4):
        step(model, optimizer)
        for values in (param.data.view(-1) for param in model.parameters() if param.numel() > 3):
            if number < 2:
                values.mul_(2 if number else -1)
            else:
                values[[0, -1]] = values[[-1, 0]] if number == 2 else values[[0, -1]] + values.new_tensor([0, 1])


LOOPS = [with_clipping, in_two_backwards, with_a_closure]


def trained(
    stage: int, take: Any, dtype: torch.dtype, world: int = 1, optim: Any = sgd, **options: Any
) -> list[Tensor]:
    torch.manual_seed(0)
    if dtype != torch.float32:
        options["precision"] = HALF
    with simulated() as there:
        module = Stack(block, 8, 3, blocks=2).to(dtype if stage < 3 else torch.float32)
        model, optimizer = built(there, stage, module, world=world, optim=optim, **options)
        for _ in range(2):
            take(model, optimizer)
        return [assertions.plain(param.detach().clone()) for param in model.parameters()]


LOOPED = [(stage, take) for stage in (1, 2, 3) for take in LOOPS if stage > 1 or take is not in_two_backwards]


@pytest.mark.slow
@matrix.combined("case, dtype", [*LOOPED, (2, with_written_weights)], [torch.float32, torch.bfloat16])
def test_training_with_offload_has_the_same_bits(case, dtype):
    """In 16 bits gradients leave the device so, and add up over backwards in float32, as there."""
    stage, take = case
    given = (None, zero.CPUOffload(ratio=1.0 if stage == 1 else 0.6))
    # Alone at stage 3 torch clips plain gradients, by a number that is taken to be on the device.
    world = 2 if case == (3, with_clipping) else 1
    plain, offloaded = (trained(stage, take, dtype, world=world, offload=offload) for offload in given)
    assert all(torch.equal(*pair) for pair in zip(plain, offloaded, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"partition": "whole"}], ids=str)
def test_so_it_has_with_options_of_stage_3_and_optimizers_that_are_not_elementwise(options):
    optim = partial(Adafactor, lr=0.01, foreach=True) if "partition" in options else adam
    given = (None, zero.CPUOffload())
    plain, offloaded = (trained(3, step, torch.float32, WORLD, optim, offload=offload, **options) for offload in given)
    assert all(torch.equal(*pair) for pair in zip(plain, offloaded, strict=True))


def test_pinned_memory_has_the_size_of_its_tensors_is_used_again_and_given_back():
    """torch's own allocator takes the next power of two."""
    numel = 2**18 + 512
    with simulated() as there, pinning() as runtime:
        layer = nn.Sequential(nn.Linear(8, numel // 8, bias=False))
        model, optimizer = built(there, 3, layer, world=1, offload=zero.CPUOffload())
        for _ in range(3):
            step(model, optimizer)
            sizes = [call.args[1] for call in runtime.cudaHostRegister.call_args_list]
            assert sizes == [4 * numel, 4 * numel], "of the shard and its gradient"
        still_there: list[bool] = []
        runtime.cudaHostUnregister.side_effect = lambda address: still_there.append(is_mapped(address))
        del model, optimizer, layer
        gc.collect()
        assert still_there == [True, True]


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in bounds)


@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.bfloat16), (1, torch.float32), (2, torch.bfloat16)])
def test_no_pinned_memory_is_kept_longer_than_what_it_is_for(stage, dtype):
    """Least of all by what each device has one of."""
    with simulated() as there, pinning() as runtime:
        layer = nn.Sequential(nn.Linear(8, 2**17, bias=False)).to(dtype)
        model, optimizer = built(there, stage, layer, world=1, offload=zero.CPUOffload())
        for _ in range(2):
            step(model, optimizer)
        del model, optimizer, layer
        gc.collect()
        assert runtime.cudaHostUnregister.call_count == runtime.cudaHostRegister.call_count == 2


def test_memory_that_cannot_be_pinned_is_an_error_with_the_remedy():
    with simulated() as there, pinning() as runtime:
        runtime.cudaHostRegister.return_value = 2
        with pytest.raises(RuntimeError, match=r"4096 bytes .*ulimit.*pin_memory=False"):
            in_buckets(there, 3, offload=zero.CPUOffload())
        in_buckets(there, 3, offload=zero.CPUOffload(pin_memory=False))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("then", "told"), [("again", "reads: nothing says which"), ("given back", "still reads or")])
def test_pinned_memory_is_free_once_the_host_has_waited_for_the_copy_that_reads_it(then, told, waits):
    with pytest.raises(Race, match=told) if not waits else nullcontext(), simulated() as there, pinning(there):
        memory, on_gpu = PinnedMemory(), torch.ones(NUMEL)
        first = memory.empty([NUMEL], torch.float32).fill_(1)
        on_gpu.copy_(first, non_blocking=True)
        if waits:
            there.device.current_stream().record_event().synchronize()
        del first
        if then == "again":
            memory.empty([NUMEL], torch.float32).fill_(2)
        del memory


OFFLOADED = [name for name in SCENARIOS if "offloaded" in name]


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", OFFLOADED if matrix.WHOLE else OFFLOADED[::3])
def test_so_it_is_at_every_stage_also_where_little_is_copied(scenario):
    with simulated() as there, pinning(there) as runtime, mock.patch("zero.comm.streams._EXACT", 1):
        SCENARIOS[scenario](there)
        gc.collect()
        assert runtime.cudaHostRegister.called


# Steps of offloaded shards piece by piece are those of whole tensors, bit for bit.


PIECE = 128
OPTIMIZERS: dict[str, Any] = {
    **{name: partial(optim, **options) for name, (optim, options) in ELEMENTWISE.items()},
    "fused": partial(Adam, lr=0.01, fused=True),
    "foreach": partial(Adam, lr=0.01, foreach=True),
}


@pytest.fixture
def in_small_pieces():
    with small_pieces(PIECE):
        yield


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Some are longer than a piece and not a multiple of one, others fit into one together; of one the elements lie in
    another order than those of its gradients."""
    torch.manual_seed(0)
    values = [torch.randn(40, 50), torch.randn(7), torch.randn(()), torch.randn(8, 4, 3, 3), torch.randn(13)]
    values[3] = values[3].to(memory_format=torch.channels_last)
    return [nn.Parameter(one.to(dtype)) for one in [*values, torch.randn(2 * PIECE)]]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 0.05}, {"params": params[2:]}]


@pytest.mark.usefixtures("in_small_pieces")
@matrix.combined("name, dtype", OPTIMIZERS, [torch.float32, torch.bfloat16])
def test_each_optimizer_steps_pieces_as_it_steps_all(name, dtype):
    optim = OPTIMIZERS[name]
    params, whole = parameters(dtype), parameters(dtype)
    stepped = [nn.Parameter(param.float()) for param in whole]
    ours, plain = zero.OSS(groups(params), optim, offload=zero.CPUOffload()), optim(groups(stepped))
    for turn in range(3):
        for number, (param, master) in enumerate(zip(params, stepped, strict=True)):
            if number == 4 or number == 1 + turn:  # one never has gradients, and one not in this step
                param.grad = master.grad = None
            else:
                param.grad = torch.randn(param.shape, dtype=dtype)
                master.grad = torch.empty_like(master).copy_(param.grad)  # torch's fused kernels need one order
        for one in (ours, plain):
            one.param_groups[0]["lr"] = 0.05 / (1 + turn)
            one.step()
        for param, master in zip(params, stepped, strict=True):
            assert torch.equal(param, master.to(dtype))
    states = [plain.state[master] for master in stepped], [ours.optim.state[ours.part(param)] for param in params]
    for expected, found in zip(*states, strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)


@pytest.mark.usefixtures("in_small_pieces")
def test_a_step_that_a_scaler_skips_leaves_each_piece_as_it_was():
    params = parameters(torch.bfloat16)
    optimizer = zero.OSS(params, partial(Adam, fused=True), offload=zero.CPUOffload())
    for found_inf in (0.0, 1.0, 0.0):
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.optim.grad_scale, optimizer.optim.found_inf = torch.tensor(1.0), torch.tensor(found_inf)
        optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(before, params, strict=True)) == bool(found_inf)
    counts = [state["step"].item() for state in optimizer.optim.state.values()]
    assert counts == [2] * len(params)


# Digests tell any write, and cost a GPU little beside the copies of a step.


def written(to: Tensor, how: str) -> None:
    """How many elements are written, and that some sums over them stay the same."""
    if how == "the last":
        to[-1:].neg_()
    elif how == "two signs":
        to[[5, 900]] = -to[[5, 900]]
    else:
        first, second = (0, 1) if how == "neighbours" else (3, 703)
        to[[first, second]] = to[[second, first]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("how", ["the last", "two signs", "neighbours", "far apart"])
def test_any_write_is_told(dtype, how):
    """Also where neither beginning nor end is that of a word, and in chunks."""
    flat = torch.randn(1004, dtype=dtype)[3:]
    with mock.patch("zero.offload._CHUNK", 64 * flat.element_size()):
        before = digest(flat)
        assert digest(flat.clone()) == before
        written(flat, how)
        assert digest(flat) != before


@pytest.mark.parametrize("ratio", [0, -1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio="):
        zero.CPUOffload(ratio=ratio)
