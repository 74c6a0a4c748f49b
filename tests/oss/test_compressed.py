"""broadcast_fp16 of OSS and reduce_fp16 of ShardedDDP, beside the same rounding done by hand."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import gpus
import matrix
import ranks
import zero
from models import take_step
from reference import MOMENTUM, Net, at_stage, built, loss_of, own_elements, same
from zero.oss.optimizer import set_bucket_size
from zero.plan.meter import Meter

DTYPES = {"fp16": (True, torch.float16), "bf16": (torch.bfloat16, torch.bfloat16)}
by_dtype = pytest.mark.parametrize("name", DTYPES)
CUTS = ["even", "whole"]


class Wide(nn.Module):
    """Has a gradient that is large enough to travel by itself, beside the odd ones of Net; one weight is unused."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.wide = nn.Linear(37, 3000)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        return torch.tanh(self.wide(self.net.first(inputs))).mean(1, keepdim=True) + self.net(inputs)


def rounded(value, dtype):
    return value.to(dtype).to(value.dtype)


# --------------------------------------------------------------------------------------------- Parameters after a step


@pytest.mark.parametrize(("optim", "options"), [(SGD, MOMENTUM), (Adam, {"lr": 0.01})])
@matrix.combined("name, cut, world", DTYPES, CUTS, [2, 3])
@ranks.on("world")
def test_others_get_rounded_values_and_the_owner_keeps_its_precision(rank, world, name, cut, optim, options):
    """Gradients are given, so that what was rounded in one step has no influence on the next gradient."""
    option, dtype = DTYPES[name]
    model, plain = built(), built()
    optimizer = zero.OSS(model.parameters(), optim, partition=cut, broadcast_fp16=option, **options)
    expected = optim(plain.parameters(), **options)
    frozen = model.frozen.detach().clone()
    for step in range(4):
        generator = gpus.generator(step)
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            if param.requires_grad:
                param.grad = torch.randn(param.shape, generator=generator)
                other.grad = param.grad.clone()
        optimizer.step()
        expected.step()
    lost = []
    for (what, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if param.requires_grad:
            precise = other.detach()
            # The plain optimizer's weights went on unrounded; SGD's decay and Adam read an owner's weights only.
            same(param.detach(), torch.where(own_elements(optimizer, param), precise, rounded(precise, dtype)), what)
            lost.append(not torch.equal(param.detach(), precise))
    same(model.frozen.detach(), frozen, "the frozen parameter")
    assert any(lost)


@matrix.combined("stage, world, name", [1, 2], [2, 3], DTYPES)
@ranks.on("world")
def test_half_as_many_bytes_are_gathered(rank, world, stage, name):
    option, dtype = DTYPES[name]
    (model, optimizer), (precise, other) = (
        at_stage(stage, built(), SGD, broadcast_fp16=sent, **MOMENTUM) for sent in (option, False)
    )
    gathered = []
    for each, its in ((model, optimizer), (precise, other)):
        loss_of(each, rank, 0).backward()
        before = zero.traffic()
        its.step()
        gathered.append((zero.traffic() - before).gather)
    for (what, param), whole in zip(model.module.named_parameters(), precise.module.parameters(), strict=True):
        own = own_elements(optimizer, param) | (not param.requires_grad)
        same(param.detach(), torch.where(own, whole.detach(), rounded(whole.detach(), dtype)), what)
    compressed, plain = gathered
    assert compressed > 0
    assert 2 * compressed == plain


@ranks.on(2)
def test_parameters_of_16_bits_are_sent_as_they_are(rank, world):
    finals, sent = [], []
    for dtype, option in [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float64, True)]:
        model = built(lambda: nn.Linear(64, 64)).to(dtype)
        optimizer = zero.OSS(model.parameters(), SGD, broadcast_fp16=option, **MOMENTUM)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        before = zero.traffic()
        optimizer.step()
        sent.append((zero.traffic() - before).gather)
        finals.append([param.detach() for param in model.parameters()])
    same(finals[1], finals[0], "weights of 16 bits")
    assert sent[0] == sent[1] == sent[2]


SIDE, LAYERS = 512, 8


def taken_for_a_moment(option):
    """Bytes that a step takes for a moment, over those of a bucket in 16 bits; each layer is a bucket."""
    with Meter() as memory:
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
        optimizer = zero.OSS(model.parameters(), SGD, broadcast_fp16=option, lr=0.1)
        set_bucket_size(optimizer, 0)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        taken = []
        for _ in range(3):  # the least counts: now and then a thread of Gloo drops its buffer a moment late
            optimizer.step()
            before = memory.live()
            memory.reset_peak()
            optimizer.step()
            taken.append(memory.peak() - before)
        return min(taken) / (2 * SIDE * SIDE)


@ranks.on(2)
def test_no_more_than_two_buckets_are_rounded_at_a_time(rank, world):
    assert 1 <= taken_for_a_moment(True) <= 2.2  # of 8; messages take the rest
    assert taken_for_a_moment(False) <= 0.2


# ----------------------------------------------------------------------------------------------------------- Gradients


def by_hand(world, step, dtype):
    """All ranks' gradients in one process, each rounded, added up in float32 in the order of ranks, averaged."""
    model = built(Wide)
    params = [param for param in model.parameters() if param.requires_grad]
    sums = [None] * len(params)
    for rank in range(world):
        gradients = torch.autograd.grad(loss_of(model, rank, step), params, allow_unused=True)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                gradient = gradient.to(dtype).float()
                sums[index] = gradient if sums[index] is None else sums[index] + gradient
    return model, params, [None if each is None else each * (1 / world) for each in sums]


@matrix.combined("world, cut, name", [2, 3, 4], CUTS, DTYPES)
@ranks.on("world")
def test_gradients_travel_rounded_and_are_added_up_in_float32(rank, world, name, cut):
    option, dtype = DTYPES[name]
    model = built(Wide)
    optimizer = zero.OSS(model.parameters(), SGD, partition=cut, lr=1.0)
    wrapped = zero.ShardedDDP(model, optimizer, reduce_fp16=option)
    before = zero.traffic()
    loss_of(wrapped, rank, 0).backward()
    reduced = (zero.traffic() - before).reduce
    optimizer.step()

    expected, params, gradients = by_hand(world, 0, dtype)
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            param.data -= gradient
    for (what, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        same(param.detach(), other.detach(), what)

    precise = built(Wide)
    plain = zero.ShardedDDP(precise, zero.OSS(precise.parameters(), SGD, partition=cut, lr=1.0))
    before = zero.traffic()
    loss_of(plain, rank, 0).backward()
    compressed, plain = reduced, (zero.traffic() - before).reduce
    assert compressed > 0
    assert 2 * compressed == plain


@by_dtype
@ranks.on(2)
def test_gradients_held_back_are_rounded_once(rank, world, name):
    """Under no_sync gradients add up unrounded; what is sent is the sum."""
    option, dtype = DTYPES[name]
    model = built(Wide)
    optimizer = zero.OSS(model.parameters(), SGD, lr=1.0)
    wrapped = zero.ShardedDDP(model, optimizer, reduce_fp16=option)
    with wrapped.no_sync():
        loss_of(wrapped, rank, 0).backward()
    loss_of(wrapped, rank, 1).backward()
    optimizer.step()

    expected = built(Wide)
    total = {}
    for peer in range(world):
        expected.zero_grad()
        loss_of(expected, peer, 0).backward()
        loss_of(expected, peer, 1).backward()
        for param in expected.parameters():
            if param.grad is not None:
                sent = param.grad.to(dtype).float()
                total[param] = total[param] + sent if param in total else sent
    for param, gradient in total.items():
        param.data -= gradient * (1 / world)
    for (what, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        same(param.detach(), other.detach(), what)


@ranks.on(2)
def test_both_together_stay_close_to_plain_training(rank, world):
    """Together, for several steps: close to the plain training, and the ranks' copies agree to the rounding."""
    plain = at_stage(0, built(), SGD, **MOMENTUM)
    model = built()
    optimizer = zero.OSS(model.parameters(), SGD, broadcast_fp16=True, **MOMENTUM)
    sharded = zero.ShardedDDP(model, optimizer, reduce_fp16=True), optimizer
    for step in range(5):
        for each, its in (plain, sharded):
            take_step(its, loss_of(each, rank, step))
    for (what, param), other in zip(model.named_parameters(), plain[0].module.parameters(), strict=True):
        if param.numel():
            assert (param - other).abs().max() <= 2e-3 * other.abs().max() + 1e-4, what


# ------------------------------------------------------------------------------------------------- What cannot be sent


def _broadcast_as(rank, world, dtype):
    zero.OSS(built().parameters(), SGD, broadcast_fp16=dtype, lr=0.1)


def _reduce_as(rank, world, dtype):
    model = built()
    zero.ShardedDDP(model, zero.OSS(model.parameters(), SGD, lr=0.1), reduce_fp16=dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, "bf16"], ids=str)
@pytest.mark.parametrize("build", [_broadcast_as, _reduce_as])
def test_what_is_no_float_of_16_bits_is_refused_when_built(build, dtype):
    """As integers parameters and gradients would be cut off, and Gloo does not move floats of 8 bits."""
    option = "broadcast_fp16" if build is _broadcast_as else "reduce_fp16"
    ranks.expect_error(build, 2, ValueError, option, "float16", "bfloat16", args=(dtype,))
