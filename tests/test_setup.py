"""Processes of a launcher that are in no process group: nothing trains apart in silence, and the rest goes on."""

import os
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adam, Optimizer

import ranks
import zero
from zero.fsdp import step as of_steps


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts a script that does not call init_process_group."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def of_setup(stage: int) -> Callable[[], Any]:
    return lambda: zero.setup(nn.Linear(4, 4), Adam, stage=stage, lr=0.1)


BUILT: dict[str, Callable[[], Any]] = {
    "setup": of_setup(0),
    "OSS": lambda: zero.OSS(nn.Linear(4, 4).parameters(), SGD, lr=0.1),
    "OSS.from_optimizer": lambda: zero.OSS.from_optimizer(SGD(nn.Linear(4, 4).parameters(), lr=0.1)),
    "ShardedDDP": lambda: zero.ShardedDDP(nn.Linear(4, 4), []),
    "FSDP": lambda: zero.FSDP(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("built", BUILT)
def test_ranks_of_a_launcher_that_were_not_initialised_are_refused(built):
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2") as refused:
        BUILT[built]()
    assert "torch.distributed.init_process_group(" in str(refused.value)
    assert refused.value.__context__ is None


LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "MVP_COMM_WORLD_SIZE": "MVP_COMM_WORLD_RANK",
    "JSM_NAMESPACE_SIZE": "JSM_NAMESPACE_RANK",
}


def by_the_line_that_the_message_tells(rank: int, world: int, ports: list[int]) -> list[int]:
    found = []
    for (size, own), port in zip(LAUNCHERS.items(), ports, strict=True):
        dist.destroy_process_group()
        with mock.patch.dict(os.environ, {size: "2", own: f"{rank}"}):
            told = ranks.refusal(of_setup(3))
            assert told.startswith(f"RuntimeError: {size}=2 ") and f"remove {size} from its environment" in told
            call = told[told.index("torch.distributed.init_process_group(") : told.index(", where HOST")]
            exec(call.replace("HOST:29500", f"127.0.0.1:{port}"), {"torch": torch, "os": os})
            of_setup(3)()
            found.append(dist.get_rank())
    return found


def test_ranks_that_other_launchers_have_started_are_refused_with_the_line_to_write(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE")
    with ExitStack() as held:
        free = [held.enter_context(socket.socket()) for _ in LAUNCHERS]
        for one in free:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in free]
    found = ranks.run(by_the_line_that_the_message_tells, args=(ports,), fresh=True)
    assert found == [[0] * len(LAUNCHERS), [1] * len(LAUNCHERS)]


def test_the_only_process_of_a_job_of_several_tasks_trains_alone(monkeypatch):
    """As a script that sbatch --ntasks=8 runs, and one that it starts by srun --ntasks=1."""
    monkeypatch.delenv("WORLD_SIZE")
    for name in ("SLURM_NTASKS", "SLURM_NPROCS"):
        monkeypatch.setenv(name, "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    of_setup(3)()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    of_setup(3)()


@pytest.mark.parametrize("value", ["1", None])
def test_one_process_of_a_launcher_trains_alone(value, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE") if value is None else monkeypatch.setenv("WORLD_SIZE", value)
    for stage in range(4):
        of_setup(stage)()


def in_a_group_of_one(rank: int, world: int) -> int:
    """The remedy that the message tells, for a process that trains alone on purpose."""
    with mock.patch.dict(os.environ, WORLD_SIZE="2"):
        told = ranks.refusal(of_setup(3))
        call = told[told.rindex("torch.distributed.init_process_group(") :].rstrip(".")
        exec(call, {"torch": torch})
        model, _ = of_setup(3)()
        return len(zero.full_state_dict(model, to=None)) + dist.get_world_size()


def test_the_message_tells_how_one_of_them_trains_alone():
    assert ranks.run(in_a_group_of_one, bare=True, fresh=True) == [3]


@pytest.mark.slow
def test_what_trains_nothing_needs_no_group(tmp_path):
    """As after destroy_process_group(), and in scripts that only plan, read or convert."""
    model = nn.Linear(4, 4)
    assert zero.full_state_dict(model, to=None).keys() == model.state_dict().keys()
    assert zero.report(model, SGD(model.parameters(), lr=0.1)).stage == "0"
    assert zero.plan(model, world_size=2, optimizer=Adam).cost("3", 2).resident > 0
    zero.checkpoint.save(tmp_path, model)
    zero.checkpoint.load(tmp_path, model)


class Rows(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.rows = [torch.ones(len(param)) for param in self.param_groups[0]["params"]]


def replaced(params: Any) -> Optimizer:
    optimizer = SGD(params, lr=0.1)
    optimizer.step = lambda: None  # type: ignore[assignment, method-assign]
    return optimizer


class Keyed(SGD):
    def __init__(self, params: Any, scales: Any = None) -> None:
        super().__init__(params, lr=0.1)


class Leaky(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)


class Counting(SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": 1}


def with_rows(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(4)
    return optimizer


UNUSABLE: dict[str, tuple[Callable[[nn.Module], Any], str]] = {}


def unusable(
    title: str,
    words: str,
    given: Callable[[nn.Module], Any] = lambda _: Adam,
    *,
    net: Callable[[nn.Module], Any] = lambda model: model,
    at: Any = range(4),
    as_stage: Callable[[int], Any] = int,
    **options: Any,
) -> None:
    """given, net: make of a linear layer what zero.setup is given as the optimizer and as the model. params among the
    options is made of it, too."""

    def call(model: nn.Module, stage: int) -> object:
        made = {name: value(model) if name == "params" else value for name, value in options.items()}
        return zero.setup(net(model), given(model), stage=as_stage(stage), **made)

    UNUSABLE.update({f"{title} at stage {stage}": (partial(call, stage=stage), words) for stage in at})


def with_expanded(model: nn.Module) -> nn.Module:
    model.register_buffer("mask", torch.zeros(1, 4).expand(3, 4))
    return model


def built(model: nn.Module) -> Optimizer:
    return Adam(model.parameters())


KEYED = "Keyed was given parameters of the model in scales, and OSS steps shards.*param.scale = 0.5"
BELOW_3 = "reshard_after_forward=False means nothing at stage 2. Below stage 3 parameters stay full anyway"
LR = r"an Adam that is built already, and lr= for it.*param_groups.*zero.setup\(model, Adam, stage=3, lr="
NO_VALUES = r"'1\.weight' is on the meta device and has no values, which stage 3 alone initialises.*to_empty"
SHAPE = r"parameter 0, of shape \[4, 4\], the state 'momentum_buffer' of shape \[4\].*partition='whole'"
FOREIGN = r"zero\.setup\(params=\) was given 2 parameters that are not the model's, such as parameter 0 of group 0"
WRAPPED = r"zero\.setup .* wrapped already in a DistributedDataParallel.*zero\.unwrap\(model\)"
LACKS = "the SGD given to zero.setup does not have 1 trained parameters .*, such as 'bias'.*add_param_group"
MORE = "the Adam given to zero.setup has 2 parameters that are not the model's, such as parameter 2 of group 0"
OF_FSDP = r"param_init_fn= is an option of FSDP that zero\.setup does not take.*zero\.FSDP\(model, param_init_fn="
PRECISIONS = "Pass 'fp32', 'bf16', 'fp16', a dtype, or a policy"
OF_DDP = r"find_unused_parameters= is an option of DistributedDataParallel.*zero\.OSS\.from_optimizer\(optimizer\)"
unusable("offload", "take stage 1, 2", at=[0], offload=zero.CPUOffload())
unusable("reshard_after_forward", BELOW_3, at=[2], reshard_after_forward=False)
unusable("an option beside a built optimizer", LR, built, at=[3], lr=0.1)
unusable(
    "parameters beside a built one", "built already, and params= for it", built, at=[1], params=nn.Module.parameters
)
unusable("an OSS", "an OSS, which shards its state already", lambda m: zero.OSS(m.parameters(), Adam), at=[2])
TENSORS = "keeps tensors, .* attribute 'rows'.*its arguments"
unusable("tensors in attributes", TENSORS, lambda m: Rows(m.parameters()), at=[2])
unusable("a step of the object", r"step\(\) of the SGD was replaced", lambda m: replaced(m.parameters()), at=[1, 2])
unusable("a dict by parameters", KEYED, lambda m: partial(Keyed, scales={m.weight: 0.5}), at=[1, 2])
unusable(
    "a zero_grad of its own", r"zero_grad\(\) of Leaky leaves gradients", lambda m: Leaky(m.parameters()), at=[1, 2]
)
unusable("state of its own", "has 'k' beside its state and groups", lambda m: Counting(m.parameters()), at=[1, 2])
unusable("built on one rank", "differ between ranks", lambda m: Adam if dist.get_rank() else built(m), at=[0])
unusable("one twice", "parameter 2 of group 0 was given", at=[3], params=lambda m: [*m.parameters(), m.weight])
unusable("no values", NO_VALUES, net=lambda m: nn.Sequential(m, nn.Linear(4, 4, device="meta")), at=range(3))
unusable("an expanded buffer", "'mask' is an expanded view.*clone", net=with_expanded, at=[1, 2, 3])
unusable("state of another shape", SHAPE, with_rows, at=[1, 2, 3])
unusable("another module's parameters", FOREIGN, params=lambda _: nn.Linear(4, 4).parameters())
unusable("a model in DistributedDataParallel", WRAPPED, net=nn.parallel.DistributedDataParallel)
unusable("an optimizer that lacks a parameter", LACKS, lambda m: SGD([m.weight], lr=0.1))
unusable("an optimizer of two models", MORE, lambda m: Adam([*m.parameters(), *nn.Linear(4, 4).parameters()]))
unusable("an option of FSDP", OF_FSDP, param_init_fn=print, lr=0.1)
unusable("no parameters", "setup was given no parameters", params=lambda _: [])
unusable("no optimizer", r"no optimizer \(None\).* or its class", lambda _: None)
unusable("a name for an optimizer", "a str as the optimizer", lambda _: "adam")
unusable("parameters", "a generator as the optimizer", nn.Module.parameters)
unusable("another order", r"setup\(model, optimizer", lambda model: model, net=built)
unusable("two models", "a list as the model.*nn.ModuleList", net=lambda model: [model, model])
unusable("a text for a stage", r"stage='.' is no stage.*an int", as_stage=str)
unusable("a fraction for a stage", r"stage=.\.0 is no stage", as_stage=float)
unusable("a flag for a stage", "stage=(True|False) is no stage", as_stage=bool)
unusable("a misspelt option", "you mean precision=?", precison="bf16")
unusable("a misspelt option beside a built one", "you mean precision=?", built, precison="bf16")
unusable("a dtype of no precision", f"precision=torch.float64 is unknown. {PRECISIONS}", precision=torch.float64)
unusable("another word for a precision", PRECISIONS, precision="16-mixed")
unusable("an option of buckets", "bucket_cap_mb= is an option of DistributedDataParallel", bucket_cap_mb=25)
unusable(
    "a lazy module", r"'1\.weight' is of a lazy .*Call the plain", net=lambda m: nn.Sequential(m, nn.LazyLinear(2))
)
unusable("a lazy buffer", r"'1\.running_mean' is", net=lambda m: nn.Sequential(m, nn.LazyBatchNorm1d(affine=False)))
unusable("an option of DDP", OF_DDP, lambda m: SGD(m.parameters(), 0.1), at=[1], find_unused_parameters=True)
unusable("an option that it does not have", r"Adam has no option rate=\. It takes lr, betas", at=[2], rate=0.1)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))


IS_LAZY = r"'1\.weight' is of a lazy module"
UNUSABLE["a lazy module in an OSS"] = lambda _: zero.OSS(lazy().parameters(), Adam), "parameter 2 .* a lazy module"
UNUSABLE["a lazy module in an FSDP"] = lambda _: zero.FSDP(lazy()), IS_LAZY
UNUSABLE["a lazy module in a ShardedDDP"] = (
    lambda model: zero.ShardedDDP(lazy(), zero.OSS(model.parameters(), Adam)),
    IS_LAZY,
)
UNUSABLE["a ShardedDDP in a ShardedDDP"] = (
    lambda model: zero.ShardedDDP(zero.setup(model, Adam, stage=2)[0], zero.OSS(model.parameters(), Adam)),
    r"a ShardedDDP already.*zero\.unwrap\(model\)",
)


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_means_nothing_at_a_stage_is_refused_on_every_rank(case):
    ranks.expect_error(of_case, 2, ValueError, UNUSABLE[case][1], args=(case,))


def of_case(rank: int, world: int, case: str) -> None:
    model = nn.Linear(4, 4)
    before = model.weight
    try:
        UNUSABLE[case][0](model)
    finally:
        assert model.weight is before and before.shape == (4, 4)
        assert "ShardedDDP" in case or not before._post_accumulate_grad_hooks


@pytest.mark.parametrize("stage", range(4))
@ranks.on(2)
def test_a_cell_that_runs_again_is_told_of_unwrap_and_runs_after_it(rank, world, stage):
    model, optimizer = of_setup(stage)()
    for again in (stage, 3 - stage):
        told = ranks.refusal(lambda again=again: zero.setup(model, Adam, stage=again))
        assert told.startswith("ValueError: zero.setup was given") and "zero.unwrap(model)" in told
    kept = of_steps._alive() if rank else []  # as where the garbage collector of one rank has not run yet
    model, optimizer = zero.setup(zero.unwrap(model), Adam, stage=3 - stage, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    del kept


CELLS: dict[str, Callable[[nn.Module, Any, int], Any]] = {
    "a class": lambda net, _, stage: zero.setup(net, Adam, stage=stage),
    "an optimizer that is built there": lambda net, _, stage: zero.setup(net, Adam(net.parameters()), stage=stage),
    "an optimizer that was built before": lambda net, built, stage: zero.setup(net, built, stage=stage),
}


@pytest.mark.parametrize("stage", range(4))
@ranks.on(2)
def test_a_cell_that_runs_again_on_the_module_inside_trains_or_is_told_the_remedy(rank, world, stage):
    """Before a backward, with its gradients, after a step, and without gradients; at the same stage or another, while
    the first wrapper is still there."""
    for (name, cell), until, second in product(CELLS.items(), range(4), range(4)):
        net = nn.Linear(4, 4)
        built = Adam(net.parameters())
        first = model, optimizer = cell(net, built, stage)
        if until:
            model(torch.ones(2, 4)).sum().backward()
        if until > 1:
            optimizer.step()
        if until > 2:
            optimizer.zero_grad()
        taken: list[Any] = []
        told = ranks.refusal(lambda: taken.extend(cell(net, built, second)))  # noqa: B023
        refused = (stage == 2 and until in (1, 2)) or stage == 3 or name[-6:] == "before"
        assert refused or not told, told
        if told:
            assert "notebook whose cell runs again" in told, told
            assert re.search("zero.unwrap|build another optimizer", told), told
            net = zero.unwrap(first[0])
            taken[:] = zero.setup(net, Adam(net.parameters()), stage=second)
        model, optimizer = taken
        optimizer.zero_grad()
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        assert float(net.weight.grad.norm()) == 12  # 16 elements, the average of 2 and 4
        optimizer.step()


@ranks.on(2)
def test_what_a_rank_cannot_send_leaves_a_built_optimizer_as_it_was(rank, world):
    net = nn.Linear(4, 4)
    net.register_buffer("mask", torch.eye(4).to_sparse())
    optimizer = Adam(net.parameters())
    assert "'mask' has layout torch.sparse_coo" in ranks.refusal(lambda: zero.setup(net, optimizer, stage=2))
    del net.mask
    model, optimizer = zero.setup(net, optimizer, stage=2)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@ranks.on(2)
def test_what_an_optimizer_was_not_given_it_does_not_print(rank, world):
    model = nn.Linear(4, 4)
    model.weight.requires_grad_(False)
    optimizer = zero.OSS([model.bias], Adam)
    for ask in (optimizer.part, optimizer.state.__getitem__):
        told = ranks.refusal(lambda ask=ask: ask(model.weight))
        assert told.startswith("KeyError") and "frozen parameter of shape [4, 4]" in told and "\n" not in told


@ranks.on(2)
def test_reducing_is_switched_off_by_assignment_as_with_ddp(rank, world):
    """As training scripts do that accumulate without a context."""
    model, optimizer = of_setup(2)()
    for number in range(4):
        model.require_backward_grad_sync = number % 2 == 1
        before = zero.traffic().reduce
        model(torch.ones(2, 4)).sum().backward()
        assert (zero.traffic().reduce > before) == model.require_backward_grad_sync == (number % 2 == 1)
    optimizer.step()


@ranks.on(2)
def test_parameters_of_stage_3_kept_are_gathered_once_a_step(rank, world):
    sent = []
    for stage, options in ((3, {}), (3, {"reshard_after_forward": False}), ("3 kept", {})):
        net, units = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), ModuleWrapPolicy({nn.Linear})
        model, _ = zero.setup(net, SGD, stage=stage, auto_wrap_policy=units, lr=0.1, **options)
        before = zero.traffic()
        model(torch.ones(2, 4)).sum().backward()
        sent.append((zero.traffic() - before).gather)
    assert sent[0] > sent[1] == sent[2] > 0


class Picky(SGD):
    """Is built of full parameters only, or of small tensors only, as it is told."""

    def __init__(self, params: Any, lr: float = 0.1, *, fail: bool = False) -> None:
        super().__init__(params, lr=lr)
        if fail and any(one.numel() > 6 for group in self.param_groups for one in group["params"]):
            raise ValueError("no room here")


def failing(*_: Any, **__: Any) -> bool:
    raise KeyError("a policy of the user's")


def mlp() -> nn.Sequential:
    torch.manual_seed(dist.get_rank())  # all ranks are to have the first one's
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "an option that nobody has": (Adam, {"lrr": 0.1}),
    "an option that nobody has, of a partial": (partial(Adam, lrr=0.1), {}),
    "a wrong rate": (Adam, {"lr": -1.0}),
    "a wrong rate of a partial": (partial(Adam, lr=-1.0), {}),
    "wrong betas": (Adam, {"betas": (0.9, 2.0)}),
    "options that exclude one another": (Adam, {"fused": True, "foreach": True}),
    "an optimizer whose constructor raises": (Picky, {"fail": True, "partition": "even"}),
    "a factory that raises": (failing, {"partition": "even"}),
    "a wrong partition": (Adam, {"partition": "odd"}),
    "a wrong policy": (Adam, {"auto_wrap_policy": "Linear"}),
    "a policy that raises": (Adam, {"auto_wrap_policy": failing}),
    "a wrong precision": (Adam, {"precision": "bf61"}),
    "a precision that has no hash": (Adam, {"precision": []}),
    "a wrong offload": (Adam, {"offload": "cpu"}),
    "parameters left out": (Adam, {"params": lambda net: [net[0].weight]}),
    "a rate of another on one rank": (Adam, {"lr": 0.2}),
}
RIGHT = {  # what means nothing there
    "a wrong policy": {(0, None), (0, "bf16"), (1, None), (2, None)},
    "a policy that raises": {(0, None), (0, "bf16"), (1, None), (2, None)},
    "parameters left out": {(stage, precision) for stage in (0, 3) for precision in (None, "bf16")},
}


def numbers(net: nn.Module, stage: int, precision: str | None) -> dict[str, torch.Tensor]:
    model, optimizer = zero.setup(net, Adam, stage=stage, precision=precision, lr=0.1)
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(3, 4)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(model, to=None)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", range(4))
@ranks.on(2)
def test_the_corrected_call_has_the_numbers_of_a_first_one(rank, world, stage, precision):
    fresh = numbers(mlp(), stage, precision)
    for name, (optim, options) in WRONG.items():
        for on in ((0, 1), (1,)) if name != "a rate of another on one rank" else ((1,),):
            net = mlp()
            held = {key: value.clone() for key, value in net.state_dict().items()}
            given: dict[str, Any] = {"precision": precision, "lr": 0.1}
            if rank in on:
                given |= {key: value(net) if key == "params" else value for key, value in options.items()}
            if rank in on and not isinstance(optim, type):
                given.pop("lr")
            raised = ranks.refusal(partial(zero.setup, net, optim if rank in on else Adam, stage=stage, **given))
            if raised or (stage, precision) not in RIGHT.get(name, ()):
                told = f"{name} {on}: {raised}"
                assert re.search(r"\): [ -~]*Error: .{20,}", told) and "out of step" not in told, told
                assert all(value.dtype == held[key].dtype for key, value in net.state_dict().items()), told
                found = numbers(net, stage, precision)
                assert all(torch.equal(found[key], fresh[key]) for key in fresh), told
