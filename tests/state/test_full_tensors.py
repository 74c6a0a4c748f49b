"""Weights and state as streams: full_tensors out of any stage, and pairs of name and tensor into any other."""

import copy
import io
import re
from collections import OrderedDict
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adam

import gpus
import matrix
import ranks
import zero
from assertions import same
from examples import run_example
from optimizers import ByParameter, Moments
from ranks import refusal
from runs import loss_on, take_step, train
from zoo import Stack, TiedBlocks, built, data

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


class Counting(ByParameter):
    """Its state has a number, and a tensor without dimensions."""

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["steps"] = state.get("steps", 0) + 1
        state["scale"] = state.get("scale", torch.ones(())) * 0.5
        average = state.setdefault("average", torch.zeros_like(param))
        average.lerp_(param.grad, 0.5)
        param.sub_(average, alpha=group["lr"] * float(state["scale"]) / state["steps"])


class Tied(Stack):
    """The first and the last layer are one; one buffer is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.first
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("scale", torch.ones(2))


def trained(rank: int, stage: int, optim: Any = Adam, net: Any = Tied, **how: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, optimizer = zero.setup(net(), optim, stage=stage, **how)
    for step in range(2):
        loss_on(rank, step)(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("optim", [Adam, MOMENTUM, Counting])
@ranks.on(2)
def test_what_comes_out_of_one_stage_goes_into_any_other(rank, world, optim):
    expected: dict[str, Tensor] = {}
    for stage, how in ((0, {}), (1, {}), (2, {"partition": "whole"}), (3, {}), (3, {"partition": "whole"})):
        model, optimizer = trained(rank, stage, optim, **how)
        found = dict(zero.full_tensors(model, optimizer, to=None))
        expected = expected or found
        same(found, expected, f"of stage {stage}")
        kinds = {type(value["steps"]) for value in optimizer.state.values() if "steps" in value}
        assert kinds <= {int}
        assert not any(name.startswith("last") or name == "mask" for name in found), "tied weights come once"
        assert {value.device.type for value in found.values()} == {"cpu"}
        for alone in (False, True):
            torch.manual_seed(7)
            other, fresh = zero.setup(Tied(), optim, stage=(stage + 1) % 4)
            items = [*found.items()] if rank == 0 or not alone else None
            weights = None if items is None else (item for item in items if "/" not in item[0])
            state = None if items is None else (item for item in items if "/" in item[0])
            zero.load_full_state_dict(other, weights)
            zero.load_full_optimizer_state_dict(other, fresh, state)
            assert {type(value["steps"]) for value in fresh.state.values() if "steps" in value} <= {int}
            same(dict(zero.full_tensors(other, fresh, to=None)), expected, "what was loaded")
            for one, other_one in ((model, optimizer), (other, fresh)):
                one.zero_grad()
                loss_on(rank, 5)(one).backward()
                other_one.step()
            same(zero.full_state_dict(other, to=None), zero.full_state_dict(model, to=None), "a step later")
            model, optimizer = trained(rank, stage, optim, **how)


class Named(nn.Linear):
    """A parameter's name ends as that of extra state."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.my_extra_state = nn.Parameter(torch.ones(3))


@ranks.on(2)
def test_a_group_without_state_lacks_none_and_a_name_like_extra_states_is_a_tensors(rank, world):
    outcomes = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = Named()
        groups = [{"params": [net.weight], "momentum": 0.0}, {"params": [net.bias, net.my_extra_state]}]
        model, optimizer = zero.setup(net, SGD(groups, 0.1, momentum=0.9), stage=1 + 2 * seed)
        if seed == 0:
            (model(torch.ones(1, 3)) * net.my_extra_state).sum().backward()
            optimizer.step()
            weights = zero.full_state_dict(model)
            state = [(name, one) for name, one in zero.full_tensors(model, optimizer) if "/" in name]
        else:
            zero.load_full_state_dict(model, weights or None)
            zero.load_full_optimizer_state_dict(model, optimizer, state or None)
        outcomes.append(dict(zero.full_tensors(model, optimizer, to=None)))
    same(*outcomes, "loaded")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks.on(2, timeout=30)
def test_breaking_off_early_leaves_the_model_usable(rank, world, stage):
    model, optimizer = trained(rank, stage)
    for taken in (1, 3):
        for number, _ in enumerate(zero.full_tensors(model, optimizer, to=0), 1):
            if number == taken:
                break
        for number, _ in enumerate(zero.full_tensors(model, optimizer, to=None), 1):
            if number == taken:  # on every rank
                break
    loss_on(rank, 0)(model).backward()
    optimizer.step()
    assert bool(zero.full_state_dict(model, to=0)) == (rank == 0)


@pytest.mark.parametrize("stage", [1, 3])
@ranks.on(2, timeout=30)
def test_one_that_goes_on_alone_raises(rank, world, stage):
    model, optimizer = trained(rank, stage)

    def iterate() -> None:
        for _ in zero.full_tensors(model, to=None):
            if rank == 0:
                break

    told = ranks.refusal(iterate)
    assert ("broken off zero.full_tensors" in told) == (rank == 1), told
    loss_on(rank, 0)(model).backward()
    optimizer.step()


@ranks.on(4)
def test_replicas_send_once(rank, world):
    mesh = init_device_mesh("cpu", (2, 2))
    hybrid = {"device_mesh": mesh, "sharding_strategy": "HYBRID_SHARD"}
    model = zero.FSDP(Tied(), **hybrid)
    optimizer = Adam(model.parameters())
    loss_on(rank, 0)(model).backward()
    optimizer.step()
    everywhere = dict(zero.full_tensors(model, optimizer, to=None))
    for to in (0, 3):
        found = dict(zero.full_tensors(model, optimizer, to=to))
        same(found, everywhere if rank == to else {}, "on one rank")
        full = zero.full_optimizer_state_dict(model, optimizer, to=to)
        assert bool(full) == (rank == to)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks.on(2, timeout=30)
def test_a_stream_of_state_that_ends_early_changes_nothing(rank, world, stage):
    model, optimizer = trained(rank, stage)
    before = state_of(model, optimizer)
    doubled = [(name, 2 * value) for name, value in before]
    load = partial(zero.load_full_optimizer_state_dict, model, optimizer)
    for alone in (False, True):
        for length in (1, len(doubled) // 2, len(doubled) - 1):
            given = iter(doubled[:length]) if rank == 0 or not alone else None
            told = ranks.refusal(partial(load, given))
            words = re.search(r"ValueError: .*no state for (\d+) entries, such as '(.*?)'", told)
            assert words and int(words[1]) == len(doubled) - length, told
            assert words[2] in [name for name, _ in doubled[length:]], told
    same(dict(state_of(model, optimizer)), dict(before), "nothing has changed")
    model.module.first.bias.requires_grad_(False)
    load([one for one in doubled if "first.bias" not in one[0]])  # of a frozen parameter there need not be any
    found = dict(state_of(model, optimizer))
    assert all(torch.equal(found[name], value) for name, value in doubled if "first.bias" not in name)


@pytest.mark.parametrize("alone", [False, True], ids=["on every rank", "on the first"])
@pytest.mark.parametrize("stage", [1, 3])
@ranks.on(2, timeout=30)
def test_a_stream_is_asked_for_a_tensor_once_the_one_before_is_free(rank, world, stage, alone):
    model, optimizer = trained(rank, stage)
    held: list[ReferenceType[Tensor]] = []

    def read(pairs: Any) -> Any:
        for name, value in pairs:
            assert not any(one() is not None for one in held), name
            copy = value.clone()
            if copy.dim():
                held.append(ref(copy))
            yield name, copy
            del copy

    states = state_of(model, optimizer)
    weights = [*zero.full_state_dict(model, to=None).items()]
    zero.load_full_state_dict(model, read(weights) if rank == 0 or not alone else None)
    assert len(held) == (len(weights) if rank == 0 or not alone else 0)
    zero.load_full_optimizer_state_dict(model, optimizer, read(states) if rank == 0 or not alone else None)
    same(dict(state_of(model, optimizer)), dict(states), "the same again")


def state_of(model: nn.Module, optimizer: Any) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in zero.full_tensors(model, optimizer, to=None) if "/" in name]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks.on(2, timeout=30)
def test_names_may_be_those_of_distributed_data_parallel(rank, world, stage):
    model, optimizer = trained(rank, stage, net=Stack)
    found = {f"module.{name}": 2 * value for name, value in zero.full_tensors(model, optimizer, to=None)}
    weights, state = ({name: one for name, one in found.items() if ("/" in name) == is_state} for is_state in (0, 1))
    for given in (weights, iter(weights.items()), iter(weights.items()) if rank == 0 else None):
        zero.load_full_state_dict(model, given)
    zero.load_full_optimizer_state_dict(model, optimizer, iter(state.items()))
    same({f"module.{name}": value for name, value in zero.full_tensors(model, optimizer, to=None)}, found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks.on(2, timeout=30)
def test_hooks_on_loading_are_called_however_the_state_is_given(rank, world, stage):
    model, optimizer = trained(rank, stage)
    full, stream = zero.full_optimizer_state_dict(model, optimizer, to=None), state_of(model, optimizer)
    seen: list[Any] = []

    def before(one: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(one is optimizer)
        assert {*state_dict["state"]} <= {*range(len([*model.parameters()]))}
        groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    for given in (full, iter(stream), full if rank == 0 else None, iter(stream) if rank == 0 else None):
        optimizer.param_groups[0]["lr"] = 0.1
        zero.load_full_optimizer_state_dict(model, optimizer, given)
        assert seen == [True, "loaded"] and optimizer.param_groups[0]["lr"] == 0.5
        seen.clear()
    same(dict(state_of(model, optimizer)), dict(stream))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks.on(2, timeout=30)
def test_a_hook_on_loading_that_raises_on_one_rank_does_on_every_rank(rank, world, stage, tmp_path):
    model, optimizer = trained(rank, stage)
    full = zero.full_optimizer_state_dict(model, optimizer, to=None)
    zero.checkpoint.save(tmp_path, model, optimizer)

    def after(_: Any) -> None:
        if rank == 1:
            raise OSError("a hook of the user's")

    optimizer.register_load_state_dict_post_hook(after)
    load = partial(zero.load_full_optimizer_state_dict, model, optimizer)
    told = [ranks.refusal(partial(load, given)) for given in (full, full if rank == 0 else None)]
    told.append(ranks.refusal(lambda: zero.checkpoint.load(tmp_path, model, optimizer)))
    assert all("a hook of the user's" in one for one in told), told


class WithExtra(nn.Linear):
    """Keeps what it is given."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRA: list[Any] = [
    {"steps": 3, 4: [torch.arange(3), {"scale": torch.ones(())}]},
    *(OrderedDict(names=("a", None)), {torch.bfloat16}, b"bytes", [], np.float64(2.0), torch.ones(2, 2), 3, None),
]


@ranks.on(2, timeout=30)
def test_extra_state_of_any_kind_is_loaded_from_a_stream_that_the_first_alone_has(rank, world):
    plain = nn.Sequential(*(WithExtra(2, 2) for _ in EXTRA))
    for layer, extra in zip(plain, EXTRA, strict=True):
        layer.extra = extra
    saved = plain.state_dict()
    for stage in range(4):
        model, _ = zero.setup(nn.Sequential(*(WithExtra(2, 2) for _ in EXTRA)), Adam, stage=stage)
        zero.load_full_state_dict(model, iter(saved.items()) if rank == 0 else None)
        same(dict(zero.full_state_dict(model, to=None)), dict(saved), f"at stage {stage}")
        unknown = iter([("0._extra_state", {"of": plain})]) if rank == 0 else None
        told = ranks.refusal(partial(zero.load_full_state_dict, model, unknown))
        assert "rank 0, which alone" in told and "Sequential" in told, told


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks.on(2, timeout=30)
def test_streams_of_other_names_are_refused_on_every_rank_where_they_need_not_fit(rank, world, stage):
    model, _ = trained(rank, stage)
    weights = zero.full_state_dict(model, to=None)
    if rank == 1:
        weights.pop("blocks.0.up.weight")
    told = ranks.refusal(lambda: zero.load_full_state_dict(model, iter(weights.items()), strict=False))
    assert "differ between ranks" in told and "blocks.0.up.weight" in told, told


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks.on(2)
def test_an_engine_takes_the_weights_of_a_trainer(rank, world, stage):
    """The example."""
    differs = run_example("weights_to_an_engine", written="stage=3", instead=f"stage={stage}")["differs"]
    assert (differs == 0.0) == (rank == 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks.on(2, timeout=30)
def test_a_state_that_one_rank_alone_cannot_load_is_refused_on_every_rank(rank, world, stage):
    model, optimizer = trained(rank, stage)
    full = zero.full_optimizer_state_dict(model, optimizer, to=None)
    if rank == 1:
        full["param_groups"] = [full["param_groups"][0], full["param_groups"][0]]
    told = ranks.refusal(partial(zero.load_full_optimizer_state_dict, model, optimizer, full))
    assert "parameter group" in told, told
    loss_on(rank, 0)(model).backward()
    optimizer.step()


# Full weights and optimizer state: in from every rank or from rank 0 alone, and out, at every stage; what does not
# fit is refused on every rank, and changes nothing.


OPTIMIZERS: dict[str, Any] = {
    "adam": partial(Adam, lr=0.01, betas=(0.8, 0.9)),
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
}
HOWS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2, whole": {"stage": 2, "partition": "whole"},
    "3": {"stage": 3},
    "3, whole": {"stage": 3, "partition": "whole"},
    "3, offloaded": {"stage": 3, "offload": zero.CPUOffload(pin_memory=False)},
}


def losses(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    return [take_step(optimizer, model(data(8, 7, rank=rank, step=step)).square().mean()) for step in range(2)]


def saved(optim: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and the state that a plain training has saved."""
    torch.manual_seed(3)
    model = TiedBlocks(7)
    optimizer = optim(model.parameters())
    losses(model, optimizer, 0)
    return copy.deepcopy(dict(model.state_dict())), copy.deepcopy(optimizer.state_dict())


def groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "param_names"} for group in state["param_groups"]]


def from_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.slow
@matrix.combined("how, optim, world", HOWS, OPTIMIZERS, [2, 3, 1])
@ranks.on("world")
def test_full_weights_and_state_go_in_and_come_out(rank, world, how, optim):
    weights, state = saved(OPTIMIZERS[optim])
    plain, plain_optimizer = zero.setup(TiedBlocks(7), OPTIMIZERS[optim], stage=0)
    zero.load_full_state_dict(plain, weights)
    plain_optimizer.load_state_dict(copy.deepcopy(state))
    expected = losses(plain, plain_optimizer, rank)
    for given in (True, rank == 0):
        model, optimizer = both = zero.setup(TiedBlocks(7), partial(OPTIMIZERS[optim], lr=1.0), **HOWS[how])
        assert zero.load_full_state_dict(model, weights if given else None) == ([], [])
        zero.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(state) if given else None)
        for to in (0, world - 1, None):
            found, found_state = zero.full_state_dict(model, to=to), zero.full_optimizer_state_dict(*both, to=to)
            if to in (None, rank):
                same(found, weights)
                same(from_file(found_state)["state"], state["state"])
                assert groups(found_state) == groups(state)
            else:
                assert not found and not found_state
        assert losses(model, optimizer, rank) == pytest.approx(expected, rel=0.0 if world < 3 else 1e-5, abs=0)


def changed(full: dict[str, Any], of: str, change: Any) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(full)
    change(made[of])
    return made


def reshape(states: dict[Any, Any]) -> None:
    states[0].update(exp_avg=torch.zeros(1, 2))


def texts(states: dict[Any, Any]) -> None:
    """As keys become on their way through JSON, of which nothing would be loaded."""
    for key in [*states]:
        states[str(key)] = states.pop(key)


LAST = "head.bias"


def streaming(full: dict[str, Any]) -> Any:
    yield LAST, full[LAST]
    raise OSError("the disk is gone")


WEIGHTS: dict[str, tuple[Any, str]] = {
    "of another shape": (lambda full: TiedBlocks(9).state_dict(), r"(?s)size mismatch for blocks.0.0.weight"),
    "without a name": (lambda full: dict([*full.items()][1:]), r"(?s)Missing key.*blocks.0.0.weight"),
    "with extra state": (lambda full: {**full, "head._extra_state": 3}, "head._extra_state"),
    "of none": (lambda full: {}, "load_full_state_dict: no rank was given any"),
    "streamed, without values": (lambda full: iter([(LAST, full[LAST].to("meta"))]), "ValueError.*out of meta tensor"),
    "streamed, of other names": (
        lambda _: iter([("no", torch.ones(2))]),
        "missing .*blocks.0.*unexpected are .'no'",
    ),
    "streamed, of another shape": (lambda _: iter([(LAST, torch.ones(2))]), f"size mismatch for {LAST}"),
    "streamed, of numbers": (lambda _: iter([(LAST, 0.5)]), f"{LAST} is a float, not a tensor; missing are"),
    "streamed, until it fails": (lambda full: streaming(full), "the disk is gone"),
}
STATES: dict[str, tuple[Any, str]] = {
    "of another model": (lambda full: Adam([nn.Parameter(torch.ones(3))]).state_dict(), r"groups of \[1\] param"),
    "of none": (lambda full: {"epoch": 3}, "param_groups"),
    "of a parameter less": (lambda full: changed(full, "param_groups", lambda of: of[0]["params"].pop()), r"\[12\]"),
    "of another shape": (lambda full: changed(full, "state", reshape), r"exp_avg.*\[1, 2\].*\[7, 7\]"),
    "of texts": (lambda full: changed(full, "state", texts), r"none of the parameters .*\(0, 1, 2, ...\)"),
    "of what cannot be sent": (
        lambda full: changed(full, "state", lambda of: of[0].update(odd={1})),
        "the state 'odd' of parameter 0 is a",
    ),
}
STREAMED_STATES: dict[str, tuple[Any, str]] = {
    "streamed, of another shape": (lambda _: iter([(f"{LAST}/exp_avg", torch.ones(2, 2))]), "exp_avg.*of shape .2, 2."),
    "streamed, of nobody": (lambda _: iter([("nobody/exp_avg", torch.ones(2))]), "nobody/exp_avg"),
}
ALONE = ("of none", "of what cannot be sent", "of a rank", "streamed, without values")
"""What rank 0 alone cannot give."""


@pytest.mark.parametrize("stage", range(4))
@ranks.on(2, timeout=30)
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(rank, world, stage):
    weights, state = saved(Adam)
    model, optimizer = zero.setup(TiedBlocks(7), Adam, stage=stage)
    losses(model, optimizer, rank)
    own = copy.deepcopy(optimizer.state_dict())
    zero.load_full_state_dict(model, weights)
    zero.load_full_optimizer_state_dict(model, optimizer, state)
    load = partial(zero.load_full_optimizer_state_dict, model, optimizer)
    tables = [(WEIGHTS, weights, partial(zero.load_full_state_dict, model)), (STATES, state, load)]
    for table, full, give in tables:
        of_a_rank = {"of a rank": (lambda _: own, "one rank's shard"), **STREAMED_STATES} if table is STATES else {}
        for name, (make, words) in (table | of_a_rank).items():
            if not stage and table is STATES and name != "streamed, of nobody":
                continue  # torch itself refuses little there
            alone = (table is WEIGHTS and "streamed" not in name) or name in ALONE
            for everywhere in [False] if alone else [False, True]:
                told = ranks.refusal(partial(give, make(full) if everywhere or rank == 0 else None))
                kinds = ("ValueError: ", "RuntimeError: ", "OSError: ") if table is WEIGHTS else "ValueError: "
                assert told.startswith(kinds) and re.search(words, told), (name, told)
    if stage == 3:
        same(dict(zero.full_state_dict(model, to=None)), weights)
    same(zero.full_optimizer_state_dict(model, optimizer, to=None)["state"], state["state"])


@pytest.mark.parametrize("stage", [1, 3])
@ranks.on(2)
def test_other_ranks_than_there_are_and_weights_of_rank_1_alone_are_refused_on_every_rank(rank, world, stage):
    model, optimizer = zero.setup(TiedBlocks(7), Adam, stage=stage)
    weights = zero.full_state_dict(model, to=1)
    told = ranks.refusal(lambda: zero.load_full_state_dict(model, weights))
    assert told.startswith("ValueError: ") and "only rank 1 of 2 was given any" in told and "rank 0" in told
    for to in (2, -1):
        for call in (zero.full_state_dict, partial(zero.full_optimizer_state_dict, optimizer=optimizer)):
            told = ranks.refusal(lambda to=to, call=call: call(model, to=to))
            assert told.startswith("ValueError: ") and "no rank of the group of 2: choose 0 to 1, or None" in told


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("stage", range(4))
@ranks.raises(2, ValueError, "another optimizer than SGD: .*betas.* and lack dampening, momentum", timeout=15)
def test_state_of_another_class_of_optimizer_is_refused(rank, world, stage, alone):
    """SGD would go on with options and entries of Adam's. alone: rank 0 alone has it."""
    _, state = saved(OPTIMIZERS["adam"])
    model, optimizer = zero.setup(TiedBlocks(7), OPTIMIZERS["sgd"], stage=stage)
    zero.load_full_optimizer_state_dict(model, optimizer, None if alone and rank else state)


# State of every kind that optimizers keep, and that old files hold, at every stage: it comes out and goes in alike.


class Keeping(ByParameter):
    """SGD with momentum, which keeps it in a dictionary beside what else an optimizer may keep."""

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault(
            "kept", {"mean": torch.zeros_like(param), 3: {"steps": torch.tensor(0.0)}, "pair": (1, [None])}
        )
        state["kept"]["mean"].mul_(0.9).add_(param.grad)
        state["kept"][3]["steps"] += 1
        state.update(
            positive=param > 0, seen=torch.full_like(param, 2**24 + 1, dtype=torch.int64), last=0.5 - 1j, nothing=None,
            steps=torch.tensor(int(state["kept"][3]["steps"])), share=np.float32(0.5), count=np.int64(3),
            flag=np.bool_(True), size=torch.Size([2, 3]), betas=(0.9, 0.99),
        )  # fmt: skip
        param.sub_(state["kept"]["mean"], alpha=group["lr"])


class Complex(nn.Module):
    """Complex and real parameters, of no and of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 5)
        self.phase = nn.Parameter(torch.tensor(1 + 2j))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.phases = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.phase * self.scale * self.phases).abs()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 9), nn.Tanh(), nn.Linear(9, 5))


class Historic(ByParameter):
    """Keeps tensors in lists, as Shampoo does."""

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("history", []).append(param.grad.clone())
        state["pair"] = (1, [2, 0.5], ())
        param.sub_(state["history"][0], alpha=group["lr"])


class Narrow(nn.Sequential):
    """Parameters of 16 bits."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 37), nn.Tanh(), nn.Linear(37, 5))
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


NARROW, WIDE = (partial(Moments, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
OFFLOADED = {"offload": zero.CPUOffload()}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "containers": (net, Keeping, {}),
    "complex": (Complex, partial(Adam, lr=0.01, betas=(0.8, 0.9)), {}),
    "lists": (net, Historic, {}),
    "moments in 16 bits": (net, NARROW, {}),
    "moments in 32 bits of parameters in 16": (Narrow, WIDE, {}),
    "all in 16 bits": (Narrow, NARROW, {}),
    "moments in 16 bits, offloaded": (net, NARROW, OFFLOADED),
}


def at(stage: int, kind: str) -> tuple[nn.Module, Any]:
    make, optim, options = KINDS[kind]
    return zero.setup(built(make), optim, stage=stage, **(options if stage else {}))


def plain(value: Any) -> Any:
    """A nest with Python's numbers in place of numpy's, as a checkpoint has them, and tuples in place of sizes."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, torch.Size):
        return tuple(value)
    return value.item() if isinstance(value, np.generic) else value


def same_numbers(found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    """Of numpy's they have the same types, where this rank has any of the parameter."""
    there = found.keys() & expected.keys()
    assert there or not expected
    for number in there:
        for key, value in expected[number].items():
            if isinstance(value, np.generic):
                assert type(found[number][key]) is type(value), key


@pytest.mark.slow
@matrix.combined("kind, stage", KINDS, [1, 2, 3], each=2)
@ranks.on(2)
def test_state_of_any_kind_comes_out_as_at_stage_0_and_goes_in_again(rank, world, tmp_path, kind, stage):
    """And by a checkpoint into another stage."""
    expected, found = at(0, kind), at(stage, kind)
    losses = train(*expected, rank, range(2))
    assert train(*found, rank, range(2)) == losses
    weights, state = deepcopy(zero.full_state_dict(expected[0], to=None)), deepcopy(expected[1].state_dict())
    full, own = deepcopy(zero.full_optimizer_state_dict(*found, to=None)), deepcopy(found[1].state_dict())
    same(plain(full["state"]), plain(state["state"]))
    same_numbers(full["state"], state["state"])
    losses = train(*expected, rank, range(2, 4))
    for given in (full, full if rank == 0 else None, own):
        again = at(stage, kind)
        zero.load_full_state_dict(again[0], weights)
        if given is own:
            by_itself(*again, own)
        else:
            zero.load_full_optimizer_state_dict(*again, deepcopy(given))
        same(plain(zero.full_optimizer_state_dict(*again, to=None)["state"]), plain(state["state"]))
        same_numbers(again[1].state_dict()["state"], state["state"] if stage == 3 else {})
        assert train(*again, rank, range(2, 4)) == losses
    if kind != "lists":
        again = at(3 - stage, kind)
        found[1].param_groups[0]["lr"] = np.float32(0.05)
        zero.checkpoint.save(tmp_path, *found)
        zero.checkpoint.load(tmp_path, *again)
        same(plain(zero.full_optimizer_state_dict(*again, to=None)["state"]), plain(state["state"]))
        assert again[1].param_groups[0]["lr"] == float(np.float32(0.05))


COUNTS: list[Any] = [int] if gpus.ON else [int, Tensor.long]  # on a GPU torch steps by no count of integers


def as_numbers(state: dict[str, Any], kind: Any) -> dict[str, Any]:
    """A state whose counts of steps are numbers, as in files of early versions of torch."""
    states = {
        key: {name: kind(value) if name == "step" else value for name, value in one.items()}
        for key, one in state["state"].items()
    }
    return {**state, "state": states}


def by_itself(model: nn.Module, optimizer: Any, full: dict[str, Any]) -> None:
    if isinstance(model, zero.FSDP):
        model.register_optimizer(optimizer)
    optimizer.load_state_dict(full)


@matrix.combined("optim, stage", ["Adam", "NAdam", "Adagrad", "ASGD"], [1, 2, 3])
@ranks.on(2)
def test_counts_of_steps_may_be_numbers(rank, world, tmp_path, optim, stage):
    build = partial(zero.setup, optimizer=getattr(torch.optim, optim), lr=0.01)
    plain = build(built(net), stage=0)
    train(*plain, rank, range(2))
    weights, full = deepcopy(zero.full_state_dict(plain[0], to=None)), deepcopy(plain[1].state_dict())
    for state in plain[1].state.values():
        state["step"] = int(state["step"])
    zero.checkpoint.save(tmp_path, *plain)
    zero.checkpoint.load(tmp_path, *plain)
    expected = train(*plain, rank, range(2, 4))
    loads = [(load, kind) for load in (zero.load_full_optimizer_state_dict, by_itself) for kind in COUNTS]
    for load, kind in [*loads, (zero.checkpoint.load, None)]:
        model, optimizer = build(built(net), stage=stage)
        if kind is None:
            load(tmp_path, model, optimizer)
        else:
            zero.load_full_state_dict(model, weights)
            load(model, optimizer, deepcopy(as_numbers(full, kind)))
        assert train(model, optimizer, rank, range(2, 4)) == expected, (load, kind)


class Strange(ByParameter):
    """Keeps what only this process knows. where: of the state, or of a dictionary in it."""

    value: Any = None

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["odd"] = self.value
        param.sub_(param.grad, alpha=group["lr"])


STRANGE = [{1}, torch.bfloat16, np.ones(2)]


@pytest.mark.parametrize("stage", [1, 3])
@ranks.on(2, timeout=20)
def test_what_cannot_be_sent_is_refused_by_name_on_every_rank(rank, world, stage):
    for value in STRANGE:
        optim = type("Strange", (Strange,), {"value": value})
        model, optimizer = zero.setup(built(net), optim, stage=stage)
        train(model, optimizer, rank, range(1))
        told = refusal(lambda of=(model, optimizer): zero.full_optimizer_state_dict(*of, to=None))
        assert told.startswith("ValueError") and "'odd'" in told and type(value).__name__ in told, told
        assert "each rank's own state_dict()" in told
