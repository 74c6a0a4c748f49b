"""What cannot work is refused by every rank, also where one alone is wrong: with what was found and the remedy."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from tempfile import gettempdir
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import LBFGS, SGD, Adafactor, Adam, Muon
from torch.testing._internal.two_tensor import TwoTensor

import ranks
import zero
from ranks import refusal
from runs import sgd


@dataclass(frozen=True, kw_only=True)
class Row:
    """call: builds what is right, or wrong where it is told so. facts: patterns that the error has.

    differs: what is wrong on one rank would do on all. alone: whether a single rank may be wrong.
    """

    call: Callable[[bool], object]
    facts: tuple[str, ...]
    differs: bool = False
    alone: bool = True
    error: str = "ValueError: "

    @property
    def wrong(self) -> list[tuple[int, ...]]:
        return [(1,)] if self.differs else [(0, 1), (0,), (1,)] if self.alone else [(0, 1)]

    def check(self, name: str, wrong: tuple[int, ...], text: str) -> None:
        """text: what a rank was told where those ranks were wrong, in the place of what others had."""
        facts = [f"^{self.error}", *self.facts]
        if self.differs or (len(wrong) == 1 and "differ between ranks" in text):
            facts = [f"^{self.error}", "differ between ranks", *(self.facts if self.differs else ())]
        elif self.alone and wrong:
            facts.append(rf"\(on rank {', '.join(map(str, wrong))}\)")
        missing = [fact for fact in facts if not re.search(fact, text)]
        assert not missing, f"{name}, {wrong} wrong: {text or 'nothing was raised'} lacks {missing}"


ROWS: dict[str, Row] = {}


def row(name: str, call: Callable[[bool], object], *facts: str, **how: Any) -> None:
    assert name not in ROWS
    ROWS[name] = Row(call=call, facts=facts, **how)


ONE = nn.Parameter(torch.zeros(2))


def good() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))


def of_params(name: str, wrong: Callable[[], Any], *facts: str) -> None:
    row(f"OSS of {name}", lambda bad: zero.OSS((wrong if bad else good)(), sgd), *facts)


of_params("no parameters", list, "no parameters", r"model\.parameters\(\)")
of_params("a generator that is used up", lambda: iter(()), "generator is used up")
of_params("one twice", lambda: [*good(), ONE, ONE], "parameter 3 of group 0", "as parameter 2 of group 0")
of_params("one in two groups", lambda: [{"params": [ONE]}] * 2, "parameter 0 of group 1", "as parameter 0 of group 0")
of_params("a non-leaf", lambda: [ONE, ONE * 2], "parameter 1 of group 0", "leaf", r"nn\.Parameter")
of_params("a number", lambda: [*good(), 3], "parameter 2 of group 0 is a int", r"torch\.Tensor", "parameters\\(\\)")
of_params("a name", lambda: [*good(), "weight"], "parameter 2 of group 0 is a str", "parameters\\(\\)")
of_params("one in shared memory", lambda: [nn.Parameter(torch.zeros(2)).share_memory_()], r"share_memory\(\)", "clone")
of_params("one of another library", lambda: [nn.Parameter(TwoTensor(ONE, ONE))], "TwoTensor", "other library")
of_params("a single tensor", lambda: ONE, "a Parameter for parameters", "order")
of_params("a sparse one", lambda: [torch.eye(2).to_sparse().requires_grad_()], "parameter 0", r"torch\.sparse_coo")
of_params("one without values", lambda: nn.Linear(2, 3, device="meta").parameters(), "meta device", r"model\.to")
of_params("a set in a group", lambda: [{"params": good()}, {"params": set(good())}], "group 1", "set", "order")


def of_model(name: str, wrong: Callable[[], nn.Module], *facts: str, **how: bool) -> None:
    row(f"FSDP of {name}", lambda bad: zero.FSDP((wrong if bad else net)(), sync_module_states=False), *facts, **how)


of_model("no parameters", nn.ReLU, "without parameters", "nothing to shard")
of_model("an FSDP", lambda: zero.FSDP(net()), "is an FSDP already", "auto_wrap_policy", alone=False)
of_model("one without values", lambda: nn.Linear(2, 3, device="meta"), "'weight' is on the meta device")
of_model("one made for inference", torch.inference_mode()(net), r"'0\.weight' was made .* torch\.inference_mode")


def factory(params: Any) -> SGD:
    raise ValueError("no room here")


def in_groups(lr: float = 0.1) -> list[dict[str, Any]]:
    return [{"params": good(), "lr": lr}, {"params": [ONE]}]


BUILDS: dict[str, Callable[..., object]] = {
    "OSS": lambda params=None, optim=SGD, **options: zero.OSS(params or in_groups(), optim, **options),
    "FSDP": lambda **options: zero.FSDP(net(), **options),
    "stage 2": lambda optim=sgd, **options: zero.setup(net(), optim, stage=2, **options),
    "stage 3": lambda optim=sgd, stage=3, **options: zero.setup(net(), optim, stage=stage, **options),
}


def of_options(at: str, name: str, *facts: str, differs: bool = False, **wrong: Any) -> None:
    name = f"{at} {'and another of' if differs else 'with'} {name}"
    row(name, lambda bad: BUILDS[at](**(wrong if bad else {})), *facts, differs=differs)


for build in BUILDS:
    of_options(build, "an unknown partition", "partition='odd'", "'auto'", "'even'", "'whole'", partition="odd")
for build in ("OSS", "stage 3"):
    of_options(build, "LBFGS", "LBFGS", "cannot be sharded", optim=LBFGS)
    of_options(build, "Adafactor, even", "Adafactor needs each parameter whole", optim=Adafactor, partition="even")
of_options("OSS", "Muon, even", "Muon needs each parameter whole", "partition='whole'", optim=Muon, partition="even")
of_options("OSS", "a rate that the optimizer refuses", "Invalid learning rate: -1.0", lr=-1.0)
of_options("stage 3", "a stage of 4", "stage=4", "3 .FSDP.", stage=4)
of_options("FSDP", "a name for a policy", "auto_wrap_policy is a str", "ModuleWrapPolicy", auto_wrap_policy="Linear")
of_options("OSS", "a factory that fails", "no room here", optim=factory)

for build in ("stage 2", "stage 3"):
    full = lambda bad, build=build: BUILDS[build](offload=zero.DiskOffload(__file__ if bad else gettempdir()))  # noqa: E731
    row(f"{build} with a file for a directory", full, "no room")
of_options("stage 2", "a name for an offload", "offload='cpu'", r"zero\.CPUOffload", offload="cpu")

of_options("OSS", "a misspelt option", r"SGD has no option partitoin=\. Did you mean partition=\?", partitoin="even")
of_options("OSS", "no class", "a NoneType as its optimizer", optim=None)
of_options("OSS", "an optimizer that is built", r"a SGD as its.*OSS\.from_optimizer", optim=sgd(good()))

of_options("OSS", "optimizer", "Adam", optim=Adam, differs=True)
of_options("OSS", "rate", "lr", lr=0.2, differs=True)
of_options("FSDP", "partition", "partition", "whole", partition="whole", differs=True)
of_options("FSDP", "time to reshard", "reshard_after_forward", reshard_after_forward=False, differs=True)
of_options("stage 2", "offload", "offload DiskOffload", "the device", offload=zero.DiskOffload("."), differs=True)
of_options("FSDP", "strategy", "SHARD_GRAD_OP", sharding_strategy="SHARD_GRAD_OP", differs=True)
of_options("stage 3", "stage", "stage 3", "stage 2", stage=2, differs=True)
of_options("OSS", "rate of a group", "lr", params=in_groups(0.2), differs=True)
of_options("OSS", "grouping", "group 1", params=[{"params": [*good(), ONE], "lr": 0.1}], differs=True)


def optimizer_of(stage: Any, groups: Callable[[nn.Sequential], list[dict[str, Any]]]) -> None:
    """By zero.setup of a built optimizer or a class; "FSDP" is that of a user, who steps it."""
    model = net()
    if stage == "FSDP":
        model = zero.FSDP(model)
        optimizer = SGD(groups(model.module), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    else:
        zero.setup(model, SGD(groups(model), lr=0.1), stage=stage)


def halves(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": [*model[0].parameters()]}, {"params": [*model[1:].parameters()], "lr": torch.tensor(0.2)}]


def in_order(model: nn.Sequential, order: int = 1) -> list[dict[str, Any]]:
    return [{"params": [*model.parameters()][::order]}]


def listed(model: nn.Sequential, beta: float = 0.9) -> list[dict[str, Any]]:
    return [{"params": [*model.parameters()], "betas": [beta, 0.5]}]


OTHER_GROUPS: dict[str, tuple[Any, Any, str]] = {
    "parameters in another order": (in_order, lambda model: in_order(model, -1), r"0\.weight"),
    "fewer parameters": (halves, lambda model: halves(model[:2]), r"2\.weight"),
    "another rate in a tensor": (halves, lambda model: [*halves(model)[:1], {**halves(model)[1], "lr": 0.3}], "lr=0.3"),
    "other options in a list": (listed, lambda model: listed(model, 0.8), r"\[0\.8, 0\.5\]"),
}
for name, (same, other, fact) in OTHER_GROUPS.items():
    for stage in (0, 1, 2, 3, "FSDP"):
        if stage == "FSDP" or name != "fewer parameters":  # which zero.setup refuses before
            row(
                f"stage {stage} with {name}",
                lambda bad, at=stage, of=(same, other): optimizer_of(at, of[bad]),
                fact,
                differs=True,
            )


def of_pair(name: str, wrong: Callable[[Any, Any], tuple[Any, ...]], *facts: str, **how: bool) -> None:
    """wrong: of a model and its optimizer makes arguments of ShardedDDP."""

    def call(bad: bool) -> None:
        model = net()
        fitting = model, zero.OSS(model.parameters(), sgd)
        zero.ShardedDDP(*(wrong(*fitting) if bad else fitting))

    row(f"ShardedDDP of {name}", call, *facts, **how)


def other_order(bad: bool) -> None:
    """Without names, parameters of one shape look the same to OSS; ShardedDDP knows the names."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    zero.ShardedDDP(model, zero.OSS([*model.parameters()][:: -1 if bad else 1], sgd))


of_pair("another model", lambda _, oss: (net(), oss), "6 parameters", "not in the module", "same module")
of_pair("more than OSS has", lambda net, oss: (net.append(nn.Linear(2, 2)), oss), r"'3\.weight'", "Add them", "freeze")
of_pair("another optimizer", lambda model, _: (model, sgd(model.parameters())), "SGD", r"zero\.OSS\(model\.parameters")
of_pair("an optimizer again", lambda *both: (zero.ShardedDDP(*both).module, both[1]), "one OSS for each", alone=False)
row("parameters in another order", other_order, "position 0", r"0\.weight", r"2\.weight", differs=True)


def differing(name: str, change: Callable[..., nn.Module], here: str, there: str) -> None:
    """change: makes another model of three modules. here, there: what ranks 0 and 1 have then."""
    for at in ("OSS", "add_param_group", "stage 2", "stage 3"):
        facts = (f"rank 0 has {here}", f"rank 1 has {there}", "same on every rank")
        if at == "stage 3" and name in ("order", "fewer"):
            facts = ("rank 0 has units", "rank 1 has units")  # that shows first
        if at in ("stage 2", "stage 3") or name != "buffers":
            call = partial(build_differing, change=change, at=at)
            row(f"{at} of models of other {name}", call, *facts, differs=True)


def build_differing(bad: bool, change: Callable[..., nn.Module], at: str) -> None:
    """At stage 2 the models differ in what OSS, which knows only the parameters that it is given, does not see."""
    model = net()
    optimizer = zero.OSS(model[0].parameters() if at == "stage 2" else [ONE], sgd)
    model = change(*model) if bad else model
    if at == "OSS":
        zero.OSS(model.named_parameters(), sgd)
    elif at == "add_param_group":
        optimizer.add_param_group({"params": [*model.named_parameters()]})
    elif at == "stage 2":
        model[1:].requires_grad_(False)
        zero.ShardedDDP(model, optimizer)
    else:
        zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


Net = nn.Sequential
differing("shape", lambda a, b, c: Net(a, b, nn.Linear(5, 4)), r"2\.weight.* \[5, 4\]", r"2\.weight.* \[4, 5\]")
differing("dtype", lambda a, b, c: Net(a, b, c.bfloat16()), r"2\.weight: float32", r"2\.weight: bfloat16")
differing("order", lambda a, b, c: Net(a, c, b), r"1\.weight: float32 \[4\]", r"1\.weight: float32 \[5, 4\]")
differing("fewer", lambda a, b, c: Net(a, b), r"2\.weight", r"(nothing|1\.running_mean)")
differing("training", lambda a, *rest: Net(a.requires_grad_(False), *rest), r"0\.\w+: .*trained", r"0\.\w+: .*frozen")
differing("buffers", lambda a, b, c: Net(a, nn.GroupNorm(1, 4), c), r"1\.running_mean: float32 \[4\]", "nothing")


def edited(name: str, edit: Callable[[Any], object], finds: str) -> None:
    def call(bad: bool) -> None:
        model = net()
        groups = [{"params": model[0].named_parameters("0")}, {"params": [*model.named_parameters()][2:], "lr": 0.2}]
        optimizer = zero.OSS(groups, sgd)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        edit(optimizer.param_groups)
        optimizer.step()

    facts = (r"groups of \[2, 4\]", finds, "add_param_group", "build OSS again")
    row(f"a step after {name}", call, *facts, alone=False, error="RuntimeError: ")


edited("one parameter was removed", lambda groups: groups[0]["params"].pop(0), r"\[1, 4\], without 0\.weight")
edited("a group was added", lambda groups: groups.append({**groups[0], "params": good()}), r"\[2, 4, 2\], not the s")
edited("another order", lambda groups: groups[0]["params"].reverse(), r"\[2, 4\], not .* in the same order")


CHUNK = 12  # rows, which share a run of the ranks


def told(rank: int, world: int, names: list[str]) -> list[tuple[str, tuple[int, ...], str]]:
    """What the rank was told in each row, by which ranks were wrong."""
    cases = [(name, wrong) for name in names for wrong in ROWS[name].wrong]
    return [(name, wrong, refusal(partial(ROWS[name].call, rank in wrong))) for name, wrong in cases]


@pytest.mark.parametrize("first", range(0, len(ROWS), CHUNK))
def test_every_rank_refuses(first):
    for by_row in ranks.run(told, 2, ([*ROWS][first : first + CHUNK],), timeout=30):
        for name, wrong, text in by_row:
            ROWS[name].check(name, wrong, text)


@ranks.on(bare=True)
def test_one_process_without_a_group_refuses_the_same(rank, world):
    for name, row in ROWS.items():
        if not row.differs and row.alone:
            text = refusal(partial(row.call, True))
            row.check(name, (), text)
            assert "on rank" not in text


@ranks.on(3, timeout=15)
def test_a_rank_outside_the_process_group_is_refused(rank, world):
    group = dist.new_group([0, 1])
    builds = [partial(zero.setup, net(), SGD, stage=stage, process_group=group) for stage in range(4)]
    builds += [partial(zero.FSDP, net(), process_group=group), partial(zero.OSS, good(), sgd, group)]
    for build in builds:
        text = refusal(build)
        assert re.search("ValueError: rank 2 of the job .*process group", text) if rank == 2 else text == "", text


@ranks.on(2, timeout=8)
def test_what_add_param_group_refuses_leaves_the_optimizer_as_it_was(rank, world):
    first, second = good()
    optimizer = zero.OSS([first], sgd)
    before = [dict(group) for group in optimizer.param_groups]
    for params, fact in [
        ([second, first], "parameter 1 of group 0 was given before"),
        ([second, second], "before as parameter 0 of group 0"),
        ([], "no parameters"),
        ([second * 2 if rank else second], r"parameter 0 of group 0 is not a leaf tensor.*\(on rank 1\)"),
    ]:
        text = refusal(partial(optimizer.add_param_group, {"params": params}))
        assert re.search(f"^ValueError: .*{fact}", text), text
    assert [dict(group) for group in optimizer.param_groups] == before
    optimizer.add_param_group({"params": second})
