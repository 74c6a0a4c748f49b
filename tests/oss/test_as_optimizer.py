"""What users and tools do with any torch optimizer: hooks, closures, arguments of step, methods of the inner one,
copies; and what ShardedDDP does to an optimizer that has already stepped."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import ranks
import zero
from assertions import same
from optimizers import MOMENTUM, ByParameter
from ranks import refusal
from rows import Rows, adam, changed, trains
from runs import at_stage, average_gradients, distributed, take_step, train, weights
from zoo import FEATURES, OddNet, Stack, built, loss_on, odd_loss

row = Rows("what is done with any torch optimizer", __name__)
EVEN = {"options": {"partition": "even"}, "same": {1, 2}}


def noise(optimizer: Optimizer, *_: Any) -> None:
    """An edit of each gradient by itself, once in place and once by another tensor."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    for param in params:
        param.grad.clamp_(-0.01, 0.02)
        param.grad = param.grad + 0.003


def clip_by_norm(optimizer: Optimizer, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], 1e-3)


def hooked(hook: Callable[..., None]) -> Callable[[Any, int], None]:
    def program(t: Any, i: int) -> None:
        if i < 2:
            t.kept.handle = t.o.register_step_pre_hook(hook)
        trains(t, i)
        t.kept.handle.remove()

    return program


row.of("a hook edits gradients", hooked(noise), optim=adam)
row.of("a hook clips by the norm of a shard", hooked(clip_by_norm), same=(), refused={2: "clip_grad_norm"})


class Extragradient(ByParameter):
    """Asks for gradients twice a step, the second time half a step ahead, and notes in its group how far it is."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float], *, scale: float = 1.0) -> float:
        closure, [group] = torch.enable_grad()(closure), self.param_groups
        loss = closure()
        group["calls"] = group.get("calls", 0) + 1
        before = [param.clone() for param in group["params"]]
        for param in group["params"]:
            param.sub_(param.grad, alpha=0.5 * scale * group["lr"])
        closure()
        for param, old in zip(group["params"], before, strict=True):
            param.copy_(old - scale * group["lr"] * param.grad)
        return loss


class DecayingAll(ByParameter):
    """Decays what has no gradient, too, and past autograd's counts. Has no use for a closure."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.99)
        super().step()

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.data.add_(param.grad, alpha=-group["lr"])


@row(optim=Extragradient, **EVEN)
def a_closure_and_arguments_of_step_reach_the_inner_optimizer(t: Any, i: int) -> None:
    def closure() -> float:
        t.o.zero_grad()
        loss = t.loss(i)
        loss.backward()
        return loss.item()

    t.note(torch.tensor([t.o.step(closure, scale=0.7), t.o.param_groups[0]["calls"]]))


@row(optim=DecayingAll, **EVEN)
def a_closure_that_the_optimizer_ignores_is_not_called(t: Any, i: int) -> None:
    assert t.o.step(lambda: pytest.fail("nobody asked for it")) is None
    trains(t, i)


# ----------------------------------------------------------------------------------- what the inner optimizer can do


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


def evaluates(through: Callable[[Any], Any]) -> Callable[[Any, int], None]:
    def program(t: Any, i: int) -> None:
        trains(t, i)
        through(t.o).eval()
        with torch.no_grad():
            t.loss(7)
        [t.note(param) for param in t.n.parameters()]
        if t.stage:
            assert not hasattr(t.o, "reset") and "shards alone" in refusal(lambda: t.o.reset())
        through(t.o).train()

    return program


row.of("weights are switched", evaluates(lambda o: o), optim=Averaged, **EVEN)
row.of("the inner optimizer switches weights", evaluates(lambda o: getattr(o, "optim", o)), optim=Averaged, **EVEN)


def half_frozen(t: Any, i: int) -> None:
    t.n.first.requires_grad_(False)
    trains(t, i)


for cut in ("auto", "whole"):
    how = {"optim": DecayingAll, "options": {"partition": cut}, "ddp": {"find_unused_parameters": True}}
    row.of(f"a step writes frozen parameters, cut {cut}", half_frozen, **how, same={1, 2})
test_rows = row.tests()


@ranks.on(2)
def test_steps_that_never_find_a_gradient_warn_once(rank, world):
    optimizer = zero.OSS(built().parameters(), SGD, lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.step()
    told = [str(one.message) for one in found if "no gradient" in str(one.message)]
    assert len(told) == 1
    assert "assign=False" in told[0]


@ranks.on(2)
def test_hooks_are_called(rank, world):
    model, optimizer = at_stage(2, built(), Adam, lr=0.01)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_pre_hook(lambda one: seen.append(one is optimizer))
    optimizer.register_state_dict_post_hook(lambda one, found: {**found, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda one, found: seen.append(found.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append("loaded"))
    train(model, optimizer, rank, range(2))
    found = optimizer.state_dict()
    optimizer.load_state_dict(found)
    assert found["more"] == 1, "the caller's dictionary stays as it is"
    assert seen == ["before", "after"] * 2 + [True, 1, "loaded"]


def deep() -> nn.Module:
    """Many parameters in one buffer, one of them under two names."""
    return changed(Stack(blocks=10), lambda net: setattr(net, "tied", net.blocks[3].up.weight))


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_copies_and_pickles_of_the_model_have_its_values(rank, world, stage):
    """Nor do saved ones take more: parameters are views of shared buffers, which torch.save stores once."""
    inner = deep()
    model, optimizer = at_stage(stage, inner, SGD, **MOMENTUM)
    take_step(optimizer, loss_on(rank, 0)(model))
    values = copy.deepcopy(dict(inner.state_dict()))
    for one in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner)), loaded(saved(inner))):
        same(dict(one.state_dict()), values, "a copy")
        assert one.tied is one.blocks[3].up.weight
        with torch.no_grad():
            one.tied.add_(1.0)
        same(dict(inner.state_dict()), values, "the model that was copied")
        loss_on(rank, 1)(one).backward()
    same(dict(loaded(saved(inner.state_dict()))), values, "the state dict")
    sizes, plain_sizes = [[len(pickle.dumps(copy.deepcopy(each))), len(saved(each))] for each in (inner, deep())]
    assert all(size <= 1.2 * plain for size, plain in zip(sizes, plain_sizes, strict=True))


@ranks.on(2)
def test_copying_and_pickling_what_is_spread_over_ranks_is_refused(rank, world):
    model, optimizer = at_stage(2, built(), SGD, **MOMENTUM)
    for value, remedy in ((optimizer, "state_dict"), (model, "module")):
        for call in (copy.deepcopy, copy.copy, pickle.dumps, saved):
            told = refusal(lambda: call(value))  # noqa: B023 - called at once
            assert "TypeError" in told and remedy in told, f"{call.__name__}: {told}"


def one_weight() -> nn.Module:
    """Under a whole cut one rank has no state."""
    return nn.Linear(FEATURES, 4, bias=False)


@pytest.mark.parametrize(
    ("make", "cut", "optim", "options"),
    [
        (OddNet, "even", SGD, MOMENTUM),
        (OddNet, "whole", Adam, {"lr": 0.01}),
        (one_weight, "whole", Adagrad, {"lr": 0.1}),
    ],
)
@ranks.on(2)
def test_the_buckets_of_sharded_ddp_take_over_state_of_earlier_steps(rank, world, make, cut, optim, options):
    """Or what was loaded of it into another optimizer, before that is wrapped."""
    plain = distributed(built(make))
    alone = optim(plain.parameters(), **options)
    expected = train(plain, alone, rank, range(4))[2:], weights(plain), alone.state_dict()
    for size, loads in ((None, True), (0, False), (0, True), (750, False), (1 << 22, True)):
        inner = built(make)
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
