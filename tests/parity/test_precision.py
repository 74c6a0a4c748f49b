"""zero.setup(precision=): stages 1 to 3 train to the same numbers, bit for bit: those of a few lines of torch that keep
float32 weights, compute with rounded ones, and average float32 gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

import gpus
import matrix
import ranks
import zero
from assertions import close, same
from precisions import OPTIMIZERS, Block, ByHand, Loop, Net, loss_of, masters, parameters, unlike
from runs import average_gradients
from transports import TRANSPORTS, by
from zoo import WIDTH, batch

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = {"bf16": BF16, "fp16": FP16}


# ------------------------------------------------------------------------------------------------- the same numbers


@matrix.combined("stage, precision, transport, name", [1, 2, 3], DTYPES, TRANSPORTS, OPTIMIZERS)
@ranks.on(2)
def test_stages_train_to_the_numbers_by_hand(rank, world, stage, precision, transport, name):
    expected, optim, loop = Net(), OPTIMIZERS[name], Loop(rank)
    wanted = loop.by_hand(expected, optim(expected.parameters()), DTYPES[precision])
    with by(transport):
        model, optimizer = zero.setup(unlike(rank), optim, stage=stage, precision=precision)
        assert loop.at_stage(model, optimizer) == wanted
        found = masters(model, optimizer)
    same(found, parameters(expected), "the masters")
    weights = zero.full_state_dict(model, to=None)
    if rank == 0:  # whose buffers count
        buffers = dict(expected.named_buffers())
        same({name: weights[name] for name in buffers}, buffers, "the buffers")
    state = zero.full_optimizer_state_dict(model, optimizer, to=None)["state"]
    moments = [value for of in state.values() for value in of.values() if isinstance(value, Tensor) and value.dim()]
    assert {value.dtype for value in [*moments, *found.values()]} == {torch.float32}


BESIDE: dict[str, tuple[Callable[[Path], dict[str, Any]], float | None, str]] = {
    # options, a loss scale, a transport
    "on the CPU": (lambda _: {"offload": zero.CPUOffload()}, None, TRANSPORTS[0]),
    "on disk": (lambda folder: {"offload": zero.DiskOffload(folder / "shards")}, None, TRANSPORTS[0]),
    "whole": (lambda _: {"partition": "whole"}, None, TRANSPORTS[0]),
    "float16 with a scaler": (lambda _: {"precision": "fp16"}, 2.0**16, TRANSPORTS[0]),
    "float16 with a scaler, overlapping": (lambda _: {"precision": "fp16"}, 2.0**16, "overlapping"),
}


@gpus.cpu_only("the reference is stepped on the GPU")
@matrix.combined("stage, beside", [1, 2, 3], BESIDE, each=4)
@ranks.on(2)
def test_with_offload_partitions_and_a_scaler(rank, world, stage, beside, tmp_path):
    expected, (options, scale, transport) = Net(), BESIDE[beside]
    given = {"precision": "bf16"} | options(tmp_path)
    optim, loop = OPTIMIZERS["adam"], Loop(rank, scale=scale)
    wanted = loop.by_hand(expected, optim(expected.parameters()), DTYPES[given["precision"]])
    with by(transport):
        model, optimizer = zero.setup(Net(), optim, stage=stage, **given)
        assert loop.at_stage(model, optimizer) == wanted
        same(masters(model, optimizer), parameters(expected), "the masters")


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("precision", "scale"), [("bf16", None), ("fp16", None), ("fp16", 2.0**16)])
@ranks.on(2)
def test_clipped_numbers_are_those_by_hand_within_rounding(rank, world, precision, scale, foreach):
    """A norm is of gradients that are not rounded to 16 bits, and is summed in another order."""

    def loop() -> Loop:
        return Loop(rank, scale=scale, max_norm=0.1 if scale is None else 1e-5, foreach=foreach)

    expected, sgd, found = Net(), OPTIMIZERS["sgd"], []
    loop().by_hand(expected, sgd(expected.parameters()), DTYPES[precision])
    for stage in (1, 2, 3):
        model, optimizer = zero.setup(Net(), sgd, stage=stage, precision=precision)
        of_stage = loop()
        found.append([*of_stage.at_stage(model, optimizer), *of_stage.norms])
        stepped = masters(model, optimizer)
        assert all(close(stepped[name], value, 1e-6) for name, value in parameters(expected).items()), stage
    assert found[1] == pytest.approx(found[0], rel=1e-6) and found[2] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_units_of_a_policy_that_are_computed_again(rank, world, stage):
    """And an optimizer that was built, has state, and lacks what is frozen."""
    expected, net = Net(), Net()
    build = partial(SGD, lr=0.1, momentum=0.9)
    optimizers = [build([p for p in one.parameters() if p.requires_grad]) for one in (expected, net)]
    for one, optimizer in zip((expected, net), optimizers, strict=True):
        Loop(rank, range(2)).by_hand(one, optimizer, torch.bfloat16)
    units = ModuleWrapPolicy({Block})
    how = {"stage": stage, "precision": "bf16", "auto_wrap_policy": units}
    model, optimizer = zero.setup(_without_hooks(net), optimizers[1], **how)
    net.recomputed = True
    wanted = Loop(rank, range(2, 5)).by_hand(_without_hooks(expected), optimizers[0], torch.bfloat16)
    assert Loop(rank, range(2, 5)).at_stage(model, optimizer) == wanted
    trained = [name for name, param in net.named_parameters() if param.requires_grad]
    same(masters(model, optimizer, trained), {name: parameters(expected)[name] for name in trained}, "the masters")


def _without_hooks(net: nn.Module) -> nn.Module:
    for module in net.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return net


def alike(run: Callable[[nn.Module, Optimizer], object], optim: Any, **options: Any) -> dict[str, Tensor]:
    """What stages 1 to 3 step to, which is the same."""
    found = []
    for stage in (1, 2, 3):
        trained = zero.setup(Net(), optim, stage=stage, precision="bf16", **options)
        run(*trained)
        found.append(masters(*trained))
    same(found[1:], found[:1] * 2, "stages 2 and 3 beside stage 1")
    return found[0]


@ranks.on(2)
def test_accumulated_numbers_are_alike_at_all_stages_and_close_by_hand(rank, world):
    """Under no_sync autograd adds up, in the 16 bits in which it writes."""

    def accumulate(model: nn.Module, optimizer: Optimizer, average: Callable[[], None] = lambda: None) -> None:
        for step in range(2):
            optimizer.zero_grad()
            with zero.no_sync(model):
                loss_of(model, rank, 2 * step).backward()
            loss_of(model, rank, 2 * step + 1).backward()
            average()
            optimizer.step()

    expected, sgd = Net(), OPTIMIZERS["sgd"]
    accumulate(
        ByHand(expected).follow(zero.MixedPrecision(BF16)),
        sgd(expected.parameters()),
        lambda: average_gradients(expected),
    )
    found = alike(accumulate, sgd)
    assert all(close(found[name], value, 3e-2) for name, value in parameters(expected).items())


@ranks.on(2)
def test_stage_0_computes_under_autocast_within_its_forward_alone(rank, world):
    model, optimizer = zero.setup(Net(), OPTIMIZERS["sgd"], stage=0, precision="bf16")
    found = Loop(rank).at_stage(model, optimizer)
    assert model(batch(rank, 0)).dtype is torch.bfloat16
    expected, optimizer = zero.setup(Net(), OPTIMIZERS["sgd"], stage=3, precision="bf16")
    assert found == pytest.approx(Loop(rank).at_stage(expected, optimizer), rel=2e-2)
    with pytest.raises(RuntimeError):
        model(torch.ones(3, WIDTH + 1))
    assert not torch.is_autocast_enabled("cpu")


@ranks.on(2)
def test_fp32_is_float32(rank, world):
    expected = Net()
    wanted = Loop(rank).by_hand(expected, OPTIMIZERS["sgd"](expected.parameters()), torch.float32)
    for stage in range(4):
        model, optimizer = zero.setup(unlike(rank), OPTIMIZERS["sgd"], stage=stage, precision="fp32")
        assert Loop(rank).at_stage(model, optimizer) == wanted


# ------------------------------------------------------------------------------------------------- around training


@ranks.on(2)
def test_checkpoints_go_on_at_every_other_stage(rank, world, tmp_path):
    def setup(stage: int) -> tuple[nn.Module, Optimizer]:
        return zero.setup(Net(), OPTIMIZERS["adam"], stage=stage, precision="bf16")

    for stage in (1, 2, 3):
        model, optimizer = setup(stage)
        Loop(rank, range(2)).at_stage(model, optimizer)
        zero.checkpoint.save(tmp_path / str(stage), model, optimizer)
        wanted = Loop(rank, range(2, 4)).at_stage(model, optimizer)
        for other in (1, 2, 3):
            again, restored = setup(other)
            zero.checkpoint.load(tmp_path / str(stage), again, restored)
            assert Loop(rank, range(2, 4)).at_stage(again, restored) == wanted, f"from stage {stage} to {other}"
            same(masters(again, restored), masters(model, optimizer), "the masters")


WRITES: dict[str, Callable[[Tensor], object]] = {
    "a mask": lambda grad: grad.mul_((torch.arange(grad.numel()) % 2).reshape(grad.shape).to(grad.device)),
    "a row": lambda grad: grad[:1].zero_() if grad.dim() else None,
    "data": lambda grad: grad.data.copy_(torch.full(grad.shape, 0.125)),
    "other values": lambda grad: grad.copy_(torch.full(grad.shape, 0.25)),
}


@pytest.mark.parametrize("write", WRITES)
@ranks.on(2)
def test_what_is_written_into_gradients_at_stage_1_is_clipped_and_stepped(rank, world, write):
    """Not the average from before, of which each rank has its elements in float32 as well."""
    model, optimizer = zero.setup(Net(), SGD, stage=1, precision="bf16", lr=1.0)
    before, expected = masters(model, optimizer), {}
    loss_of(model, rank, 0).backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            WRITES[write](param.grad.detach_())
            expected[name] = before[name] - param.grad.as_subclass(Tensor).float() / 2
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
    optimizer.step()
    found = masters(model, optimizer)
    tolerance = 0.0 if write in ("data", "other values") else 1e-2
    assert all(close(found[name], value, tolerance) for name, value in expected.items())
    zeros = {name for name, value in expected.items() if torch.equal(value, before[name])}
    same({name: found[name] for name in zeros}, {name: before[name] for name in zeros}, "what was written to 0")


READS: list[Callable[[Tensor], Tensor]] = [
    lambda grad: (grad**2).sum(),
    torch.sum,
    lambda grad: grad.abs().max(),
    lambda grad: grad.flatten()[-1],
    lambda grad: grad.data.norm(),
]


@pytest.mark.parametrize("precision", DTYPES)
@ranks.on(2)
def test_ranks_read_the_same_of_a_gradient_at_stage_1(rank, world, precision):
    """Also once it was scaled, of which each rank has its own elements in float32."""
    model, _optimizer = zero.setup(Net(), SGD, stage=1, precision=precision, lr=1.0)
    loss_of(model, rank, 0).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for _ in range(2):
        found = [read(grad).item() for grad in grads for read in READS]
        on_ranks: list[Any] = [None] * world
        dist.all_gather_object(on_ranks, found)
        assert on_ranks == [found] * world
        clip_grad_norm_(model.parameters(), 0.1)


SCALED: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda grad: grad.mul_(0.3),
    "data": lambda grad: grad.data.mul_(0.3),
    "detached": lambda grad: grad.detach().mul_(0.3),
    "clamped": lambda grad: grad.data.clamp_(-0.01, 0.01),
}


@pytest.mark.parametrize("scaled", SCALED)
@ranks.on(2)
def test_gradients_are_scaled_in_float32_at_every_stage(rank, world, scaled):
    def scale(model: nn.Module, optimizer: Optimizer) -> None:
        loss_of(model, rank, 0).backward()
        for param in model.parameters():
            if param.grad is not None:
                SCALED[scaled](param.grad)
        optimizer.step()

    alike(scale, SGD, lr=1.0)


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_casts_end_with_the_wrapper(rank, world, stage):
    net, kept = Net(), []
    net.first.register_forward_pre_hook(lambda _, args: kept.append(args[0].dtype))
    model, optimizer = zero.setup(net, SGD, stage=stage, precision="bf16", lr=0.1)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    stepped = masters(model, optimizer)
    assert zero.unwrap(model) is net
    del model, optimizer
    gc.collect()
    same(parameters(net), stepped, "the masters")
    assert net(batch(rank, 0)).dtype is torch.float32
    assert kept == [torch.bfloat16, torch.float32]


def frozen_first() -> Net:
    net = Net()
    net.first.requires_grad_(False)
    return net


def trained_with_masters(rank: int, stage: int, optim: str, net: Net) -> tuple[dict[str, Tensor], Any, Any]:
    model, optimizer = zero.setup(net, OPTIMIZERS[optim], stage=stage, precision="bf16")
    Loop(rank).at_stage(model, optimizer)
    weights, state = zero.full_state_dict(model, to=None), zero.full_optimizer_state_dict(model, optimizer, to=None)
    return masters(model, optimizer), weights, state


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_masters_are_the_weights_where_no_masters_are_kept(rank, world, stage, optim, alone):
    """What is stepped is in the weights and goes with the state. One layer is frozen."""
    expected, weights, state = trained_with_masters(rank, stage, optim, frozen_first())
    for to in (0, 3):
        again, fresh = zero.setup(frozen_first(), OPTIMIZERS[optim], stage=to)
        given = (weights, state) if rank == 0 or not alone else (None, None)
        zero.load_full_state_dict(again, given[0])
        zero.load_full_optimizer_state_dict(again, fresh, given[1])
        found = zero.full_state_dict(again, to=None)
        same({name: found[name] for name in expected}, expected, f"at stage {to}")
        assert not any("zero_master" in of_one for of_one in fresh.state.values())


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_masters_change_no_parameters_that_other_ranks_have_as_well(rank, world, stage):
    """At stages 1 and 2 without masters: ranks would compute with other weights."""
    _, weights, state = trained_with_masters(rank, stage, "adam", Net())
    again, fresh = zero.setup(Net(), OPTIMIZERS["adam"], stage=stage)
    zero.load_full_state_dict(again, weights)
    zero.load_full_optimizer_state_dict(again, fresh, state)
    assert not any("zero_master" in of_one for of_one in fresh.state.values())
    for name, value in zero.full_state_dict(again, to=None).items():
        assert torch.equal(value, weights[name].to(value.dtype)), name


class Saves(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(
            lambda module, saved, *_: saved.update(seen=module.last.bias.detach().clone())
        )
        self.register_load_state_dict_pre_hook(lambda module, saved, *_: saved.pop("seen", None))


WAYS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "dict": zero.full_state_dict,
    "stream": lambda *a, **k: dict(zero.full_tensors(*a, **k)),
}


@matrix.combined("stage, kind, way, offload", [1, 2, 3], [Net, Saves], WAYS, [None, zero.CPUOffload()])
@ranks.on(2)
def test_full_weights_are_the_masters_and_are_loaded_into_them(rank, world, stage, kind, way, offload):
    """A hook of the user's sees them, too; what no optimizer has keeps its dtype; `dtype` rounds."""

    def at_stage(stage: int, name: str) -> tuple[nn.Module, Optimizer]:
        net = kind()
        optimizer = OPTIMIZERS[name]([param for param in net.parameters() if param.requires_grad])
        precision = zero.MixedPrecision(BF16, buffer_dtype=BF16)
        return zero.setup(net, optimizer, stage=stage, precision=precision, offload=offload)

    model, optimizer = at_stage(stage, "adam")
    Loop(rank).at_stage(model, optimizer)
    found = WAYS[way](model, to=None)
    trained = [name for name, param in Net().named_parameters() if param.requires_grad]
    stepped = masters(model, optimizer, trained)
    same({name: found[name] for name in trained}, stepped, "the masters")
    assert any(not torch.equal(value, value.bfloat16().float()) for value in stepped.values())
    assert {value.dtype for value in found.values() if value.is_floating_point()} == {torch.float32}
    if way == "dict" and kind is Saves:
        assert torch.equal(found.pop("seen"), found["last.bias"])
    rounded = WAYS[way](model, to=None, dtype=BF16)
    same(
        {name: rounded[name] for name in found},
        {n: v.bfloat16() if v.is_floating_point() else v for n, v in found.items()},
    )
    for alone in (False, True):
        given = found if way == "dict" else found.items()
        for other in (1, 2, 3):
            again, fresh = at_stage(other, "sgd")
            zero.load_full_state_dict(again, given if rank == 0 or not alone else None)
            seen = zero.full_state_dict(again, to=None)
            same({name: seen[name] for name in trained}, stepped, f"from stage {stage} to {other}")
            assert Loop(rank).at_stage(again, fresh)


def alone(rank: int, world: int, stage: int | None) -> list[float]:
    net, optim = Net(), OPTIMIZERS["adam"]
    if stage is None:
        return Loop(0).by_hand(net, optim(net.parameters()), BF16)
    return Loop(0).at_stage(*zero.setup(net, optim, stage=stage, precision="bf16"))


def test_one_process_trains_alone_to_the_same_numbers():
    wanted, zeroth, *others = (ranks.run(alone, bare=True, args=(stage,))[0] for stage in (None, 0, 1, 2, 3))
    assert others == [wanted] * 3 and zeroth == pytest.approx(wanted, rel=2e-2)


AS = {"precision='bf16'": "bf16", "sent in 16 bits": zero.MixedPrecision(reduce_dtype=BF16)}


@pytest.mark.parametrize("precision", AS.values(), ids=AS)
@ranks.on(2)
def test_gradients_that_several_backwards_send_add_up_in_float32(rank, world, precision):
    found = []
    for stage in (3, 2, 1):
        torch.manual_seed(0)
        model, optimizer = zero.setup(Net(), SGD, stage=stage, lr=0.1, precision=precision)
        for number in range(6):
            loss_of(model, rank, number).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(zero.full_state_dict(model, to=None))
        same(found[-1], found[0], f"the weights of stage {stage}")


# ---------------------------------------------------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[Any, Callable[[nn.Module], nn.Module], str]] = {
    "an unknown precision": ("half", nn.Module.float, "Pass 'fp32', 'bf16', 'fp16', a dtype, or a policy"),
    "one that is misspelt": ("bf61", nn.Module.float, "Write precision='bf16'"),
    "a dtype of another width": (torch.float64, nn.Module.float, "precision=torch.float64 is unknown"),
    "a model in 16 bits": (BF16, nn.Module.bfloat16, "'first.weight' is torch.bfloat16"),
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("precision", "change", "words"), REFUSED.values(), ids=REFUSED)
@ranks.raises(2, ValueError)
def test_what_contradicts_is_refused_on_every_rank(rank, world, precision, change, words, stage):
    zero.setup(change(Net()), SGD, stage=stage, lr=0.1, precision=precision)


@pytest.mark.parametrize("kind", [Net, Saves])
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.raises(2, RuntimeError, "MPS", timeout=15)
def test_a_recipient_without_that_device_is_told_to_all_who_would_send(rank, world, stage, kind):
    model, _optimizer = zero.setup(kind(), SGD, stage=stage, lr=0.1, precision="bf16")
    zero.full_state_dict(model, device="mps")


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, ValueError, "param_dtype=torch.float16", "param_dtype=torch.bfloat16", timeout=15)
def test_precisions_that_differ_between_ranks_are_refused(rank, world, stage):
    zero.setup(Net(), SGD, stage=stage, lr=0.1, precision=("bf16", "fp16")[rank])
