"""Float32 masters of 16-bit parameters that are loaded, saved and added. That they train right is in
tests/parity/test_precision.py."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import matrix
import ranks
import zero
from assertions import same, same_where_the_cpu_steps
from inner import set_bucket_size
from runs import stage_2, take_step
from zoo import CASES, FEATURES, Stack, built, loss_on, odd_batch

OPTIMIZERS = {
    "adam": partial(Adam, lr=1e-3, weight_decay=0.01),
    "stateless": partial(SGD, lr=0.01),
}
CUTS = ["even", "whole"]


class Half(nn.Module):
    """Matrices of 16 bits, and norms of 32, which OSS rounds: it keeps what they were."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 37).bfloat16()
        self.norm = nn.LayerNorm(37)
        self.gain = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
        self.last = nn.Linear(37, 11).bfloat16()
        self.frozen = nn.Parameter(torch.randn(11).bfloat16(), requires_grad=False)

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs.to(self.first.weight.dtype)).to(self.norm.weight.dtype))
        return self.last(torch.tanh(hidden).to(self.first.weight.dtype)) * self.gain + self.frozen


def loss_of(model, rank, step):
    return (model(odd_batch(rank, step)).float() - 1).square().mean()


def start(stage, cut, name, net=None):
    net = net or built(Half)
    optimizer = zero.OSS(net.parameters(), OPTIMIZERS[name], partition=cut, precision="bf16")
    return DistributedDataParallel(net) if stage == 1 else zero.ShardedDDP(net, optimizer), optimizer


def train(rank, numbers, model, optimizer):
    for number in numbers:
        take_step(optimizer, loss_of(model, rank, number))


def stand(model, optimizer):
    return dict(model.module.state_dict()), whole_masters(optimizer)


def whole_masters(optimizer):
    """By the number of the parameter, on every rank."""
    optimizer.consolidate_state_dict(to=None)
    return {
        number: state["zero_master"]
        for number, state in optimizer.state_dict()["state"].items()
        if "zero_master" in state
    }


WAYS = {
    "load_state_dict": nn.Module.load_state_dict,
    "foreach_copy_": lambda model, of: torch.no_grad()(torch._foreach_copy_)([*model.parameters()], [*of.values()]),
}


@matrix.combined("stage, way, cut", [1, 2], WAYS, CUTS)
@ranks.on(2)
def test_weights_loaded_between_steps_are_taken_over(rank, world, stage, cut, way):
    """As by who is built with them."""
    both = [start(stage, cut, "stateless")]
    train(rank, range(2), *both[0])
    loaded = {name: value + 0.75 for name, value in built(Half).state_dict().items()}
    WAYS[way](both[0][0].module, loaded)
    fresh = built(Half).bfloat16()
    fresh.load_state_dict(loaded)
    both.append(start(stage, cut, "stateless", fresh))
    for one in both:
        train(rank, range(2, 4), *one)
    same(stand(*both[0]), stand(*both[1]), "two steps later")


def stepped_by_ones(net, optimizer):
    for param in net.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    return whole_masters(optimizer), dict(net.state_dict())


def _save(rank, world, cut, name):
    """What is saved, and what the next step makes of masters and weights."""
    model, optimizer = start(1, cut, name)
    train(rank, range(3), model, optimizer)
    optimizer.consolidate_state_dict(to=None)
    saved = copy.deepcopy({"model": dict(model.module.state_dict()), "optimizer": optimizer.state_dict()})
    return saved, stepped_by_ones(model.module, optimizer)


def _restore(rank, world, saved, cut, name, weights_first):
    kept = copy.deepcopy(saved)
    model = built(Half)
    optimizer = zero.OSS(model.parameters(), OPTIMIZERS[name], partition=cut, precision="bf16")
    if weights_first:
        model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if not weights_first:
        model.load_state_dict(saved["model"])
    same(saved, kept, "what was loaded")
    optimizer.consolidate_state_dict(to=None)
    same(optimizer.state_dict()["state"], saved["optimizer"]["state"], "the restored state")
    return stepped_by_ones(model, optimizer)


@pytest.mark.parametrize(
    ("name", "cut", "onto", "weights_first"), [("adam", "whole", "even", True), ("stateless", "even", "even", False)]
)
def test_masters_are_restored_bit_for_bit_on_other_numbers_of_ranks(name, cut, onto, weights_first):
    saved, expected = ranks.run(_save, 2, args=(cut, name))[0]
    for how in ({"world": 3}, {"bare": True}):
        for found in ranks.run(_restore, **how, args=(saved, onto, name, weights_first)):
            same(found, expected, f"masters and weights, {how}")


@ranks.on(2)
def test_masters_wait_for_weights_that_are_loaded_after_them(rank, world):
    """Whole state is read, and laid out anew, before the weights that belong to it are loaded."""
    both = (model, optimizer), (again, restored) = [start(1, "even", "adam") for _ in range(2)]
    train(rank, range(2), model, optimizer)
    optimizer.consolidate_state_dict(to=None)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    restored.consolidate_state_dict(to=None)
    set_bucket_size(restored, 250)
    again.module.load_state_dict(model.module.state_dict())
    same(*(stand(*one) for one in both), "after the weights were loaded")
    for one in both:
        train(rank, range(2, 4), *one)
    same(*(stand(*one) for one in both), "two steps later")


@pytest.mark.parametrize(
    "precision", ["bf16", torch.float16, zero.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)]
)
@ranks.on(2)
def test_what_is_wrapped_by_hand_trains_as_by_setup(rank, world, precision):
    """Without modules that zero.setup keeps in float32."""
    torch.manual_seed(0)
    net, found = Stack(), []
    for by_hand in (False, True):
        model = copy.deepcopy(net)
        if by_hand:
            optimizer = zero.OSS(model.parameters(), OPTIMIZERS["adam"], precision=precision)
            model = zero.ShardedDDP(model, optimizer, precision=precision)
        else:
            model, optimizer = zero.setup(model, OPTIMIZERS["adam"], stage=2, precision=precision)
        before = zero.traffic()
        losses = [take_step(optimizer, loss_on(rank, number)(model)) for number in range(3)]
        sent, state = zero.traffic() - before, zero.full_optimizer_state_dict(model, optimizer, to=None)["state"]
        found.append([losses, zero.full_state_dict(model, to=None), state, [sent.gather, sent.reduce]])
    same(found[1], found[0])
    assert {param.dtype for param in model.parameters()} < {torch.bfloat16, torch.float16}


@ranks.on(2)
def test_parameters_that_are_added_are_rounded_and_keep_what_they_were(rank, world):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5) for _ in range(2)]
    start = [param.detach().clone() for layer in layers for param in layer.parameters()]
    optimizer = zero.OSS(layers[0].parameters(), SGD, precision="bf16", lr=0.0)
    optimizer.add_param_group({"params": [*layers[1].parameters()]})
    layers[1](layers[0](torch.ones(2, 5, dtype=torch.bfloat16))).sum().backward()
    optimizer.step()
    same([whole_masters(optimizer)[number] for number in range(4)], start, "the masters")


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_full_weights_that_a_wrapper_loads_reach_the_masters(rank, world, stage):
    torch.manual_seed(stage)
    weights = Stack().state_dict()
    model, _ = zero.setup(Stack(), partial(SGD, lr=0.1), stage=stage, precision="bf16")
    model.load_state_dict(weights)
    same(zero.full_state_dict(model, to=None), weights, "the weights")


@pytest.mark.parametrize("where", ["cpu", "disk"])
@ranks.on(2)
def test_what_is_offloaded_is_stepped_as_float32(rank, world, tmp_path, where):
    """Unless another dtype is asked for."""
    offload = zero.CPUOffload() if where == "cpu" else zero.DiskOffload(tmp_path)
    pairs = [
        stage_2(CASES["wide"].model().bfloat16(), OPTIMIZERS["adam"], **options)
        for options in ({"offload": offload}, {"precision": "bf16"})
    ]
    for number in range(3):
        for model, optimizer in pairs:
            (inputs,) = CASES["wide"].batch(rank, number).inputs
            take_step(optimizer, model(inputs.bfloat16()).float().square().mean())
        same_where_the_cpu_steps(*(zero.full_state_dict(model, to=None) for model, _ in pairs), f"step {number}")
    states = [zero.full_optimizer_state_dict(*pair, to=None)["state"] for pair in pairs]
    assert states[0][0]["zero_master"].dtype is torch.float32
    same_where_the_cpu_steps(*states, "the full state")
    assert not list(tmp_path.iterdir()), "files have no names, and are gone with the processes"


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_an_optimizer_whose_model_was_unwrapped_has_no_masters_of_it(rank, world, stage):
    model, optimizer = zero.setup(Stack(), partial(SGD, lr=0.1), stage=stage, precision="bf16")
    plain = zero.unwrap(model)
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(rank + 0.1)
    same(zero.full_state_dict(plain, to=None), plain.state_dict(), "the weights")
    assert optimizer is not None


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_a_checkpoint_without_the_optimizer_has_the_masters(rank, world, stage, tmp_path):
    def built() -> nn.Module:
        return zero.setup(Stack(), partial(SGD, lr=0.1), stage=stage, precision="bf16")[0]

    model, again, plain = built(), built(), Stack()
    zero.checkpoint.save(tmp_path, model)
    for other in (again, plain):
        zero.checkpoint.load(tmp_path, other)
    weights = zero.full_state_dict(model, to=None)
    same(zero.full_state_dict(again, to=None), weights, "the weights")
    same(plain.state_dict(), weights, "the weights without zero")


def in_steps(stage, **options):
    net = Stack()
    return zero.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2), stage=stage, **options)


@pytest.mark.parametrize("way", ["checkpoint", "full state"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks.on(2)
def test_masters_that_torchs_own_load_has_put_into_a_state_are_not_saved_from_there(rank, world, stage, way, tmp_path):
    """They are of before: training goes on, and a load would take the weights back to them."""
    before = in_steps(2, precision="bf16")
    take_step(before[1], loss_on(rank, 0)(before[0]))
    weights = zero.full_state_dict(before[0], to=None)
    model, optimizer = in_steps(stage)
    zero.load_full_state_dict(model, weights)
    optimizer.load_state_dict(zero.full_optimizer_state_dict(*before, to=None))
    take_step(optimizer, loss_on(rank, 1)(model))
    trained = zero.full_state_dict(model, to=None)
    assert any(not torch.equal(trained[name], weights[name]) for name in trained)
    again = in_steps(stage)
    if way == "checkpoint":
        zero.checkpoint.save(tmp_path / "run", model, optimizer)
        zero.checkpoint.load(tmp_path / "run", *again)
    else:
        zero.load_full_state_dict(again[0], trained)
        zero.load_full_optimizer_state_dict(*again, zero.full_optimizer_state_dict(model, optimizer, to=None))
    same(zero.full_state_dict(again[0], to=None), trained, "the weights")


@pytest.mark.parametrize("steps", [0, 2])
@ranks.on(2)
def test_full_state_of_masters_loads_where_torch_expects_its_own(rank, world, steps):
    """Of a frozen parameter, and before the first step, there is no state but the master."""
    net = Stack()
    next(net.parameters()).requires_grad_(False)
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    model, optimizer = zero.setup(net, adamw(net.parameters()), stage=2, precision="bf16")
    for number in range(steps):
        take_step(optimizer, loss_on(rank, number)(model))
    state = zero.full_optimizer_state_dict(model, optimizer, to=None)
    adamw(Stack().parameters()).load_state_dict(state)
    fresh, pairs = Stack(), [*zero.full_tensors(model, optimizer, to=None)]
    zero.setup(fresh, stepped := adamw(fresh.parameters()), stage=3)[1].load_state_dict(state)
    assert not any("zero_master" in of_one for of_one in stepped.state.values())
    zero.load_full_optimizer_state_dict(model, optimizer, iter(pair for pair in pairs if "/" in pair[0]))
    same(zero.full_optimizer_state_dict(model, optimizer, to=None), state, "the state")
