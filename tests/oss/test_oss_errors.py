"""What cannot work raises on every rank, says what was found and what to do, and leaves no rank waiting."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

import ranks
from optimizers import Lamb
from reference import MOMENTUM, Net, built, loss_of, refusal
from zero import OSS, ShardedDDP


def good():
    return [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))]


def exhausted():
    generator = iter(good())
    list(generator)
    return generator


def twice():
    first, second = good()
    return [first, second, first]


def in_two_groups():
    first, second = good()
    return [{"params": [first, second]}, {"params": [second]}]


def computed():
    return [nn.Parameter(torch.zeros(2)), torch.zeros(3, requires_grad=True) * 2]


def named(make):
    return lambda: [(f"layer.{index}", param) for index, param in enumerate(make())]


BAD = {
    "no parameters": (list, "OSS was given no parameters. Pass model.parameters()"),
    "a generator that is used up": (exhausted, "(a generator is used up after one pass)"),
    "empty groups": (lambda: [{"params": []}, {"params": []}], "OSS was given no parameters"),
    "one twice": (
        twice,
        "parameter 2 of group 0 was given before as parameter 0 of group 0: each parameter must be in",
    ),
    "one in two groups": (in_two_groups, "parameter 0 of group 1 was given before as parameter 1 of group 0"),
    "a named one twice": (named(twice), "'layer.2' was given before as 'layer.0'"),
    "a non-leaf": (computed, "parameter 1 of group 0 is not a leaf tensor: it was computed from others. Pass the"),
    "a named non-leaf": (named(computed), "'layer.1' is not a leaf tensor"),
    "a number": (lambda: [*good(), 3], "parameter 2 of group 0 is a int, not a torch.Tensor. Pass model.parameters()"),
    "names alone": (lambda: ["weight", "bias"], "parameter 0 of group 0 is a str, not a torch.Tensor"),
    "a single tensor": (
        lambda: good()[0],
        "OSS was given a Parameter for parameters. Pass an iterable that has an order",
    ),
    "a sparse one": (
        lambda: [torch.eye(2).to_sparse().requires_grad_()],
        "parameter 0 of group 0 has layout torch.sparse_coo",
    ),
    "one on the meta device": (
        lambda: [*good(), *nn.Linear(2, 3, device="meta").parameters()],
        "parameter 2 of group 0 is on the meta device and has no values. Call model.to",
    ),
    "nothing": (lambda: None, "None"),
    "a set, which has no order": (lambda: set(good()), "order"),
    "a set in a group": (
        lambda: [{"params": good()}, {"params": set(good())}],
        "group 1 was given a set for parameters. Pass an iterable that has an order",
    ),
    "a number in a group": (lambda: [{"params": 3}], "group 0 was given a int for parameters. Pass an iterable"),
    "groups and parameters mixed": (lambda: [{"params": good()[:1]}, good()[1]], "parameter"),
}
BAD_OPTIONS = {
    "an unknown partition": ({"partition": "odd"}, "partition='odd' is unknown. Choose 'auto', 'even' or 'whole'."),
    "even with Muon": (
        {"optim": torch.optim.Muon, "partition": "even"},
        "Muon needs each parameter whole: it computes with whole matrices or their rows. Choose partition='whole'",
    ),
    "even with Adafactor": (
        {"optim": torch.optim.Adafactor, "partition": "even"},
        "Adafactor needs each parameter whole",
    ),
    "even with a partial of Muon": (
        {"optim": functools.partial(torch.optim.Muon, lr=0.1), "partition": "even"},
        "Muon needs each parameter whole",
    ),
    "LBFGS": ({"optim": torch.optim.LBFGS}, "LBFGS cannot be sharded. Use it without zero"),
    "a rate that the optimizer refuses": ({"lr": -1.0}, "Invalid learning rate: -1.0"),
}


def assert_refused(rank, where, *, alone=False):
    """where: the rank that is given what is bad; None for all."""
    for name, (make, words) in BAD.items():
        told = refusal(lambda make=make: OSS((make if where in (None, rank) else good)(), SGD, lr=0.1))
        assert told.startswith(("ValueError: ", "TypeError: ")), f"{name}: {told or 'nothing was raised'}"
        assert words in told, f"{name}: {told}"
        assert where is None or f"(on rank {where})" in told, f"{name}: {told}"
        assert not alone or "on rank" not in told, f"{name}: {told}"
    for name, (options, words) in BAD_OPTIONS.items():
        given = {"lr": 0.1} | (options if where in (None, rank) else {})
        told = refusal(lambda given=given: OSS(good(), **given))
        assert told.startswith("ValueError: "), f"{name}: {told or 'nothing was raised'}"
        assert words in told or (where is not None and "differ between ranks" in told), f"{name}: {told}"
        assert not alone or "on rank" not in told, f"{name}: {told}"


@pytest.mark.parametrize("where", [None, 0, 1], ids=["everywhere", "on rank 0", "on rank 1"])
@ranks.on(2, timeout=20)
def test_bad_parameters_and_options_are_refused_on_every_rank_with_the_remedy(rank, world, where):
    assert_refused(rank, where)


@ranks.on(bare=True)
def test_one_process_refuses_the_same(rank, world):
    assert_refused(rank, None, alone=True)


# ------------------------------------------------------------------------------------------ What differs between ranks


def like(*shapes, **options):
    return [(f"p{index}", nn.Parameter(torch.zeros(shape, **options))) for index, shape in enumerate(shapes)]


def frozen():
    params = like((3, 4), (5,))
    params[1][1].requires_grad_(False)
    return params


DIFFERENCES = {
    "shape": (lambda: like((4, 3), (5,)), "p0: float32 [3, 4], trained", "p0: float32 [4, 3], trained"),
    "dtype": (
        lambda: like((3, 4), (5,), dtype=torch.bfloat16),
        "p0: float32 [3, 4], trained",
        "p0: bfloat16 [3, 4], trained",
    ),
    "order": (lambda: like((3, 4), (5,))[::-1], "p0: float32 [3, 4], trained", "p1: float32 [5], trained"),
    "fewer": (lambda: like((3, 4)), "p1: float32 [5], trained", "nothing"),
    "more": (lambda: like((3, 4), (5,), ()), "nothing", "p2: float32 [], trained"),
    "training": (frozen, "p1: float32 [5], trained", "p1: float32 [5], frozen"),
    "name": (
        lambda: [("a", nn.Parameter(torch.zeros(3, 4))), ("p1", nn.Parameter(torch.zeros(5)))],
        "p0: float32 [3, 4], trained",
        "a: float32 [3, 4], trained",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
@ranks.on(3, timeout=8)
def test_parameters_that_differ_between_ranks_are_named_on_every_rank(rank, world, name):
    last = rank == world - 1
    told = refusal(lambda: OSS(DIFFERENCES[name][0]() if last else like((3, 4), (5,)), SGD))
    optimizer = OSS(like((7,)), SGD)  # the group is as good as before
    added = refusal(
        lambda: optimizer.add_param_group({"params": DIFFERENCES[name][0]() if last else like((3, 4), (5,))})
    )
    _, here, there = DIFFERENCES[name]
    assert told.startswith("ValueError: the parameters given to OSS differ between ranks: at position "), told
    assert added.startswith("ValueError: the parameters added to OSS differ between ranks: at position "), added
    for text in (told, added):
        assert f"rank 0 has {here}, rank 2 has {there}. Build the same on every rank, in the same order." in text


@ranks.on(2, timeout=8)
def test_another_order_on_another_rank_is_told_where_names_are_known(rank, world):
    """Without names, parameters of one shape look the same to OSS; ShardedDDP knows the names."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    params = [*model.parameters()]
    optimizer = OSS(params[::-1] if rank else params, SGD, lr=0.1)
    told = refusal(lambda: ShardedDDP(model, optimizer))
    assert told.startswith("ValueError: the parameters given to OSS differ between ranks: at position 0, "), told
    assert "rank 0 has 0.weight, rank 1 has 2.weight. Build the same on every rank, in the same order." in told


@pytest.mark.parametrize("name", ["optimizer", "partition", "groups", "options", "options of a group"])
@ranks.on(2, timeout=8)
def test_options_that_differ_between_ranks_are_told_on_every_rank(rank, world, name):
    one = {
        "optimizer": lambda: OSS(good(), Adam if rank else SGD),
        "partition": lambda: OSS(good(), SGD, partition="whole" if rank else "even"),
        "groups": lambda: OSS(good() if rank else [{"params": param} for param in good()], SGD),
        "options": lambda: OSS(good(), SGD, lr=0.2 if rank else 0.1),
        "options of a group": lambda: OSS([{"params": good(), "lr": 0.2 if rank else 0.1}], SGD),
    }[name]
    told = refusal(one)
    assert told.startswith("ValueError: "), told or "nothing was raised"
    assert "differ between ranks" in told


class Factory:
    """Has no name, and prints as where it lies in memory."""

    def __call__(self, params, **options):
        return SGD(params, **options)


def make_sgd(params, recorder=None, **options):
    return SGD(params, **options)


@ranks.on(2, timeout=8)
def test_the_same_factory_at_different_addresses_is_no_difference(rank, world):
    others = [Factory() for _ in range(1000 * rank)]  # so that addresses differ between ranks
    OSS(good(), Factory(), lr=0.1)
    OSS(good(), functools.partial(make_sgd, recorder=Factory()), lr=0.1)
    assert len(others) == 1000 * rank


def _outside(rank, world):
    group = dist.new_group([0, 1])
    return refusal(lambda: OSS(good(), SGD, group))


def test_a_group_that_this_rank_is_not_in_is_refused_there():
    first, second, third = ranks.run(_outside, 3)
    assert first == second == ""
    assert third.startswith("ValueError: rank 2 of the job is not in the process group that it was given.")
    assert "only on the ranks of the group" in third


@ranks.on(2, timeout=8)
def test_bad_parameters_are_refused_when_they_are_added_too(rank, world):
    first, second = good()
    optimizer = OSS([first], SGD, lr=0.1)
    before = [dict(group) for group in optimizer.param_groups]
    told = {
        "known": refusal(lambda: optimizer.add_param_group({"params": [second, first]})),
        "twice": refusal(lambda: optimizer.add_param_group({"params": [second, second]})),
        "none": refusal(lambda: optimizer.add_param_group({"params": []})),
        "one rank": refusal(lambda: optimizer.add_param_group({"params": [second * 2 if rank else second]})),
    }
    assert [dict(group) for group in optimizer.param_groups] == before
    optimizer.add_param_group({"params": second})
    assert told["known"].startswith("ValueError: parameter 1 of group 0 was given before: each parameter must be in")
    assert told["twice"].startswith("ValueError: parameter 1 of group 0 was given before as parameter 0 of group 0")
    assert told["none"].startswith("ValueError: OSS was given no parameters")
    assert told["one rank"].startswith("ValueError: parameter 0 of group 0 is not a leaf tensor")
    assert told["one rank"].endswith("(on rank 1)")


# ------------------------------------------------------------------------------------------------------ Once it trains


def _moved_on_one_rank(rank, world):
    """Waits for nobody longer than it takes to see that the ranks do different things."""
    model = built()
    optimizer = OSS(model.named_parameters(), SGD, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    if rank == 1:
        model.half()
    return refusal(optimizer.step)


def test_a_model_cast_on_one_rank_ends_the_step_on_every_rank():
    here, there = ranks.run(_moved_on_one_rank, 2, timeout=8)
    assert "was moved, cast or given other data after OSS was built" in there
    assert "rank 1 in a step of OSS that it refuses" in here


def _swapped(groups):
    params = groups[0]["params"]
    params[0], params[1] = params[1], params[0]


EDITS = {
    "removed": (lambda groups: groups[0]["params"].pop(0), "groups of [1, 3], without first.weight. Add a group by"),
    "listed anew": (
        lambda groups: groups[1].update(params=groups[1]["params"][1:]),
        "groups of [2, 2], without norm.w",
    ),
    "a group removed": (lambda groups: groups.pop(), "groups of [2], without middle.weight"),
    "a group appended": (
        lambda groups: groups.append({**groups[0], "params": [nn.Parameter(torch.ones(2))]}),
        "groups of [2, 3, 1], not the same ones",
    ),
    "in another order": (_swapped, "groups of [2, 3], not the same ones in the same order"),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("where", [None, 1], ids=["everywhere", "on rank 1"])
@ranks.on(2, timeout=8)
def test_edited_groups_are_refused_at_the_step_and_none_waits(rank, world, name, where):
    model = built()
    groups = [{"params": model.first.named_parameters("first")}]
    groups += [{"params": [*model.norm.named_parameters("norm"), *model.middle.named_parameters("middle")], "lr": 0.2}]
    optimizer = OSS(groups, SGD, **MOMENTUM)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    if where in (None, rank):
        EDITS[name][0](optimizer.param_groups)
    text = refusal(optimizer.step)
    if where in (None, rank):
        assert text.startswith("RuntimeError: param_groups were edited: OSS was given groups of [2, 3] "), text
        assert EDITS[name][1] in text
        assert "build OSS again" in text
    else:
        assert "rank 1 in a step of OSS that it refuses" in text


@pytest.mark.parametrize("where", ["first", "last"])
@ranks.on(2, timeout=8)
def test_sparse_gradients_are_refused_on_every_rank(rank, world, where):
    embedding = nn.Embedding(5, 3, sparse=True)
    other = nn.Linear(300, 30)  # so that one rank owns all of the embedding
    params = [*embedding.parameters(), *other.parameters()]
    optimizer = OSS(params if where == "first" else params[::-1], SGD, lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    told = refusal(optimizer.step)
    assert told.startswith("RuntimeError: parameter "), told
    assert "has a sparse gradient" in told
    assert "sparse=False" in told


def _failing_factory(rank, world):
    """An optimizer that refuses what it gets on one rank only."""

    def factory(params, **options):
        if rank == 1:
            raise ValueError("no room here")
        return Lamb(params, **options)

    return refusal(lambda: OSS(Net().parameters(), factory, lr=0.1))


def test_an_optimizer_that_cannot_be_built_on_one_rank_raises_on_all():
    first, second = ranks.run(_failing_factory, 2, timeout=8)
    assert "no room here" in second
    assert "no room here" in first, first or "nothing was raised"


class Failing(SGD):
    """Raises in its second step, where it is told to."""

    fails = False
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.fails and self.steps == 2:
            raise ValueError("no room here")
        return super().step(closure)


def _failing_step(rank, world, where):
    model = built()
    optimizer = OSS(model.parameters(), Failing, lr=0.1)
    optimizer.optim.fails = rank in where
    loss_of(model, 0, 0).backward()
    optimizer.step()
    return [refusal(optimizer.step), refusal(optimizer.step)]


def test_an_optimizer_that_raises_on_one_rank_raises_on_all_and_none_waits():
    first, second = ranks.run(_failing_step, 2, args=([1],), timeout=8)
    assert second[0] == "ValueError: no room here"
    assert "out of step: rank 0 is in the step of OSS, but rank 1 in a step of OSS in which its optimizer" in first[0]
    assert first[1].startswith("RuntimeError: ranks are out of step"), "it went on"


def test_an_optimizer_that_raises_on_every_rank_raises_there():
    assert ranks.run(_failing_step, 2, args=([0, 1],), timeout=8) == [["ValueError: no room here", ""]] * 2
