"""Between steps a sharded parameter answers as the full one: with the numbers of stage 0, and what is written is there.
Where parts cannot, or one rank asks alone, every rank raises."""

import copy
import io
import pickle
import re
import sys
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forms import compiled, listed
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector

import ranks
import zero
from assertions import plain, same
from optimizers import ByParameter
from rows import Rows, adam, momentum, sgd
from runs import SideBySide, norm_of_gradients
from zoo import WIDTH, Stack, batch, loss_on


def average(t, i):
    t.update(t.loss(i))
    now = [param.detach() for param in t.n.parameters()]
    if i == 0:
        t.kept.averages = [value.clone() for value in now]
    torch._foreach_lerp_(t.kept.averages, now, 0.1)
    if i == 2:
        with torch.no_grad():
            for param, value in zip(t.n.parameters(), t.kept.averages, strict=True):
                param.copy_(value)


def step_by_hand(t, i):
    t.loss(i).backward()
    with torch.no_grad():
        for param in t.n.parameters():
            param -= 0.1 * param.grad
            param.grad = None


def momentum_by_hand(t, i):
    t.loss(i).backward()
    if i == 0:
        t.kept.buffers = [torch.zeros_like(param) for param in t.n.parameters()]
    with torch.no_grad():
        for param, buffer in zip(t.n.parameters(), t.kept.buffers, strict=True):
            buffer.mul_(0.9).add_(param.grad)
            param.sub_(buffer, alpha=0.1)
    t.n.zero_grad()


row = Rows("what is computed from shards element by element", __name__, same={3}, optim=momentum)
for options in ({}, {"options": {"partition": "whole"}}):
    how = " of whole parameters" if options else ""
    row.of(f"an average is kept by hand{how}", average, **options)
    row.of(f"it is stepped by hand{how}", step_by_hand, **options, optim=sgd)
    row.of(f"it is stepped by hand with momentum{how}", momentum_by_hand, **options, optim=sgd)


class Twice(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure):
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    self.write(param)
            self.end_of_a_pass()
        return loss

    def write(self, param):
        param.sub_(param.grad, alpha=0.1)

    def end_of_a_pass(self): ...


def with_a_closure(t, i):
    def closure():
        t.o.zero_grad()
        loss = t.loss(i)
        loss.backward()
        return loss

    t.o.step(closure)


class Replacing(Twice):
    """Steps by giving parameters other data; raises half-way if it is told to."""

    fails = False

    def write(self, param):
        param.data = param.data - 0.1 * param.grad

    def end_of_a_pass(self):
        if self.fails:
            raise KeyError


def raises_half_way(t, i):
    Replacing.fails = i == 1
    with pytest.raises(KeyError) if Replacing.fails else nullcontext():
        with_a_closure(t, i)


class GoesBack(torch.optim.SGD):
    """Gives its parameters the data from before again, as a well-known SAM does, and then steps by another optimizer
    or by itself."""

    def __init__(self, params, by_another=False):
        super().__init__(params, lr=0.1)
        self.other = torch.optim.SGD(self.param_groups, lr=0.1) if by_another else None

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        params = [param for param in self.param_groups[0]["params"] if param.grad is not None]
        for param in params:
            self.state[param]["before"] = param.data.clone()
            param.add_(param.grad.sign(), alpha=0.01)
        with torch.enable_grad():
            loss = closure()
        for param in params:
            param.data = self.state[param]["before"]
        if self.other is not None:
            self.other.step()
        else:
            super().step()
        return loss


def written_after_evaluating(t, i):
    t.update(t.loss(i))
    t.n.requires_grad_(True)
    t.m(batch(0, i)).sum()
    for param in t.n.last.parameters():
        param.data.mul_(0.9)
    if i % 2:
        t.m(batch(0, i)).sum()


class Asking(Stack):
    def forward(self, x):
        if dist.get_rank() == 0:
            weight = self.blocks[-1].up.weight
            found = (weight.numel(), tuple(weight.shape), weight.size(0), len(weight), weight.dim())
            assert found == (2 * WIDTH * WIDTH, (2 * WIDTH, WIDTH), 2 * WIDTH, 2 * WIDTH, 2)
        return super().forward(x)


class Keeps(torch.optim.SGD):
    """Keeps tensors that it makes of parameters in its constructor, in lists of its own and of its state."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.slow = [param.detach().clone() for param in self.param_groups[0]["params"]]
        for param in self.param_groups[0]["params"]:
            self.state[param]["history"] = [torch.zeros_like(param)]

    @torch.no_grad()
    def step(self, closure=None):
        for param, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            (history,) = self.state[param]["history"]
            if param.grad is not None:
                param.sub_(history.mul_(0.9).add_(param.grad), alpha=0.1)
                param.copy_(slow.lerp_(param, 0.5))


def read_in_backward(t, i):
    """A hook reads a unit whose gradients are being sent."""
    if i == 0:
        last = t.n.blocks[-1]
        t.n.blocks[0].register_full_backward_hook(lambda *_: print(end="" if last.up.bias.detach().norm() else " "))
    t.loss(i).backward()
    assert norm_of_gradients(t.m) < 1e3
    t.o.step()
    t.o.zero_grad()


def by_dimensions(params):
    """As many scripts choose what decays."""
    of = {True: [], False: []}
    for param in params:
        of[param.dim() > 1].append(param)
    return momentum([{"params": of[True], "weight_decay": 0.3}, {"params": of[False], "lr": 0.01}])


row.of("one rank alone asks for the shape of another unit", net=Asking)
row.of("an optimizer calls its closure twice", with_a_closure, optim=partial(Twice, lr=0.1))
row.of("an optimizer keeps what it made before its first step", lambda t, i: t.update(t.loss(i)), optim=Keeps)
row.of("a hook in backward reads parameters", read_in_backward)
row.of("groups are chosen by dimensions after wrapping", optim=by_dimensions, fsdp={"partition": "even"})
row.of("an optimizer goes back to data from before", with_a_closure, optim=GoesBack)
row.of("and steps by another", with_a_closure, optim=partial(GoesBack, by_another=True))
how = {"optim": partial(Replacing, lr=0.1), "fsdp": {"partition": "even"}}
row.of("an optimizer gives other data, and raises once", raises_half_way, **how)
how["fsdp"] = {"partition": "even", "reshard_after_forward": False}
row.of("so it does to units that are kept", raises_half_way, **how)
row.of("weights are written after evaluating", written_after_evaluating, optim=adam)
test_rows = row.tests()


READ = listed("""
p.argmax() ; torch.linalg.qr(p) ; p.square().sum() ; p.view(-1) ; p.T ; torch.ones(2, 10) @ p ; torch.cat([p, p])
nn.functional.linear(torch.ones(2, 10), p) ; p.tolist() ; float(p.detach()[1, 2]) ; torch.tensor(p.detach().numpy())
torch.where(p > 0) ; torch.mul(p.detach(), 2, out=torch.empty(0)) ; p.isfinite().all() ; torch.equal(p, p.clone())
torch.equal(p, torch.ones(10, 10)) ; p.grad.norm(dim=1) ; p.grad.norm().clone()
[*p.shape, *p.grad.stride(), p.numel(), p.nbytes, len(p.data)]
""")
WRITTEN = listed("""
p.mul_(0.5) ; p.data.clamp_(-0.1, 0.1) ; p.grad.add_(p, alpha=0.1) ; p.grad = p.grad.sign()
nn.init.constant_(p, 0.01) ; clip_grad_value_([p], 1e-3) ; p[0] = 0.0 ; p.data[0] = 0.0 ; p.grad[:2] = 0.0
p.div_(p.norm(dim=1, keepdim=True) + 1) ; p.mul_(torch.eye(10) + 1) ; p.mul_(torch.arange(1.0, 11))
p.add_(torch.randn_like(p)) ; p.data.normal_() ; nn.init.xavier_uniform_(p) ; p.grad = torch.ones(10, 10)
clip_grad_norm_([p], 1e-2) ; clip_grad_norm_([p], 1e-3, foreach=True)
""")
NEED_FULL = "needs the full tensor.*first.*summon_full_params"
REFUSED = dict.fromkeys(("p.share_memory_()", "p.resize_(2, 2)", "p.grad.resize_(2, 2)"), (RuntimeError, NEED_FULL))
for form in ("copy.deepcopy(p)", "pickle.dumps(p)", "torch.save(p, io.BytesIO())", "torch.save(p.grad, io.BytesIO())"):
    REFUSED[form] = TypeError, "full_state_dict"
REFUSED["p[0].zero_()"] = RuntimeError, "writes into a copy of 'first.weight'"
REFUSED["p.data.view(-1).add_(1)"] = RuntimeError, "writes into a copy of"
REFUSED["torch.zeros(1).add_(p)"] = RuntimeError, "output with shape"
REFUSED["p.grad = torch.ones(2, 10)"] = RuntimeError, "a gradient that is assigned"


@torch.no_grad()
def done(form, p):
    names = {"torch": torch, "nn": nn, "clip_grad_norm_": clip_grad_norm_, "copy": copy, "io": io, "pickle": pickle}
    return eval(compiled(form), {"p": p, "clip_grad_value_": clip_grad_value_, **names})


def between_backward_and_step(rank, partition):
    """What trains, and its first weight at stage 3 and in the reference."""
    both = SideBySide(Stack(), partial(zero.setup, stage=3, partition=partition))
    both.zero_grad()
    both.backward(loss_on(rank, 0))
    both.give_averages()
    return both, both.model.module.first.weight, both.plain.first.weight


def close_to(found, expected, name):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=lambda told: f"{name}: {told}")


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_what_is_read_is_what_the_full_tensor_answers(rank, world, partition):
    both, first, expected = between_backward_and_step(rank, partition)
    for form in READ:
        close_to(as_plain(done(form, first)), as_plain(done(form, expected)), form)
    both.update()


def as_plain(value):
    """What gathered copies answer, which are read only, as plain tensors."""
    if isinstance(value, (list, tuple)):
        return [*map(as_plain, value)]
    return value.as_subclass(Tensor) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_what_is_written_reaches_the_shards(rank, world, partition):
    both, first, expected = between_backward_and_step(rank, partition)
    for form in WRITTEN:
        for param in (first, expected):
            torch.manual_seed(0)
            done(form, param)
        with both.model.summon_full_params(with_grads=True):
            close_to(first.detach().clone(), expected.detach(), form)
            close_to(first.grad.clone(), expected.grad, f"the gradient after {form}")
    both.tolerance = 1e-6
    both.optimizer.step()
    both.plain_optimizer.step()
    both.compare()


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_what_the_parts_do_not_have_is_refused_on_every_rank(rank, world, partition):
    both, first, _ = between_backward_and_step(rank, partition)
    for form, (kind, words) in REFUSED.items():
        told = ranks.refusal(lambda form=form: done(form, first))
        assert re.match(f"{kind.__name__}: (?s:.*){words}", told), f"{form}: {told}"
    both.update()  # nothing of it was written


ALONE = ["p.grad.norm().item()", "p.sum()", "p.data[0]", "p.data[0].tolist()", "p.data[0] = 0.0"]


@pytest.mark.parametrize("asked", ALONE)
@ranks.raises(2, RuntimeError, "out of step", "the reading of a sharded tensor", timeout=15)
def test_what_one_rank_reads_alone_is_refused_on_every_rank(rank, world, asked):
    both, first, _ = between_backward_and_step(rank, "even")
    if rank == 0:
        done(asked, first)
    both.optimizer.step()
    dist.barrier()


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, RuntimeError, "out of step", "compute its number on every rank")
def test_norms_of_other_gradients_on_each_rank_are_refused(rank, world, stage):
    model, _ = zero.setup(Stack(), sgd, stage=stage)
    loss_on(rank, 0)(model).backward()
    float([*model.parameters()][rank].grad.norm())


@ranks.on(2)
def test_a_norm_that_a_log_has_read_without_a_graph_is_refused_in_a_loss(rank, world):
    model = zero.FSDP(Stack())
    norm = next(model.parameters()).norm()
    with torch.no_grad():
        assert float(norm) > 0
    assert "a loss reads 'first.weight'" in ranks.refusal((norm + loss_on(rank, 0)(model)).backward)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@ranks.on(2)
def test_a_gradient_of_one_element_is_assigned_and_drawn(rank, world, shape):
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.ones(shape))
    optimizer = sgd(zero.FSDP(holder).parameters())
    holder.weight.grad = torch.full(shape, 2.0)
    assert torch.randn_like(holder.weight).add_(holder.weight.grad).shape == shape
    optimizer.step()
    expected = nn.Parameter(torch.ones(shape))
    expected.grad = torch.full(shape, 2.0)
    sgd([expected]).step()
    assert torch.equal(holder.weight.view(-1) + 0, expected.detach().view(-1))


@ranks.on(2)
def test_who_gathers_much_between_steps_is_told_once(rank, world):
    model = zero.FSDP(Stack())
    with (
        mock.patch("zero.shards.answers.OFTEN", 3),
        mock.patch("zero.shards.answers._gathered", []),
        pytest.warns(UserWarning, match=r"gathered 3 times .* 1200 bytes .*summon_full_params") as told,
    ):
        [next(model.parameters()).tolist() for _ in range(5)]
    assert len(told) == 1


TAKEN = listed("""
p.new_zeros(2) ; p.data.new_zeros(2) ; p.new_ones(2) ; p.new_full((2,), 3.0) ; p.new_tensor([1.0, 2.0])
p.new_empty(2).fill_(1.0) ; torch.ones(2, dtype=torch.float64).to(p) ; torch.ones(2, dtype=torch.float64).type_as(p)
""")


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_shards_are_told_apart_by_their_storages_and_addresses_on_every_rank(rank, world, partition):
    model = zero.FSDP(Stack(), partition=partition)
    params = [*model.parameters()]
    for tell in (lambda p: p.untyped_storage().data_ptr(), lambda p: p.data_ptr()):
        assert len({tell(param) for param in params}) == len(params)
    held = sum(param.untyped_storage().nbytes() for param in params if plain(param).numel())
    assert held == sum(plain(param).nbytes for param in params)


@ranks.on(2)
def test_a_plain_tensor_beside_a_shard_of_one_element_is_a_full_one(rank, world):
    model = zero.FSDP(nn.LayerNorm(17, bias=False), partition="even")
    weight = model.module.weight
    assert plain(weight).numel() == (16, 1)[rank]
    with torch.no_grad():
        weight.add_(torch.arange(17.0)).add_(torch.ones(1)).add_(torch.ones(()))
        with pytest.raises(RuntimeError, match="must match the size"):
            weight.add_(torch.ones(16))
    same(weight.detach().clone().tolist(), [float(3 + k) for k in range(17)])


@ranks.on(2)
def test_what_takes_its_dtype_and_device_alone_is_a_plain_tensor(rank, world):
    """As the first hidden state of a recurrent net."""
    weight = zero.FSDP(Stack().bfloat16()).module.first.weight
    for form in TAKEN:
        made = done(form, weight)
        assert type(made) is Tensor and made.shape == (2,) and made.dtype == torch.bfloat16, form


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_modules_outside_of_the_models_forward_have_its_numbers(rank, world, partition):
    both = SideBySide(Stack(), partial(zero.setup, stage=3, partition=partition))
    model, expected = both.each()
    with torch.no_grad():
        same(model.first(batch(rank, 0)), expected.first(batch(rank, 0)))
        same(parameters_to_vector(model.parameters()), parameters_to_vector(expected.parameters()))
    for module in (model, expected):
        torch.manual_seed(1)
        module.first.reset_parameters()
    both.compare()


@ranks.on(2)
def test_questions_are_answered_and_the_plain_shard_is_there_for_who_asks(rank, world):
    model = zero.FSDP(nn.Linear(8, 16, bias=False))
    loss_on(rank, 0)
    model(torch.ones(2, 8)).sum().backward()
    (param,) = model.parameters()
    assert isinstance(param, nn.Parameter)
    assert param.shape == param.detach().shape == param.grad.shape == param.data.shape
    assert (param.numel(), param.dtype, param.requires_grad, param.is_leaf) == (128, torch.float32, True, True)
    assert "weight" in repr(param)
    assert "weight" in repr(param.grad)
    shard = plain(param)
    assert type(shard) is torch.Tensor and shard.numel() == 64
    assert shard.data_ptr() == param.data_ptr()
    with model.summon_full_params(with_grads=True):
        assert type(param) is nn.Parameter
        assert param.grad.norm() > 0
        assert torch.equal(param[8 * rank : 8 * rank + 8].flatten(), shard.flatten())


@ranks.on(2)
def test_a_step_sees_plain_tensors_and_so_does_what_steps_by_itself(rank, world):
    seen = []

    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            seen.extend((type(p), type(p.grad)) for p in self.param_groups[0]["params"] if p.grad is not None)
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.view(-1).sub_(0.1 * p.grad.reshape(-1))

    both = SideBySide(Stack(), "3", Own)
    both.step(loss_on(rank, 0))
    assert seen
    assert {*seen} == {(nn.Parameter, torch.Tensor)}
    for param in both.model.parameters():
        assert type(param) is not nn.Parameter


def before_a_second_step(rank):
    both = SideBySide(Stack(), "3")
    both.step(loss_on(rank, 0))
    both.zero_grad()
    both.backward(loss_on(rank, 1))
    return both


@pytest.mark.parametrize("saves", [False, True], ids=["", "weights saved before"])
@pytest.mark.parametrize("kept", [False, True], ids=["error dropped", "error kept"])
@ranks.on(2)
def test_what_a_step_that_raises_hid_is_there_again(rank, world, kept, saves):
    """As soon as nobody holds the error, which holds what the step was called with; at the latest by a forward."""
    both = before_a_second_step(rank)
    with failing(), pytest.raises(KeyError) as error:
        both.optimizer.step()
    if saves:
        zero.full_state_dict(both.model, to=0)
    if kept:
        with torch.no_grad():
            loss_on(rank, 1)(both.model)
    else:
        del error
    for param in both.model.parameters():
        assert type(param) is not nn.Parameter
        param.grad.mul_(1.0)
    both.backward(loss_on(rank, 2))  # adds to what there was
    both.update()


@ranks.on(2)
def test_unwrapping_restores_what_a_step_that_raises_hid_before_parameters_are_full(rank, world):
    both, ignored = before_a_second_step(rank), []
    with failing(), pytest.raises(KeyError) as error:
        both.optimizer.step()
    module = zero.unwrap(both.model)
    with mock.patch.object(sys, "unraisablehook", ignored.append):
        del error
    assert not ignored
    same(dict(module.state_dict()), dict(both.plain.state_dict()), "full weights")
    assert {type(param) for param in module.parameters()} == {nn.Parameter}


@ranks.on(2)
def test_state_of_an_optimizer_says_so_too(rank, world):
    model, optimizer = zero.setup(Stack(), adam, stage=3)
    loss_on(rank, 0)(model).backward()
    optimizer.step()
    weight = model.module.first.weight
    for uses in range(2):
        average = optimizer.state[weight]["exp_avg"]
        full = zero.full_optimizer_state_dict(model, optimizer, to=None)["state"][0]["exp_avg"]
        assert average.shape == full.shape == (WIDTH, WIDTH)
        torch.testing.assert_close(float(average.norm()), float(full.norm()))
        average[0] = 1.0
        full[0] = 1.0
        same(zero.full_optimizer_state_dict(model, optimizer, to=None)["state"][0]["exp_avg"], full)
        with torch.no_grad():
            weight.lerp_(average, 0.1)
        saved = optimizer.state_dict()["state"]
        assert {type(value) for state in saved.values() for value in state.values()} == {torch.Tensor}
        if uses == 0:
            zero.load_full_optimizer_state_dict(
                model, optimizer, zero.full_optimizer_state_dict(model, optimizer, to=None)
            )


class Scaled(ByParameter):
    def step_one(self, param, state, group):
        state.setdefault("scale", torch.ones(1)).mul_(0.5)
        state["momentum"] = state.get("momentum", 0) + param.grad
        param.sub_(state["momentum"] * state["scale"] * group["lr"])


@ranks.on(2)
def test_a_number_of_all_ranks_is_no_shard_where_a_rank_has_one_element(rank, world):
    ones = torch.zeros(1)
    for width in range(2, 7):  # in one of these one rank has one element of a parameter
        net = nn.Sequential(nn.Linear(width, 1), nn.Linear(1, width))
        model, optimizer = zero.setup(net, partial(Scaled, lr=0.1), stage=3, partition="even")
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()
        for param, state in optimizer.state.items():
            ones += plain(param).numel() == 1
            assert state["scale"].item() == 0.5
            assert type(state["scale"]) is Tensor
            assert state["momentum"].shape == param.shape
            assert plain(state["momentum"]).norm() > 0  # a rank has no state of what it owns nothing of
    dist.all_reduce(ones)
    assert ones > 0


@ranks.on(2)
def test_a_step_that_raises_before_its_closure_leaves_shards(rank, world):
    both = SideBySide(Stack(), "3")
    with failing(), pytest.raises(KeyError):
        both.optimizer.step(lambda: 0.0)
    assert nn.Parameter not in map(type, both.model.parameters())


def failing():
    return mock.patch.object(torch.optim.SGD, "step", torch.optim.Optimizer.profile_hook_step(_raise))


def _raise(*_):
    raise KeyError("in a step")
