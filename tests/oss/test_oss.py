"""Stage 1 beside DistributedDataParallel with the plain optimizer: the same losses and parameters, bit for bit; OSS as
any optimizer is used; and steps on gradients that are not averaged."""

import copy
import io
import pickle
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import gpus
import ranks
import zero
import zoo
from assertions import same, same_weights
from inner import bytes_read
from optimizers import ELEMENTWISE, MOMENTUM, ByParameter, Lamb, MyAdam
from ranks import refusal
from rows import Net, Rows, adam, changed, momentum, trains
from runs import at_stage, average_gradients, distributed, norm_of_gradients, pair, take_step, train, weights
from transports import READS
from zoo import WIDTH, OddNet, Stack, built, data, filled, loss_on, matrices, odd_loss


def adam_by_factory(params, **options):
    return Adam(params, **options)


# What is stepped, its options, and the cut that "auto" should choose for it.
OPTIMIZERS = {
    **{name: (*given, "even") for name, given in ELEMENTWISE.items()},
    "SGD fused": (SGD, {**MOMENTUM, "fused": True}, "even"),
    "Adam fused": (Adam, {"lr": 0.01, "amsgrad": True, "fused": True}, "even"),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}, "whole"),
    "LAMB by hand": (Lamb, {"lr": 0.1}, "whole"),
    "a subclass of Adam": (MyAdam, {"lr": 0.01}, "even"),
    "partial of partial": (partial(partial(Lamb, lr=0.5), lr=0.1), {}, "whole"),
    "a function": (adam_by_factory, {"lr": 0.01}, "even"),
}
OPTIMIZERS["Muon"] = (torch.optim.Muon, {"lr": 0.1, "weight_decay": 0.1}, "whole")
MODELS = {"Adafactor": filled, "Muon": matrices}  # what these cannot take is left out


def is_cut(optimizer):
    """Whether any parameter has shards on several ranks."""
    return any(0 < optimizer.part(p).numel() < p.numel() for each in optimizer.param_groups for p in each["params"])


def assert_equal_training(rank, plain, sharded, **options):
    expected = train(*plain, rank, **options)
    same(train(*sharded, rank, **options), expected, "the losses")
    same_weights(sharded[0], plain[0])
    assert expected[0] != expected[-1]


CASES = [(name, "auto", 1) for name in OPTIMIZERS]
CASES += [(name, "auto", 2) for name in ("Muon", "Adafactor", "LAMB by hand")]
CASES += [("a subclass of Adam", "whole", 1), ("a function", "even", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
@ranks.on(2)
def test_trains_as_the_plain_optimizer_does_bit_for_bit(rank, world, turn):
    for name, partition, stage in CASES[turn::4]:
        optim, options, auto = OPTIMIZERS[name]
        make = MODELS.get(name, OddNet)
        plain, sharded = (at_stage(at, built(make), optim, partition=partition, **options) for at in (0, stage))
        assert is_cut(sharded[1]) == ((auto if partition == "auto" else partition) == "even")
        assert_equal_training(rank, plain, sharded, steps=range(3))


def tiny():
    """Fewer parameters than ranks, and fewer elements than ranks in each."""
    return nn.Sequential(nn.Linear(24, 1, bias=False), nn.LayerNorm(1))


@pytest.mark.parametrize(("make", "partition", "world"), [(OddNet, "whole", 3), (tiny, "even", 3), (tiny, "whole", 4)])
@ranks.on("world")
def test_trains_the_same_within_rounding_on_other_numbers_of_ranks(rank, world, make, partition):
    plain, sharded = pair(SGD, partition, make, **MOMENTUM)
    losses = train(*plain, rank)
    assert train(*sharded, rank) == pytest.approx(losses, rel=2e-6)
    found, expected = (dict(model.state_dict()) for model, _ in (sharded, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@ranks.on(bare=True)
def test_trains_the_same_without_a_process_group(rank, world):
    plain, sharded = pair(Adam, lr=0.01)
    assert_equal_training(rank, plain, sharded)
    same(sharded[1].state_dict(), plain[1].state_dict(), "the state")


def groups_of(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
        {"params": [p for p in model.parameters() if p.dim() >= 2], "momentum": 0.5},
    ]


@pytest.mark.parametrize("params", [groups_of, nn.Module.named_parameters])
@ranks.on(2)
def test_groups_with_options_and_names_are_taken_as_torch_takes_them(rank, world, params):
    (model, plain), (other, sharded) = pair(SGD, params=lambda model: params(model.module), **MOMENTUM)
    assert_equal_training(rank, (model, plain), (other, sharded))
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state, with names and options")
    same(sharded.defaults, plain.defaults, "the defaults")


class Cooling(SGD):
    """Changes its own options, as optimizers do that choose their learning rate."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5
        return loss


row = Rows("options that change in training", __name__)
row.of("the optimizer changes them itself", optim=partial(Cooling, lr=0.1, momentum=0.9))


@row(optim=adam)
def one_cycle_of_rates_and_betas(t, i):
    if i == 0:
        t.kept.schedule = OneCycleLR(t.o, max_lr=0.02, total_steps=6)
    trains(t, i)
    t.kept.schedule.step()
    [group] = t.o.param_groups
    t.note(torch.tensor([group["lr"], *group["betas"]]))


test_rows = row.tests()


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_parameters_may_be_added_after_some_steps(rank, world, partition):
    """What a scheduler has set since the last step is kept."""
    both = pair(SGD, partition, params=lambda model: model.module.first.parameters(), **MOMENTUM)
    for model, optimizer in both:
        schedule = StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, rank, range(2), after=lambda *_, schedule=schedule: schedule.step())
        inner = model.module
        optimizer.add_param_group({"params": [inner.middle.weight, inner.scale], "lr": 0.01})
        optimizer.add_param_group({"params": inner.norm.parameters(), "nesterov": True})
        optimizer.add_param_group({"params": inner.transposed})
    assert [group["lr"] for group in both[1][1].param_groups] == [0.025, 0.01, 0.1, 0.1]
    assert_equal_training(rank, *both, steps=range(2, 5))
    norms = [norm_of_gradients(model).item() for model, _ in both]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    (_, plain), (_, sharded) = both
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state")


# Stage 1 by zero.setup, which averages by reading on one host; sparse gradients are refused at every stage.


@pytest.mark.skipif(not READS, reason="ranks are told to read nothing from one another")
@ranks.on(2)
def test_gradients_go_by_reading(rank, world):
    model, _ = zero.setup(zoo.CASES["wide"].model(), zoo.OPTIMIZERS["sgd"], stage=1)
    with bytes_read() as read:
        model(*zoo.CASES["wide"].batch(rank, 0).inputs).sum().backward()
    size = sum(param.nbytes for param in model.parameters())
    assert size <= sum(read) <= 1.01 * size + 4096  # half of them to add up, half of the averages


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(numbers))


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=gpus.cpu_only("NCCL refuses them before")), 2, 3])
@ranks.raises(2, RuntimeError, "table.weight has a sparse gradient", "sparse=False", timeout=8)
def test_sparse_gradients_are_refused_in_the_same_words_at_every_stage(rank, world, stage, partition):
    model, optimizer = zero.setup(Words(), torch.optim.SGD, stage=stage, partition=partition, lr=0.1)
    model(torch.tensor([rank, 7])).sum().backward()
    optimizer.step()


# Stage 1 beside DistributedDataParallel's own options.


def with_options_of_ddp(t, i, *, hook=False, unsent=True):
    if hook and i == 0:
        t.m.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if unsent:
        with t.m.no_sync():
            odd_loss(t.m, t.rank, 100 + i).backward()
    t.note(odd_loss(t.m, t.rank, i)).backward()
    t.o.step()
    t.o.zero_grad(set_to_none=i % 2 == 0)


VIEWS = {"gradient_as_bucket_view": True}
row = Rows("options of DistributedDataParallel", __name__, net=partial(built, OddNet), optim=adam, same={1}, steps=4)
row.of("a hook in 16 bits", partial(with_options_of_ddp, hook=True), ddp={"bucket_cap_mb": 25}, optim=momentum)
row.of("gradient views", with_options_of_ddp, ddp=VIEWS)
row.of("gradient views and a hook in 16 bits", partial(with_options_of_ddp, hook=True), ddp=VIEWS)
row.of("a static graph", partial(with_options_of_ddp, unsent=False), ddp={**VIEWS, "static_graph": True})
row.of("unused parameters are found", with_options_of_ddp, ddp={"find_unused_parameters": True})
row.of("small buckets", with_options_of_ddp, ddp={**VIEWS, "bucket_cap_mb": 0.001}, optim=momentum)
test_options_of_ddp = row.tests()


# What users and tools do with any torch optimizer: hooks, closures, arguments of step, methods of the inner one,
# copies; and what ShardedDDP does to an optimizer that has already stepped.


row = Rows("what is done with any torch optimizer", __name__)
EVEN = {"options": {"partition": "even"}, "same": {1, 2}}


class DecayingAll(ByParameter):
    """Decays what has no gradient, too, and past autograd's counts."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.99)
        super().step()

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.data.add_(param.grad, alpha=-group["lr"])


class Hessian(ByParameter):
    """Takes gradients of a backward of its own, as Sophia does, and divides later ones by them."""

    def estimate(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["estimate"] = param.grad.square()

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.data.addcdiv_(param.grad, 1 + state["estimate"], value=-group["lr"])


class ByStep(Hessian):
    """As the error of OSS says to write it."""

    def step(self, closure: Any = None, *, own: bool = False) -> Any:
        return self.estimate() if own else super().step(closure)


@row(optim=lambda params, **how: ByStep(params, lr=0.1, **how), **EVEN)
def an_optimizer_has_a_method_of_its_own(t: Any, i: int) -> None:
    t.loss(10 + i).backward()
    if t.stage:
        with pytest.raises(AttributeError, match=r"step\(closure=None, \*, own=False\) returns self.estimate\(\)"):
            t.o.estimate()
        t.o.step(own=True)
    else:
        t.o.estimate()
    t.o.zero_grad()
    trains(t, i)


class Averaged(ByParameter):
    """Trains at one set of weights and is evaluated at another, their average, as Schedule-Free does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, training=True)

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert group["training"]
        mean = state.setdefault("mean", param.clone())
        param.sub_(param.grad, alpha=group["lr"])
        mean.lerp_(param, 0.3)

    def eval(self) -> None:
        self.train(False)

    def reset(self) -> None:
        """Not to be called on this rank's shards in the name of all."""

    @torch.no_grad()
    def train(self, training: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["training"] != training else ():
                if "mean" in self.state[param]:
                    mean = self.state[param]["mean"]
                    param.data, self.state[param]["mean"] = param.data.copy_(mean), param.data.clone()
            group["training"] = training


@row(optim=Averaged, **EVEN)
def weights_are_switched(t: Any, i: int) -> None:
    trains(t, i)
    t.o.eval()
    with torch.no_grad():
        t.loss(7)
    [t.note(param) for param in t.n.parameters()]
    if t.stage:
        assert not hasattr(t.o, "reset") and "this rank's shards" in refusal(lambda: t.o.reset())
    getattr(t.o, "optim", t.o).train()


@row(optim=DecayingAll, ddp={"find_unused_parameters": True}, same={1, 2})
def a_step_writes_frozen_parameters(t: Any, i: int) -> None:
    t.n.first.requires_grad_(False)
    trains(t, i)


test_used_as_any_optimizer = row.tests()


@ranks.on(2)
def test_steps_that_never_find_a_gradient_warn_once(rank, world):
    optimizer = zero.OSS(built().parameters(), SGD, lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.step()
    (told,) = [one for one in found if "no gradient" in str(one.message)]
    assert "assign=False" in str(told.message) and told.filename == __file__


@ranks.on(2)
def test_hooks_are_called(rank, world):
    model, optimizer = at_stage(2, built(), Adam, lr=0.01)
    seen = []
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(("before", one is optimizer)))
    optimizer.register_step_post_hook(lambda one, *_: seen.append(("after", one is optimizer)))
    optimizer.register_state_dict_pre_hook(lambda one: seen.append(one is optimizer))
    optimizer.register_state_dict_post_hook(lambda one, found: {**found, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda one, found: seen.append(found.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append("loaded"))
    train(model, optimizer, rank, range(2))
    found = optimizer.state_dict()
    optimizer.load_state_dict(found)
    assert found["more"] == 1, "the caller's dictionary stays as it is"
    assert seen == [("before", True), ("after", True)] * 2 + [True, 1, "loaded"]


def deep() -> nn.Module:
    """Many parameters in one buffer, one of them under two names."""
    return changed(Stack(blocks=10), lambda net: setattr(net, "tied", net.blocks[3].up.weight))


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_copies_and_pickles_of_the_model_have_its_values(rank, world, stage):
    """Nor do saved ones take more: parameters are views of shared buffers, which torch.save stores once."""
    inner = deep()
    model, optimizer = at_stage(stage, inner, SGD, **MOMENTUM)
    take_step(optimizer, loss_on(rank, 0)(model))
    values, data = copy.deepcopy(dict(inner.state_dict())), saved(inner)
    assert len(data) <= 1.2 * len(saved(deep()))
    for one in (copy.deepcopy(inner), torch.load(io.BytesIO(data), weights_only=False)):
        same(dict(one.state_dict()), values, "a copy")
        assert one.tied is one.blocks[3].up.weight
        with torch.no_grad():
            one.tied.add_(1.0)
        same(dict(inner.state_dict()), values, "the model that was copied")
        loss_on(rank, 1)(one).backward()


@ranks.on(2)
def test_copying_and_pickling_what_is_spread_over_ranks_is_refused(rank, world):
    model, optimizer = at_stage(2, built(), SGD, **MOMENTUM)
    for value, remedy in ((optimizer, "state_dict"), (model, "module")):
        for call in (copy.deepcopy, copy.copy, pickle.dumps, saved):
            told = refusal(lambda: call(value))  # noqa: B023 - called at once
            assert "TypeError" in told and remedy in told, f"{call.__name__}: {told}"


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "optim", "options"), [("even", SGD, MOMENTUM), ("whole", Adam, {"lr": 0.01})])
@ranks.on(2)
def test_the_buckets_of_sharded_ddp_take_over_state_of_earlier_steps(rank, world, cut, optim, options):
    """Or what was loaded of it into another optimizer, before that is wrapped."""
    plain = distributed(built())
    alone = optim(plain.parameters(), **options)
    expected = train(plain, alone, rank, range(4))[2:], weights(plain), alone.state_dict()
    for size, loads in ((None, True), (0, False), (750, False)):
        inner = built()
        optimizer = zero.OSS(inner.parameters(), optim, partition=cut, **options)
        for step in range(2):
            optimizer.zero_grad()
            odd_loss(inner, rank, step).backward()
            average_gradients(inner)
            optimizer.step()
        if loads:
            optimizer.consolidate_state_dict(to=None)
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = zero.OSS(inner.parameters(), optim, partition=cut, **options)
            optimizer.load_state_dict(state)
        wrapped = zero.ShardedDDP(inner, optimizer, reduce_buffer_size=size)
        losses = train(wrapped, optimizer, rank, range(2, 4))
        optimizer.consolidate_state_dict(to=None)
        same((losses, weights(wrapped), optimizer.state_dict()), expected, "losses, weights and state")


# Steps on gradients that are not, or not yet, those of all ranks: refused on every rank, or right.


unaveraged = Rows("step() on gradients that were not averaged", __name__, optim=momentum)


def within(register):
    """register(t, hook): a hook that is called within each backward."""

    def stepped(t, i):
        if i == 0:
            register(t, lambda *_: t.o.step())
        t.update(t.loss(i))

    return stepped


REFUSED = {"same": (), "refused": {1: "within a backward.*has returned", 2: "within a backward.*has returned"}}
unaveraged.of(
    "a hook after a gradient steps",
    within(lambda t, hook: t.n.first.weight.register_post_accumulate_grad_hook(hook)),
    **REFUSED,
)
unaveraged.of("a hook of a module steps", within(lambda t, hook: t.n.last.register_full_backward_hook(hook)), **REFUSED)
unaveraged.of(
    "a hook of a tensor steps", within(lambda t, hook: t.n.first.weight.register_hook(lambda g: hook())), **REFUSED
)


def unsent(t, i):
    t.update(t.loss(i))
    with zero.no_sync(t.m):
        t.loss(10 + i).backward()
    t.o.step()


def around(t, i):
    t.update(t.n(t.batch(i)).square().mean())


def around_parts(t, i):
    t.update(t.n.last(t.n.first(t.batch(i))).square().mean())


def twice(t, i):
    losses = t.loss(i), t.loss(10 + i)
    losses[0].backward()
    t.update(losses[1])


def again(t, i):
    loss = t.loss(i)
    loss.backward(retain_graph=True)
    t.update(loss)


def unfrozen(t, i):
    t.n.first.requires_grad_(i > 0)
    t.update(t.loss(i))


def unfrozen_around(t, i):
    """Without a forward of the wrapper."""
    t.n.first.requires_grad_(i > 0)
    around(t, i)


def frozen():
    return changed(Net(), lambda net: net.first.requires_grad_(False))


unaveraged.of("the last backward is under no_sync", unsent, same=(), refused={1: r"no_sync\(\)", 2: r"no_sync\(\)"})


def inner_calls(t, i):
    """Of which no gradient is left."""
    loss = t.loss(i)
    t.note(torch.autograd.grad(t.n(t.batch(10 + i)).square().mean(), t.n.last.weight)[0])
    with torch.no_grad():
        t.note(t.n(t.batch(20 + i)))
    loss.backward()
    t.n(t.batch(30 + i))
    t.m(t.batch(30 + i))
    t.update(None)


def dropped(t, i):
    with zero.no_sync(t.m):
        t.loss(10 + i).backward()
    t.n(t.batch(i)).square().mean().backward()
    t.n.zero_grad()
    t.update(t.loss(i))


unaveraged.of("the inner module is called for other things", inner_calls, same={1, 2})
unaveraged.of("gradients that were not averaged are dropped", dropped, same={1})
test_unaveraged = unaveraged.tests()


def unused(t, i):
    """A layer that no rank uses in one step, and one rank alone in another."""
    x = t.n.first(t.batch(i))
    t.update((x if i == 0 or (i == 1 and t.rank == 0) else t.n.last(x)).square().mean())


def accumulated(t, i):
    """Averages of before count on, whether or not a backward reaches them again."""
    t.loss(i).backward()
    t.m(t.batch(10 + i)).square().mean().backward()
    t.update(t.n.first(t.batch(20 + i)).square().mean())


class Trained:
    """The net at a stage; at stage 0 each rank has its own gradients, which are averaged by hand before a step."""

    def __init__(self, net: nn.Module, stage: int) -> None:
        self.n, self.stage, self.rank = net, stage, torch.distributed.get_rank()
        self.m, self.o = net, momentum(net.parameters())
        if stage:
            self.m, self.o = zero.setup(net, self.o, stage=stage)

    def run(self, act: Callable[[Any, int], None], step: int) -> None:
        act(self, step)
        if not self.stage:
            average_gradients(self.n)
        self.o.step()
        self.o.zero_grad()

    def batch(self, i):
        return data(4, WIDTH, rank=self.rank, step=i)

    def loss(self, i):
        return self.m(self.batch(i)).square().mean()

    def update(self, loss):
        loss.backward()


@ranks.on(2)
def test_averages_are_added_to_where_they_lie_and_freed_with_the_gradients(rank, world):
    model, optimizer = zero.setup(Net(), momentum, stage=1)
    lying = []
    for step in range(2):
        model(data(4, WIDTH, rank=rank, step=step)).square().mean().backward()
        lying.append([param.grad.data_ptr() for param in model.parameters()])
    assert lying[0] == lying[1]
    buffer = weakref.ref(next(model.parameters()).grad.untyped_storage())
    optimizer.zero_grad()
    while buffer() is not None:  # until the run's time is up: Gloo's threads keep it for a moment
        time.sleep(0.001)


ACTS = around, around_parts, twice, again, unfrozen, unfrozen_around, unused, accumulated


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
@ranks.on("world")
def test_the_mean_over_the_ranks_is_stepped(rank, world, stage, act):
    build = frozen if act in (unfrozen, unfrozen_around) else Net
    both = [Trained(build(), at) for at in (0, stage)]
    for step in range(4):
        for one in both:
            one.run(act, step)
    expected, found = (one.n.state_dict() for one in both)
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())


@ranks.on(2)
def test_a_forward_under_no_sync_within_an_averaged_backward_counts(rank, world):
    net = nn.Linear(WIDTH, WIDTH)
    model, optimizer = zero.setup(net, momentum, stage=1)
    with zero.no_sync(model):
        inner = model(data(4, WIDTH, rank=rank))
    model(inner).square().mean().backward()
    mine, others = net.weight.grad, net.weight.grad.clone()
    torch.distributed.broadcast(others, 0)
    assert torch.equal(mine, others)
    optimizer.step()


@ranks.on(2)
def test_the_model_of_stage_1_is_pickled_as_that_of_stage_0(rank, world):
    model, _ = zero.setup(Stack(), momentum, stage=1)
    if rank == 0:
        copy, x = pickle.loads(pickle.dumps(model)), data(4, WIDTH, rank=0)
        with torch.no_grad():
            assert torch.equal(copy(x), model.module(x))
        assert "averages no gradients" in ranks.refusal(lambda: copy(x))


class AsksFirst(torch.optim.Optimizer):
    """Steps what requires a gradient. Keeps a count of its steps under no parameter, if it is told so."""

    def __init__(self, params, lr=0.1, counts=False):
        super().__init__(params, {"lr": lr, "counts": counts})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["counts"]:
                self.state["all"] = {"steps": 1}
            for param in group["params"]:
                if param.grad is not None and param.requires_grad:
                    self.state[param].setdefault("sums", torch.zeros_like(param)).add_(param.grad)
                    param.sub_(self.state[param]["sums"], alpha=group["lr"])


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_a_parameter_that_is_unfrozen_is_stepped_by_who_asks_whether_it_is_trained(rank, world, stage):
    net = Stack()
    frozen = next(net.parameters()).requires_grad_(False)
    model, optimizer = zero.setup(net, AsksFirst(net.parameters()), stage=stage)
    before = zero.full_state_dict(model, to=None)
    take_step(optimizer, loss_on(rank, 0)(model))
    frozen.requires_grad_(True)
    take_step(optimizer, loss_on(rank, 1)(model))
    after = zero.full_state_dict(model, to=None)
    assert not any(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_state_of_no_parameter_is_refused_where_it_would_be_lost(rank, world, stage):
    net = Stack()
    model, optimizer = zero.setup(net, AsksFirst(net.parameters(), counts=True), stage=stage)
    take_step(optimizer, loss_on(rank, 0)(model))
    text = refusal(lambda: zero.full_optimizer_state_dict(model, optimizer, to=None))
    assert "keeps state under 'all', which is no parameter" in text
    plain = Stack()
    built = AsksFirst(plain.parameters(), counts=True)
    take_step(built, loss_on(0, 0)(plain))
    if stage < 3:  # at stage 3 it stays where it is
        assert "keeps state under 'all'" in refusal(lambda: zero.setup(plain, built, stage=stage))


@pytest.mark.parametrize(("stage", "way"), [(0, "zero"), *((n, way) for n in (1, 2, 3) for way in ("zero", "torch"))])
@ranks.on(2)
def test_state_of_another_order_in_memory_is_loaded_for_fused_steps(rank, world, stage, way):
    """Of a contiguous weight into one of channels_last. torch's own load of a plain optimizer leaves it as it is."""
    adam = partial(Adam, lr=0.1, fused=True)

    def net(memory_format):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).to(memory_format=memory_format)

    def step(model, optimizer, number):
        take_step(optimizer, model(data(2, 2, 4, 4, rank=rank, step=number)).square().mean())

    found = {}
    for order in (torch.contiguous_format, torch.channels_last):
        first = net(torch.contiguous_format)
        one = zero.setup(first, adam(first.parameters()), stage=2, partition="whole")
        step(*one, 0)
        weights, state = zero.full_state_dict(one[0], to=None), zero.full_optimizer_state_dict(*one, to=None)
        second = net(order)
        cut = {"partition": "whole"} if stage else {}
        model, optimizer = zero.setup(second, adam(second.parameters()), stage=stage, **cut)
        zero.load_full_state_dict(model, weights)
        load = partial(zero.load_full_optimizer_state_dict, model, optimizer)
        (load if way == "zero" else optimizer.load_state_dict)(state)
        step(model, optimizer, 1)
        found[order] = zero.full_state_dict(model, to=None)
    for name, expected in found[torch.contiguous_format].items():
        torch.testing.assert_close(found[torch.channels_last][name], expected, rtol=0, atol=1e-6)
