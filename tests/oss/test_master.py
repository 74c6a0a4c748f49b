"""Float32 masters of 16-bit parameters, beside a plain loop in one process that keeps masters by hand."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import gpus
import matrix
import ranks
import zero
from models import take_step
from reference import FEATURES, at_stage, batch, built, same

OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.01, momentum=0.9, weight_decay=0.01),
    "adam": partial(Adam, lr=1e-3, weight_decay=0.01),
    "stateless": partial(SGD, lr=0.01),
}
CUTS = ["even", "whole"]
AT = [(stage, cut) for stage in (1, 2) for cut in CUTS]


class Half(nn.Module):
    """Matrices of 16 bits, and norms of 32, as many keep them."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.first = nn.Linear(FEATURES, 37).to(dtype)
        self.norm = nn.LayerNorm(37)
        self.gain = nn.Parameter(torch.tensor(1.0, dtype=dtype))
        self.last = nn.Linear(37, 11).to(dtype)
        self.frozen = nn.Parameter(torch.randn(11).to(dtype), requires_grad=False)

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs.to(self.first.weight.dtype)).float())
        return self.last(torch.tanh(hidden).to(self.first.weight.dtype)) * self.gain + self.frozen


def loss_of(model, rank, step):
    return (model(batch(rank, step)).float() - 1).square().mean()


class ByHand:
    """All ranks' batches in one process; a step of the plain optimizer on float32 masters, which are then rounded.

    averaged: "first" as DistributedDataParallel does it, in the gradients' own dtype; "wide" in float32, rank by rank.
    """

    def __init__(self, model, optim, world, averaged):
        self.model, self.world, self.averaged = model, world, averaged
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = optim(self.masters)

    def step(self, number):
        gradients = []
        for rank in range(self.world):
            loss = loss_of(self.model, rank, number)
            gradients.append(torch.autograd.grad(loss, self.params))
        for master, each in zip(self.masters, zip(*gradients, strict=True), strict=True):
            if self.averaged == "first":
                master.grad = sum(gradient / self.world for gradient in each).float()
            else:
                master.grad = sum(gradient.float() for gradient in each) * (1 / self.world)
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self):
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    @torch.no_grad()
    def load(self, values):
        self.model.load_state_dict(values)
        for param, master in zip(self.params, self.masters, strict=True):
            master.copy_(param)


def start(world, stage, cut, name, dtype=torch.bfloat16):
    """By hand, and the same at a stage."""
    optim = OPTIMIZERS[name]
    expected = ByHand(built(lambda: Half(dtype)), optim, world, "first" if stage == 1 else "wide")
    model = built(lambda: Half(dtype))
    optimizer = zero.OSS(model.parameters(), optim, partition=cut, master_dtype=torch.float32)
    wrapped = DistributedDataParallel(model) if stage == 1 else zero.ShardedDDP(model, optimizer)
    return expected, wrapped, optimizer


def step(rank, number, model, optimizer):
    take_step(optimizer, loss_of(model, rank, number))


def steps(rank, numbers, expected, model, optimizer):
    for number in numbers:
        expected.step(number)
        step(rank, number, model, optimizer)


def whole_masters(optimizer):
    """By the number of the parameter, on every rank."""
    optimizer.consolidate_state_dict(to=None)
    return {number: state["master"] for number, state in optimizer.state_dict()["state"].items() if "master" in state}


def assert_by_hand(model, optimizer, expected, what):
    weights = {name: value.detach() for name, value in model.module.named_parameters()}
    same(weights, {name: value.detach() for name, value in expected.model.named_parameters()}, what)
    numbers = {param: number for number, param in enumerate(expected.model.parameters())}
    masters = whole_masters(optimizer)
    for param, master in zip(expected.params, expected.masters, strict=True):
        if param.dtype != torch.float32:
            same(masters[numbers[param]], master.detach(), f"{what}: master {numbers[param]}")


def _steps(rank, world, stage, cut, name, dtype):
    expected, model, optimizer = start(world, stage, cut, name, dtype)
    before = [param.detach().clone() for param in expected.params]
    for number in range(5):
        expected.step(number)
        step(rank, number, model, optimizer)
        assert_by_hand(model, optimizer, expected, f"step {number}")
    moved = [not torch.equal(param, old) for param, old in zip(expected.params, before, strict=True)]
    assert all(moved)
    pairs = zip(expected.params, expected.masters, strict=True)
    assert any(not torch.equal(master, param.float()) for param, master in pairs), "nothing was rounded"


@matrix.combined("stage, name, cut", [1, 2], OPTIMIZERS, CUTS)
def test_parameters_are_the_rounded_masters(stage, cut, name):
    ranks.run(_steps, 2, args=(stage, cut, name, torch.bfloat16))


@pytest.mark.parametrize("cut", CUTS)
def test_three_ranks_average_in_float32(cut):
    ranks.run(_steps, 3, args=(2, cut, "sgd", torch.bfloat16))


@pytest.mark.parametrize("stage", [1, 2])
def test_float16_parameters_have_masters_too(stage):
    ranks.run(_steps, 2, args=(stage, "even", "adam", torch.float16))


@ranks.raises(2, ValueError, "master_dtype", "float32")
def test_masters_of_integers_are_refused_when_built(rank, world):
    zero.OSS(built(Half).parameters(), SGD, master_dtype=torch.int32, lr=0.1)


@pytest.mark.parametrize(("master_dtype", "expected"), [(torch.float32, 1 - 2.0**-7), (None, 1.0)])
@ranks.on(2)
def test_small_updates_add_up(rank, world, master_dtype, expected):
    """Steps of a hundredth of what bfloat16 can tell from 1; without masters they are lost."""
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = zero.OSS(model.parameters(), SGD, lr=2.0**-15, master_dtype=master_dtype)
    for _ in range(256):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert torch.equal(model.weight, torch.full_like(model.weight, expected))


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_gradients_of_masters_are_clipped(rank, world, stage):
    """The norm is of the gradients as they arrive, in 16 bits at stage 1."""
    expected, model, optimizer = start(world, stage, "even", "sgd")
    gradients = []
    for peer in range(world):
        gradients.append(torch.autograd.grad(loss_of(expected.model, peer, 0), expected.params))
    averages = [sum(gradient.float() for gradient in each) / world for each in zip(*gradients, strict=True)]
    norm = torch.cat([average.flatten() for average in averages]).norm().item()
    loss_of(model, rank, 0).backward()
    rounding = 5e-3 if stage == 1 else 1e-6
    assert optimizer.clip_grad_norm(norm / 100).item() == pytest.approx(norm, rel=rounding)
    assert optimizer.clip_grad_norm(norm / 100).item() == pytest.approx(norm / 100, rel=max(rounding, 2e-6))
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_float16_parameters_with_masters_are_trained_with_a_loss_scale(rank, world, stage):
    """torch's GradScaler refuses gradients of 16 bits, because without masters they would be stepped in 16 bits.

    With a scale of 1 the numbers are those without; an infinite gradient skips the step.
    """
    expected, model, optimizer = start(world, stage, "even", "sgd", torch.float16)
    scaler = zero.GradScaler(gpus.DEVICE, init_scale=1.0)
    for number in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, rank, number)
        spoiled = number == 3 and rank == 1
        scaler.scale(loss * torch.inf if spoiled else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if number < 3:
            expected.step(number)
        assert_by_hand(model, optimizer, expected, f"step {number}")
    assert scaler.get_scale() == 0.5


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("stage", "cut"), AT)
@ranks.on("world")
def test_takes_two_bytes_a_parameter_whole_and_twelve_in_parts(rank, world, stage, cut):
    model = built(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))).to(torch.bfloat16))
    wrapped, optimizer = at_stage(stage, model, Adam, partition=cut, master_dtype=torch.float32)
    wrapped(torch.randn(3, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    def size(tensors):
        return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})

    params = list(model.parameters())
    state = [value for each in optimizer.optim.state.values() for value in each.values() if value.dim()]
    owned = size([*(optimizer.part(param) for param in params), *state])
    count = sum(param.numel() for param in params)
    assert size(params) == pytest.approx(2 * count, rel=0.01)
    assert owned == pytest.approx(12 * count / world, rel=0.02)


def in_place(model, values):
    model.load_state_dict(values)


def by_data(model, values):
    for name, param in model.named_parameters():
        param.data.copy_(values[name])


def by_foreach(model, values):
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), [values[name] for name, _ in model.named_parameters()])


WAYS = {"load_state_dict": in_place, "data.copy_": by_data, "foreach_copy_": by_foreach}


@matrix.combined("stage, way, cut", [1, 2], WAYS, CUTS)
@ranks.on(2)
def test_weights_loaded_between_steps_are_taken_over(rank, world, stage, cut, way):
    expected, model, optimizer = start(world, stage, cut, "sgd")
    steps(rank, range(2), expected, model, optimizer)
    loaded = {name: value + 0.75 for name, value in built(Half).state_dict().items()}
    assert not any((param == loaded[name]).any() for name, param in expected.model.named_parameters())
    expected.load(loaded)
    WAYS[way](model.module, loaded)
    for number in range(2, 5):
        expected.step(number)
        step(rank, number, model, optimizer)
        assert_by_hand(model, optimizer, expected, f"step {number}")


@ranks.on(2)
def test_masters_of_what_was_not_written_keep_their_precision(rank, world):
    expected, model, optimizer = start(world, 2, "even", "sgd")
    steps(rank, range(2), expected, model, optimizer)
    [master] = [m for p, m in zip(expected.params, expected.masters, strict=True) if p is expected.model.first.weight]
    with torch.no_grad():
        for weight in (model.module.first.weight, expected.model.first.weight, master):
            weight[3] = 0.75
    expected.step(2)
    step(rank, 2, model, optimizer)
    assert_by_hand(model, optimizer, expected, "after one row was written")


def _save(rank, world, stage, cut, name):
    expected, model, optimizer = start(world, stage, cut, name)
    steps(rank, range(3), expected, model, optimizer)
    optimizer.consolidate_state_dict(to=None)
    buffer = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return buffer.getvalue()


def _restore(rank, world, saved, cut, name, weights_first):
    saved = torch.load(io.BytesIO(saved), weights_only=True)
    kept = copy.deepcopy(saved)
    model = built(Half)
    optimizer = zero.OSS(model.parameters(), OPTIMIZERS[name], partition=cut, master_dtype=torch.float32)
    if weights_first:
        model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if not weights_first:
        model.load_state_dict(saved["model"])
    same(saved, kept, "what was loaded")
    optimizer.consolidate_state_dict(to=None)
    same(optimizer.state_dict()["state"], saved["optimizer"]["state"], "the restored state")
    for param in model.parameters():  # a step with the same gradients at every world size
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    return whole_masters(optimizer), [param.detach() for param in model.parameters()]


def _by_hand_after_restore(saved, name):
    model = built(Half)
    model.load_state_dict(saved["model"])
    masters = {}
    for number, param in enumerate(model.parameters()):
        master = saved["optimizer"]["state"].get(number, {}).get("master", param.detach())
        masters[number] = nn.Parameter(master.clone(), requires_grad=param.requires_grad)
    optimizer = OPTIMIZERS[name](list(masters.values()))
    state = copy.deepcopy(saved["optimizer"])
    for each in state["state"].values():
        each.pop("master", None)
    optimizer.load_state_dict(state)
    for master in masters.values():
        master.grad = torch.ones_like(master) if master.requires_grad else None
    optimizer.step()
    return {number: master.detach() for number, master in masters.items()}


@matrix.combined("cut, name, weights_first", CUTS, OPTIMIZERS, [True, False])
def test_masters_are_restored_bit_for_bit_at_other_world_sizes(cut, name, weights_first):
    saved = ranks.run(_save, 2, args=(2, cut, name))[0]
    loaded = torch.load(io.BytesIO(saved), weights_only=True)
    expected = _by_hand_after_restore(loaded, name)
    other = CUTS[1 - CUTS.index(cut)]
    for world, onto in [(2, cut), (2, other), (3, cut)]:
        for masters, params in ranks.run(_restore, world, args=(saved, onto, name, weights_first)):
            for number, master in masters.items():
                same(master, expected[number], f"master {number} on {world} ranks")
                same(params[number], expected[number].to(params[number].dtype), f"parameter {number}")
    assert sum("master" in state for state in loaded["optimizer"]["state"].values()) >= 5


@pytest.mark.parametrize("weights_first", [True, False])
def test_masters_are_restored_without_a_process_group(weights_first):
    saved = ranks.run(_save, 3, args=(2, "even", "sgd"))[0]
    expected = _by_hand_after_restore(torch.load(io.BytesIO(saved), weights_only=True), "sgd")
    [(masters, _)] = ranks.run(_restore, bare=True, args=(saved, "even", "sgd", weights_first))
    for number, master in masters.items():
        same(master, expected[number], f"master {number}")


@ranks.on(2)
def test_a_ranks_own_part_restores_its_masters(rank, world):
    """What state_dict() returns before consolidation holds this rank's masters."""
    expected, model, optimizer = start(world, 2, "even", "adam")
    for number in range(2):
        step(rank, number, model, optimizer)
        expected.step(number)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.module.state_dict())
    _, again, restored = start(world, 2, "even", "adam")
    again.module.load_state_dict(weights)
    restored.load_state_dict(saved)
    steps(rank, range(2, 4), expected, again, restored)
    assert_by_hand(again, restored, expected, "after loading this rank's shard")


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks.on(2)
def test_masters_come_along_into_other_buckets(rank, world, name):
    expected, model, optimizer = start(world, 1, "even", name)
    for number in range(4):
        if number == 2:
            optimizer.set_bucket_size(250)
        expected.step(number)
        step(rank, number, model, optimizer)
        assert_by_hand(model, optimizer, expected, f"step {number}")


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_masters_that_a_plain_optimizer_carried_along_bring_no_old_weights_back(rank, world, stage):
    """A plain optimizer takes masters along in its state, trains, and hands them on: they are as old as they were."""
    optim = OPTIMIZERS["sgd"]
    _, model, optimizer = start(world, stage, "even", "sgd")
    step(rank, 0, model, optimizer)
    optimizer.consolidate_state_dict(to=None)
    alone = built(Half)
    alone.load_state_dict(model.module.state_dict())
    plain = optim(alone.parameters())
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(1, 4):
        take_step(plain, loss_of(alone, 0, number))
    state = copy.deepcopy(plain.state_dict())
    old = {number: each["master"] for number, each in state["state"].items() if "master" in each}
    assert old, "nothing was carried along"

    finals = []
    for stale in (True, False):
        if not stale:
            for each in state["state"].values():
                each.pop("master", None)
        for first in ("weights", "state"):
            _, again, restarted = start(world, stage, "even", "sgd")
            if first == "weights":
                again.module.load_state_dict(alone.state_dict())
            restarted.load_state_dict(state)
            if first == "state":
                again.module.load_state_dict(alone.state_dict())
            same(
                {name: value.detach() for name, value in again.module.named_parameters()},
                {name: value.detach() for name, value in alone.named_parameters()},
                "the weights before the step",
            )
            step(rank, 4, again, restarted)
            finals.append([param.detach().clone() for param in again.module.parameters()])
    params = [*alone.parameters()]
    moved = [not torch.equal(params[number], master.to(params[number].dtype)) for number, master in old.items()]
    assert any(moved), "the plain optimizer changed nothing"
    for final in finals[1:]:
        for one, other in zip(final, finals[0], strict=True):
            assert torch.allclose(one.float(), other.float(), rtol=2**-7, atol=1e-6)


@ranks.on(2)
def test_masters_are_read_as_the_next_step_takes_them(rank, world, tmp_path):
    expected, model, optimizer = start(world, 2, "even", "sgd")
    steps(rank, range(2), expected, model, optimizer)
    masters = dict(zip(expected.params, expected.masters, strict=True))
    with torch.no_grad():
        for shard in (expected.model, model.module):
            shard.first.weight[3] = 0.75
            shard.gain.fill_(0.75)
        masters[expected.model.first.weight][3] = 0.75
        masters[expected.model.gain].fill_(0.75)
    assert_by_hand(model, optimizer, expected, "what was consolidated")
    zero.checkpoint.save(tmp_path, model, optimizer)
    wide = Half(torch.float32)
    zero.checkpoint.load(tmp_path, wide)
    for name, param in expected.model.named_parameters():
        same(wide.get_parameter(name).detach(), masters.get(param, param).detach().float(), f"what was saved of {name}")


@ranks.on(2)
def test_masters_wait_for_weights_that_are_loaded_after_them(rank, world):
    """Reading the state, and laying it out anew, before the weights that belong to it are loaded."""
    expected, model, optimizer = start(world, 1, "even", "sgd")
    steps(rank, range(2), expected, model, optimizer)
    optimizer.consolidate_state_dict(to=None)
    saved = copy.deepcopy(optimizer.state_dict())
    _, again, restored = start(world, 1, "even", "sgd")
    restored.load_state_dict(saved)
    restored.state_dict()
    restored.consolidate_state_dict(to=None)
    restored.set_bucket_size(250)
    again.module.load_state_dict(model.module.state_dict())
    assert_by_hand(again, restored, expected, "after the weights were loaded")
