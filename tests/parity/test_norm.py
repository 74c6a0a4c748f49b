"""Norms, clipping and loss scaling: what is told, and the step on what was clipped, are those of torch on a full copy.
Torch's own function, and other changes between backward and step, are rows of test_gradient_rows.py."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpus
import matrix
import ranks
import zero
from assertions import close, same
from optimizers import MOMENTUM
from rows import adam
from runs import SideBySide, at_stage, norm_of_gradients, on_mesh, sgd, stage_2, stage_3
from simulated.scenarios import net, ones, wrapped
from simulated.world import simulated
from transports import calling, in_turn
from zoo import FEATURES, OddNet, built, data, odd_batch, odd_loss

NORMS = (1.0, 2.0, 3.0, math.inf)


class Odd(OddNet):
    """With two elements in another dtype, which lie with one rank, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(7))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs)[:, :2] * self.wide


class Half(nn.ModuleList):
    """The first layer, which under whole cuts is all that the first rank has, is used by nobody."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 40) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self[1](inputs)


def one_weight() -> nn.Module:
    return nn.Linear(FEATURES, 3, bias=False)


def stage_1(model: nn.Module, optim: Any, **options: Any) -> Any:
    optimizer = zero.OSS(model.parameters(), optim, **options)
    return DistributedDataParallel(model, find_unused_parameters=True), optimizer


WHOLE = {"partition": "whole"}
PLACES: dict[str, tuple[int, Any, dict[str, Any], Callable[[], nn.Module]]] = {
    "stage 1": (2, stage_1, {}, Odd),
    "stage 1 whole": (2, stage_1, WHOLE, Odd),
    "stage 1 half used": (2, stage_1, WHOLE, Half),
    "stage 1 on three": (3, stage_1, WHOLE, Odd),
    "stage 2": (2, stage_2, {}, Odd),
    "stage 2 in small buckets": (2, stage_2, {"bucket": 50}, Odd),
    "stage 2 whole": (2, stage_2, WHOLE, Odd),
    "stage 2 half used": (2, stage_2, WHOLE, Half),
    "stage 2 of one weight": (2, stage_2, WHOLE, one_weight),
    "stage 2 on three": (3, stage_2, {}, Odd),
    "stage 3": (2, stage_3, {}, Odd),
    "stage 3 whole": (3, stage_3, WHOLE, Odd),
    "stage 3 half used": (2, stage_3, WHOLE, Half),
    "stage 3 of one weight": (2, stage_3, WHOLE, one_weight),
    "stage 3 on three": (3, stage_3, {}, Odd),
    "stage 3 kept": (2, stage_3, {"sharding_strategy": "SHARD_GRAD_OP"}, Odd),
    "stage 3 not sharded": (2, stage_3, {"sharding_strategy": "NO_SHARD"}, Odd),
    "stage 3 in two replicas": (2, stage_3, {"replicas": 2}, Odd),
    "stage 3 in replicas of two": (4, stage_3, {"replicas": 2}, Odd),
}


def clipped(both: SideBySide, norm_type: float) -> float:
    """Both to a norm that is less than theirs; the norm that both told."""
    both.give_averages()
    # torch refuses the largest of no elements
    some = [[param for param in one.parameters() if param.numel()] for one in (both.plain, both.model)]
    expected, norm = (clip_grad_norm_(params, 0.01, norm_type) for params in some)
    assert expected > 0.02, "nothing would be clipped"
    assert norm.dim() == 0 and norm.item() == pytest.approx(expected.item(), rel=2e-6), f"norm {norm_type}"
    return norm.item()


def scale(both: SideBySide, factor: float) -> None:
    """By hand, what the optimizers step by."""
    part = both.optimizer.part if isinstance(both.model, zero.ShardedDDP) else lambda param: param
    both.give_averages()
    for param in (*map(part, both.model.parameters()), *both.plain.parameters()):
        if param.grad is not None:
            param.grad.mul_(factor)


def told(rank: int, world: int, name: str) -> list[float]:
    _, stage, options, make = PLACES[name]
    both = SideBySide(built(make), partial(stage, **on_mesh(world, options)), sgd, tolerance=2e-6)
    norms = []
    for step, norm_type in enumerate(NORMS):
        both.zero_grad()
        both.backward(partial(odd_loss, rank=rank, step=step))
        norms.append(clipped(both, norm_type))
        if step == 1:  # in the middle of an accumulation: what comes later is added to what is clipped
            both.backward(partial(odd_loss, rank=rank, step=9))
        if step == 2:
            scale(both, 8)
        if step in (1, 2):
            norms.append(clipped(both, norm_type))
        both.update()
    return norms


QUICK = {"stage 1", "stage 2 whole", "stage 3"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in PLACES])
def test_norm_and_steps_are_those_of_torch_on_the_full_model(name):
    """Of replicas, one counts."""
    world, *_ = PLACES[name]
    each = ranks.run(told, world, args=(name,))
    assert all(norms == each[0] for norms in each), "the norm is the same number on every rank"


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(3)
def test_the_norm_is_that_of_the_group_not_of_the_job(rank, world, stage):
    group = dist.new_group([0, 2])
    if rank != 1:
        each = [at_stage(at, built(), SGD, group, **MOMENTUM) for at in (0, stage)]
        for model, _ in each:
            odd_loss(model, rank, 0).backward()
        norms = [norm_of_gradients(model).item() for model, _ in each]
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "precision"), [(1, None), (1, "bf16"), (2, None), (2, "bf16"), (3, None), (3, "bf16")]
)
@ranks.on(2)
def test_norms_of_bfloat16_are_computed_in_float32(rank, world, stage, precision):
    plain, net = (built(lambda: nn.Linear(40, 40, bias=False).bfloat16()) for _ in range(2))
    model, _ = zero.setup(net.float() if precision else net, sgd, stage=stage, precision=precision)
    for one in (plain, model):
        one(data(8, 40, rank=0).bfloat16()).float().square().sum().backward()
    for norm_type in (1.0, 2.0):
        expected = plain.weight.grad.float().norm(norm_type).item()
        # Where gradients are bfloat16, torch's norm of them is rounded to it.
        rel = 1e-5 if precision else 4e-3
        assert norm_of_gradients(model, norm_type).item() == pytest.approx(expected, rel=rel)
    clip_grad_norm_(model.parameters(), expected / 64)
    assert norm_of_gradients(model).item() == pytest.approx(expected / 64, rel=1e-3 if precision else 8e-3)


class Reading(TorchDispatchMode):
    """Whether a norm is computed of any of these tensors in here."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.of, self.found = {one.data_ptr() for one in tensors if one.numel()}, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        self.found |= "norm" in str(func) and any(one.data_ptr() in self.of for one in told)
        return func(*args, **kwargs or {})


def by_data(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        gradient.data.mul_(3)


WRITES: dict[str, Any] = {
    "untouched": lambda gradients: None,
    "scaled": lambda gradients: torch._foreach_mul_(gradients, 3),
    "scaled by .data": by_data,
    "one element": lambda gradients: gradients[0].view(-1)[-1:].fill_(7),
}


@gpus.cpu_only("the GPU is a simulated one")
@matrix.combined("written, stage, dtype", WRITES, [2, 3], [torch.float32, torch.bfloat16])
def test_offloaded_gradients_are_read_for_their_norm_only_if_somebody_wrote(stage, written, dtype):
    """It is computed on the device before they leave it. Short ones are not written, either, when they are clipped."""
    with simulated() as there:
        module, comm = net().to(dtype), there.comm(0, 1)
        if stage == 3:
            model, optimizer = wrapped(module, comm, offload=zero.CPUOffload())
        else:
            optimizer = zero.OSS(module.parameters(), sgd, comm, offload=zero.CPUOffload())
            model = zero.ShardedDDP(module, optimizer)
        part = optimizer.part if stage == 2 else lambda param: param
        for norm_type, backwards in ((2.0, 1), (1.0, 1), (math.inf, 1), (2.0, 2)):
            optimizer.zero_grad()
            for _ in range(backwards):
                model(ones(model)).sum().backward()
            gradients = [
                grad for param in model.parameters() if (grad := part(param).grad) is not None and grad.numel()
            ]
            WRITES[written](gradients)
            with Reading(gradients) as reading:
                norm = clip_grad_norm_(model.parameters(), 1e9, norm_type)
            known = stage == 2 and written == "untouched" and backwards == 1 and norm_type == 2
            assert reading.found == (not known)  # alone at stage 3 gradients are plain tensors
            expected = torch.cat([grad.double().flatten() for grad in gradients]).norm(norm_type)
            assert norm.item() == pytest.approx(expected.item(), rel=1e-5 if dtype == torch.float32 else 5e-3)
            optimizer.step()


# An overflow on one rank skips the step on all: what is trained with a loss scale is, bit for bit, what is trained
# at the same place without one and without that step. Scales are powers of two.


SCALE = {"init_scale": 2.0**8, "growth_interval": 2}
STEPS, BAD = 5, 2  # in step BAD one element of one rank's gradient is infinite
GROWN, SHRUNK = [256, 512, 512, 1024, 1024], [256, 512, 256, 256, 512]  # the scales after each step


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 40))


OFFLOADED, FP16 = {"offload": zero.CPUOffload(pin_memory=False)}, {"precision": "fp16"}
OVERFLOWING: dict[str, tuple[int, Any, Any, dict[str, Any]]] = {
    "nothing sharded": (0, layers, sgd, {}),
    "stage 1": (1, layers, sgd, {}),
    "stage 1 whole": (1, layers, adam, WHOLE),
    "stage 1 whole of one weight": (1, one_weight, sgd, WHOLE),
    "stage 1 in float16": (1, layers, sgd, FP16),
    "stage 1 offloaded": (1, layers, adam, OFFLOADED),
    "stage 2": (2, layers, adam, {}),
    "stage 2 whole": (2, layers, sgd, WHOLE),
    "stage 2 whole of one weight": (2, one_weight, sgd, WHOLE),
    "stage 2 in float16": (2, layers, sgd, FP16),
    "stage 2 offloaded": (2, layers, sgd, OFFLOADED),
    "stage 3": (3, layers, sgd, {}),
    "stage 3 whole": (3, layers, adam, WHOLE),
    "stage 3 whole of one weight": (3, one_weight, sgd, WHOLE),
    "stage 3 in float16": (3, layers, sgd, FP16),
    "stage 3 offloaded": (3, layers, adam, OFFLOADED),
    "stage 3 hybrid": (3, layers, sgd, {"replicas": 2}),
}


def at(place: str, world: int) -> tuple[nn.Module, Any]:
    stage, make, optim, options = OVERFLOWING[place]
    if stage == 3:
        return stage_3(built(make), optim, **on_mesh(world, options))
    return zero.setup(built(make), optim, stage=stage, **options)


def spoil(gradient: Tensor) -> Tensor:
    """The last element, of which one rank alone has a shard, is infinite."""
    gradient = gradient.clone()
    gradient.view(-1)[-1] = torch.inf
    return gradient


def train(
    rank: int, world: int, place: str, scaler: Any = None, spoiler: int | None = None, clips: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """Losses and weights, and scales. Without a scaler the bad step is left out."""
    model, optimizer = at(place, world)
    told, scales = {}, []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(odd_batch(rank, step).to(next(model.parameters()).dtype)).float().square().mean()
        told[f"loss {step}"] = loss.detach()
        bad = spoiler is not None and step == BAD
        hook = next(model.parameters()).register_hook(spoil) if bad and rank == spoiler and scaler else None
        (scaler.scale(loss) if scaler else loss).backward()
        if hook:
            hook.remove()
        if clips:
            scaler and scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.05)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        elif not bad:
            optimizer.step()
    return told | zero.full_state_dict(model, to=None), scales


def beside_none(rank: int, world: int, place: str, clips: bool) -> None:
    without = {bad: train(rank, world, place, None, bad, clips)[0] for bad in (None, 0)}
    for spoiler in (None, *([*range(world)] if matrix.WHOLE else [world - 1])):
        scaler = torch.amp.GradScaler(gpus.DEVICE, **SCALE)
        found, scales = train(rank, world, place, scaler, spoiler, clips)
        assert scales == (GROWN if spoiler is None else SHRUNK)
        tolerance = 2e-3 if "16" in place else 0.0  # small gradients are none without a scale
        for name, expected in without[None if spoiler is None else 0].items():
            assert close(found[name], expected, tolerance), f"{name} with an infinite gradient on rank {spoiler}"


QUICK_OVERFLOWS = {"stage 1", "stage 2 whole of one weight", "stage 3"}
LEFT_OUT = {"stage 1 whole", "stage 1 offloaded", "stage 2", "stage 3 whole"}
"""Of the suite; `make matrix` has them."""
CASES = [
    pytest.param(name, in_turn(number), marks=[] if name in QUICK_OVERFLOWS else pytest.mark.slow)
    for number, name in enumerate(OVERFLOWING)
    if matrix.WHOLE or name not in LEFT_OUT
]


@pytest.mark.matrix
@pytest.mark.parametrize(("place", "transport"), CASES)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(place, transport):
    ranks.run(calling, args=(transport, beside_none, place, False))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["stage 1", "stage 2", "stage 3"])
def test_so_it_is_after_clipping_on_three_ranks(place):
    ranks.run(beside_none, 3, args=(place, True))


@pytest.mark.parametrize("place", ["stage 1", "stage 2", "stage 3"])
@ranks.on(2)
def test_disabled_it_does_nothing(rank, world, place):
    found, scales = train(rank, world, place, torch.amp.GradScaler(gpus.DEVICE, enabled=False))
    same(found, train(rank, world, place)[0], "losses and weights")
    assert scales == [1.0] * STEPS
