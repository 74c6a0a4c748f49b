"""What users and tools do with any torch optimizer: hooks, closures, arguments of step, methods of the inner one,
copies; and what ShardedDDP does to an optimizer that has already stepped."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import ranks
import zero
from assertions import same
from optimizers import MOMENTUM, ByParameter
from ranks import refusal
from rows import Rows, changed, trains
from runs import at_stage, average_gradients, distributed, take_step, train, weights
from zoo import Stack, built, loss_on, odd_loss

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


test_rows = row.tests()


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
