"""Saved at one placement, loaded at another, in every configuration and by every kind of storage; models and optimizers
of every kind; and runs that go on as if they were not interrupted.

Here a subset in which each stage and each configuration is saved and loaded; `make matrix` sets ZERO_MATRIX=1 and runs
all 4 x 16 x 16.
"""

import math
import random
import re
import warnings
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from saved import (
    CASE,
    CONFIGS,
    Config,
    Counting,
    adam,
    differences,
    load_and_go_on,
    read_plainly,
    save_and_go_on,
    steps,
    tiny,
    train,
    whole,
    with_adam,
)
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim import lr_scheduler as schedulers

import ranks
import zero
from matrix import WHOLE
from optimizers import ByParameter
from ranks import refusal
from runs import on_mesh
from transports import TRANSPORTS, calling
from zero.checkpoint import storage
from zero.checkpoint.export import export
from zero.shards.log import logger

PLACES = [(stage, world) for stage in range(4) for world in range(1, 5)]

NOISE = "model/last"  # added to every logit, so that its gradient is rounding alone, which Adam makes steps of


@dataclass(frozen=True)
class Row:
    """at, to: a stage and a number of ranks each."""

    config: Config
    at: tuple[int, int]
    to: list[tuple[int, int]]
    transport: str = TRANSPORTS[0]
    scheme: str = ""


if WHOLE:
    ROWS = {
        f"stage {at[0]} on {at[1]} {number}": Row(config, at, PLACES)
        for at in PLACES
        for number, config in enumerate(CONFIGS)
    }
else:
    ROWS = {
        "stage 0 on 2": Row(CONFIGS[2], (0, 2), [(3, 1), (1, 3)]),
        "stage 1 on 1": Row(CONFIGS[3], (1, 1), [(2, 2), (3, 2)]),
        "stage 2 on 2": Row(CONFIGS[0], (2, 2), [(2, 2), (0, 1), (1, 1)]),
        "stage 3 on 3": Row(CONFIGS[1], (3, 3), [(0, 2), (2, 2), (3, 2)]),
    }
ROWS |= {
    "between hosts, stage 3": Row(CONFIGS[3], (3, 2), [(1, 1), (3, 3)], TRANSPORTS[-1]),
    "between hosts, stage 2": Row(CONFIGS[2], (2, 2), [(3, 2)], TRANSPORTS[-1]),
    "objects": Row(Config(), (3, 2), [(0, 1), (3, 2)], scheme="objects://"),
    "offloaded": Row(Config(offload=True), (1, 2), [(3, 3)]),
    "replicated": Row(Config(replicas=2), (3, 4), [(3, 2)]),
    "moments in 16 bits": Row(Config("moments"), (3, 2), [(0, 1), (2, 2)]),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(1800 if WHOLE else 120)
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])
def test_any_placement_to_any_other(row, tmp_path):
    path = f"{row.scheme}{tmp_path}"
    stage, world = row.at
    at_save, in_the_end = ranks.run(calling, world, (row.transport, save_and_go_on, path, stage, row.config))[0]
    assert not differences(at_save, read_plainly(tmp_path / "00000001"))
    rough = row.config.masters or row.config.optim == "moments"
    stages = defaultdict(list)
    for stage, world in row.to:
        stages[world].append(stage)
    for world, chosen in stages.items():
        jobs = [(path, stage, row.config) for stage in chosen]
        for loaded in ranks.run(calling, world, (row.transport, load_and_go_on, jobs), timeout=90.0):
            for stage, result in zip(chosen, loaded, strict=True):
                if result:
                    assert not differences(at_save, result[0]), (stage, world)
                    check_end(in_the_end, result[1], same=(stage, world) == row.at, rough=rough)


def check_end(expected, found, *, same, rough):
    if same:
        assert not differences(expected, found)
        return
    assert expected.keys() == found.keys()
    tolerance = {"rtol": 0.1, "atol": 0.03} if rough else {"rtol": 1e-4, "atol": 1e-6}
    for name, value in expected.items():
        if name.startswith("model/") and name != NOISE:
            torch.testing.assert_close(found[name], value, check_dtype=False, **tolerance)


# What the matrix does not have: models and optimizers of every kind.


class Experts(nn.Module):
    """Each rank runs the expert of its number; the last is run by none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        return self.experts[dist.get_rank() if dist.is_initialized() else 0](x)


def with_experts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Experts(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def mixed():
    """Buffers too, but for those of norms."""
    kept = {"keep_fp32": (nn.BatchNorm1d,), "buffer_dtype": torch.bfloat16}
    return zero.FSDP(tiny(), precision=zero.MixedPrecision(param_dtype=torch.bfloat16, **kept))


def from_meta():
    with torch.device("meta"):
        model = tiny()
    return zero.FSDP(model)


def ignoring():
    model = tiny()
    return zero.FSDP(model, ignored_parameters=[model[0].weight, model[2].bias])


def kept_whole():
    """Shards that are given up while parameters are unsharded are written, and read into, without being pinned down."""
    return zero.FSDP(tiny(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), reshard_after_forward=False)


KINDS = {
    "experts": lambda: zero.FSDP(with_experts(), as_one_unit=[Experts]),
    "mixed": mixed,
    "from meta": from_meta,
    "ignoring": ignoring,
    "kept whole": kept_whole,
}


def of_kinds(rank, world, path, saves):
    found = {}
    for kind, make in KINDS.items():
        model, optimizer = with_adam(make())
        train(model, optimizer, 2 if saves else 1)
        (zero.checkpoint.save if saves else zero.checkpoint.load)(f"{path}/{kind}", model, optimizer)
        then = whole(model, optimizer)
        train(model, optimizer, 2)
        found[kind] = then, whole(model, optimizer)
    return found


@pytest.mark.slow
def test_every_kind_of_stage_3(tmp_path):
    saved = ranks.run(of_kinds, 2, (str(tmp_path), True))[0]
    again, on_three = (ranks.run(of_kinds, world, (str(tmp_path), False))[0] for world in (2, 3))
    for kind, (at_save, in_the_end) in saved.items():
        assert not differences(at_save, again[kind][0]) and not differences(in_the_end, again[kind][1]), kind
        assert not differences(at_save, on_three[kind][0]), kind
        assert not differences(at_save, read_plainly(tmp_path / kind / "00000001")), kind
        plain, optimizer = with_adam(with_experts() if kind == "experts" else tiny())
        zero.checkpoint.load(tmp_path / kind, plain, optimizer)
        assert not differences(at_save, whole(plain, optimizer)), kind


@pytest.mark.slow
@ranks.on(4)
def test_replicas_write_once(rank, world, tmp_path):
    model, optimizer = with_adam(zero.FSDP(CASE.model(), **on_mesh(world, {"replicas": 2})))
    steps(model, optimizer, 0, 1)
    checkpoint = zero.checkpoint.save(tmp_path, model, optimizer, extra={"rank": rank}).path
    assert zero.checkpoint.load(tmp_path, model, optimizer) == {"rank": rank}
    assert len(list(checkpoint.glob("*.safetensors"))) == 2
    assert not differences(whole(model, optimizer), read_plainly(checkpoint))


class Nested(ByParameter):
    """Steps by tensors in lists, as SOAP and LBFGS keep them, in tuples and in dictionaries."""

    def step_one(self, param, state, group):
        if not state:
            state["GG"] = [torch.zeros(size, size) for size in param.shape]
            state["old"] = {"dirs": (1, []), "sum": torch.zeros(2), "step": torch.tensor(0.0)}
        rows = param.grad.view(len(param), -1)
        state["GG"][0] += rows @ rows.t()
        state["old"]["dirs"][1].append(param.grad.clone())
        state["old"]["sum"] += torch.tensor([1.0, 2.0])
        scale = state["GG"][0].norm() + sum(one.norm() for one in state["old"]["dirs"][1]) + state["old"]["sum"].sum()
        param.sub_(param.grad / scale, alpha=group["lr"])


KINDS_OF_STATE = {
    "other shapes": (partial(torch.optim.Adafactor, lr=1e-2), partial(SGD, lr=0.1, momentum=0.9)),
    "in lists": (Nested, Nested),
}


def two_optimizers(stage, kind):
    """Adafactor keeps a row and a column of each matrix."""
    model = tiny()
    weights, others = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    kinds = KINDS_OF_STATE[kind]
    if stage in (0, 3):
        model = zero.FSDP(model, partition="whole") if stage else DistributedDataParallel(model)
        return model, [kind(params) for kind, params in zip(kinds, (weights, others), strict=True)]
    optimizers = [zero.OSS(params, kind) for kind, params in zip(kinds, (weights, others), strict=True)]
    return zero.ShardedDDP(model, optimizers), optimizers


def stepped(model, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.manual_seed(0)
    model(torch.randn(5, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def step_on(rank, world, path, stage, kind, saves):
    """The state after a save that follows two steps, or after a load; and the weights after another step."""
    model, optimizers = two_optimizers(stage, kind)
    for _ in range(2 if saves else 0):
        stepped(model, optimizers)
    (zero.checkpoint.save if saves else zero.checkpoint.load)(path, model, optimizers)
    state = [zero.full_optimizer_state_dict(model, one, to=None)["state"] for one in optimizers]
    stepped(model, optimizers)
    return state, zero.full_state_dict(model, to=None)


def refused_where_cut(rank, world, path):
    model = zero.FSDP(tiny(300), partition="even")
    optimizer = Nested(model.parameters())
    return refusal(lambda: zero.checkpoint.load(path, model, optimizer))


def test_state_in_lists_is_loaded_where_parameters_are_whole(tmp_path):
    model = tiny(300)
    optimizer = Nested(model.parameters())
    train(model, optimizer, 1)
    zero.checkpoint.save(tmp_path, model, optimizer)
    for told in ranks.run(refused_where_cut, 2, (str(tmp_path),)):
        assert re.search("^CheckpointError: .*'GG' of .* tensors within.*cut between ranks.*partition='whole'", told), (
            told
        )


@pytest.mark.parametrize("kind", KINDS_OF_STATE)
@pytest.mark.parametrize(("at", "to"), [((2, 2), [(3, 2), (3, 3), (0, 3)]), ((0, 2), [(2, 3)]), ((3, 3), [(0, 2)])])
def test_several_optimizers_and_state_of_other_shapes(kind, at, to, tmp_path):
    (stage, world), path = at, str(tmp_path)
    state, weights = ranks.run(step_on, world, (path, stage, kind, True))[0]
    assert "base64" not in (tmp_path / "00000001" / "index.json").read_text(), "a tensor was stored as text"
    export(tmp_path, tmp_path / "dcp", to="dcp")
    for (stage, world), source in [*product(to, (path,)), (to[0], f"{path}/dcp")]:
        found_state, found = ranks.run(step_on, world, (source, stage, kind, False))[0]
        torch.testing.assert_close(found_state, state, rtol=0, atol=0)
        for name, value in weights.items():
            if name != "0.bias":  # comes before a BatchNorm: its gradient is rounding alone
                torch.testing.assert_close(found[name], value)


def test_another_order_in_memory(tmp_path):
    saved, optimizer = with_adam(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1)))
    saved(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    zero.checkpoint.save(tmp_path, saved, optimizer)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1))
    found, found_optimizer = with_adam(net.to(memory_format=torch.channels_last))
    zero.checkpoint.load(tmp_path, found, found_optimizer)
    assert found[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not differences(whole(saved, optimizer), whole(found, found_optimizer))


COMPILED = {
    "inside FSDP": lambda model: zero.FSDP(torch.compile(model, backend="eager")),
    "around FSDP": lambda model: torch.compile(zero.FSDP(model), backend="eager"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@ranks.on(2)
def test_compiled_models_have_the_names_of_their_modules(rank, world, tmp_path):
    for how, wrap in COMPILED.items():
        inner, plain, other = (nn.Sequential(Counting(), nn.BatchNorm1d(2)) for _ in range(3))
        inner[0].seen = 3
        saved, loaded = wrap(inner), wrap(other)
        with torch.no_grad():
            for param in saved.parameters():
                param.fill_(7.0)
        zero.checkpoint.save(tmp_path / how, saved)
        zero.checkpoint.load(tmp_path / how, plain)
        zero.checkpoint.load(tmp_path / how, loaded)
        assert all(
            (param.as_subclass(Tensor) == 7).all() for model in (plain, loaded) for param in model.parameters()
        ), how
        assert plain[0].seen == other[0].seen == 3, how


# `extra`, and modules' extra state.


def save_own(rank, world, path):
    extra = {"own": rank, "shared": (1, None), "nan": math.nan}
    zero.checkpoint.save(path, DistributedDataParallel(tiny()), extra=extra)
    return zero.checkpoint.load(path, DistributedDataParallel(tiny()))


def test_what_differs_between_ranks_returns_to_the_same_ranks_alone(tmp_path):
    found = ranks.run(save_own, 2, (str(tmp_path),))
    with pytest.warns(UserWarning, match=r"^extra\['own'\] differed between the 2 ranks"):
        alone = zero.checkpoint.load(tmp_path, tiny())
    assert [one.pop("own") for one in found] == [0, 1]
    for one in [*found, alone]:
        assert math.isnan(one.pop("nan")) and one == {"shared": (1, None)}


def test_buffers_and_extra_state_of_modules(tmp_path):
    model, other = Counting({"steps": 5}), Counting()
    for module, value in ((model, 2.0), (other, 0.0)):
        module.register_buffer("mean", torch.full((2,), value))
        module.register_buffer("scratch", torch.full((2,), value), persistent=False)
    zero.checkpoint.save(tmp_path, model)
    zero.checkpoint.load(tmp_path, other)
    assert other.seen == {"steps": 5} and (other.mean == 2).all() and (other.scratch == 0).all()


def test_values_of_every_kind_come_back_as_they_were(tmp_path):
    extra = {
        "none": None,
        "infinite": float("-inf"),
        "nested": {"a": [(1, {"b": (2.5, "c")})], "$": 1},
        "keys": {1: "one", (2, 3): "pair"},
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::-1],
        "tensor": torch.arange(4, dtype=torch.bfloat16).view(2, 2),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "complex": 1 - 2j,
        "number": np.int64(1 << 40),
    }
    zero.checkpoint.save(tmp_path, tiny(), extra=extra)
    found = zero.checkpoint.load(tmp_path, tiny())
    assert list(found) == list(extra)
    extra["number"] = 1 << 40  # numpy's numbers come back as Python's
    for name, value in extra.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and np.array_equal(found[name], value)
            assert found[name].flags.writeable
        elif isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)
        else:
            assert found[name] == value


REFUSED = [
    (np.array([object()], dtype=object), "a numpy.ndarray"),
    ({1, 2}, "a builtins.set"),
    (Path("a"), r"a pathlib\.\S*PosixPath"),
    (torch.ones(2).to_sparse(), "torch.sparse_coo"),
    (adam, "a builtins.function"),
]


def test_what_cannot_be_kept_is_named(tmp_path):
    for value, words in REFUSED:
        with pytest.raises(zero.checkpoint.CheckpointError, match=rf"extra\['a'\]\['b'\] .*{words}"):
            zero.checkpoint.save(tmp_path, tiny(), extra={"a": {"b": value}})


# `resume`: a run goes on with all that remembers as if it were not interrupted.


SCHEDULERS = {
    0: partial(schedulers.MultiStepLR, milestones=[1, 4, 4]),  # keeps a Counter
    1: lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=2), schedulers.ExponentialLR(optimizer, gamma=0.5)],
        milestones=[3],
    ),
    2: partial(schedulers.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    3: partial(schedulers.ReduceLROnPlateau, patience=0, threshold=10.0),  # keeps infinities
}
"""By stage."""


class Run:
    """A training with everything that remembers: dropout, draws of all generators, scheduler, scaler."""

    def __init__(self, stage, seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.model, self.optimizer = zero.setup(model, torch.optim.Adam, stage=stage, lr=1e-2)
        self.scheduler = SCHEDULERS[stage](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.data = torch.Generator().manual_seed(seed)
        self.resume = [self.scheduler, self.scaler, self.data]
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def step(self):
        inputs = torch.randn(5, 4) + random.random() + np.random.random() + torch.rand((), generator=self.data)
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
        self.scheduler.step(loss.item()) if plateau else self.scheduler.step()
        return loss.item(), self.optimizer.param_groups[0]["lr"], self.scaler.get_scale()


def interrupted_and_not(rank, world, path, stage):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on schedulers that are called in an order it does not expect
        run = Run(stage, seed=rank)
        for _ in range(2):
            run.step()
        zero.checkpoint.save(path, run.model, run.optimizer, extra={"step": 2}, resume=run.resume, wait=stage % 2 == 0)
        expected = [run.step() for _ in range(4)]
        other = Run(stage, seed=100 + rank)
        other.step()
        assert zero.checkpoint.load(path, other.model, other.optimizer, resume=other.resume) == {"step": 2}
        assert [other.step() for _ in range(4)] == expected
        assert len({rate for _, rate, _ in expected}) > 1 and len({scale for _, _, scale in expected}) > 1
        return expected


@pytest.mark.parametrize("stage", SCHEDULERS)
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(stage, tmp_path):
    first, second = ranks.run(interrupted_and_not, 2, (str(tmp_path), stage))
    assert [loss for loss, _, _ in first] != [loss for loss, _, _ in second], "ranks drew the same numbers"


def seeded(seed):
    """What the generators of Python, numpy and torch draw next, which are then as before."""
    for seed_one in (torch.manual_seed, np.random.seed, random.seed):
        seed_one(seed)


def drawn():
    return random.random(), np.random.random(), torch.rand(()).item()


def saved_by_two(rank, world, path):
    """Python's generator differs between ranks, the others do not."""
    model, optimizer = zero.setup(tiny(), adam(), stage=1)
    schedule = schedulers.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 1)
    schedule.step()
    seeded(7)
    random.seed(rank)
    zero.checkpoint.save(path, model, optimizer, resume=schedule)
    return drawn()


def test_on_other_ranks_what_was_the_same_on_all_comes_back_and_the_rest_stays(tmp_path):
    expected = ranks.run(saved_by_two, 2, (str(tmp_path),))
    model = tiny()
    optimizer = adam()(model.parameters())
    schedule = schedulers.StepLR(optimizer, 1, gamma=0.5)
    seeded(8)
    words = r"^resume/random differed between the 2 ranks .* 1 now: left out"
    with pytest.warns(UserWarning, match=words):
        assert zero.checkpoint.load(tmp_path, model, optimizer, resume=schedule) == {}
    assert schedule.get_last_lr() == [5e-3] and optimizer.param_groups[0]["lr"] == 5e-3
    own = random.Random(8).random()
    assert drawn() == (own, *expected[0][1:]) == (own, *expected[1][1:])


def test_without_it_a_load_draws_and_returns_nothing_of_it(tmp_path, recwarn):
    ranks.run(saved_by_two, 2, (str(tmp_path),))
    model = tiny()
    seeded(8)
    assert zero.checkpoint.load(tmp_path, model) == {}
    found = drawn()
    seeded(8)
    assert found == drawn() and not recwarn.list


def test_the_generator_of_the_device_comes_back(tmp_path):
    state = [torch.tensor([1, 2], dtype=torch.uint8)]
    device = mock.Mock(get_rng_state=lambda: state[-1], set_rng_state=state.append)
    accelerator = mock.Mock(current_accelerator=lambda check_available: torch.device("cuda"))
    with mock.patch.multiple(torch, get_device_module=lambda kind: device, accelerator=accelerator):
        zero.checkpoint.save(tmp_path, tiny(), resume=[])
        state.append(None)
        zero.checkpoint.load(tmp_path, tiny(), resume=[])
    assert torch.equal(state[-1], state[0])
    zero.checkpoint.load(tmp_path, tiny(), resume=[])  # where there is no such device


class Refusing(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state):
        raise KeyError("gamma")


@pytest.mark.slow
@ranks.on(2)
def test_what_does_not_fit_is_refused_on_every_rank(rank, world, tmp_path):
    path = tmp_path
    model, optimizer = zero.setup(tiny(), adam(), stage=3)
    schedule = schedulers.StepLR(optimizer, 1)
    zero.checkpoint.save(f"{path}/with", model, optimizer, resume=schedule)
    zero.checkpoint.save(f"{path}/without", model, optimizer)
    train(model, optimizer, 1)
    before = whole(model, optimizer)

    def save(**given):
        return refusal(lambda: zero.checkpoint.save(f"{path}/none", model, optimizer, **given))

    def load(name, resume):
        return refusal(lambda: zero.checkpoint.load(f"{path}/{name}", model, optimizer, resume=resume))

    given = r"with resume=\[StepLR\], but load was given"
    for told, words in [
        (save(resume=[schedule, 3] if rank else [schedule]), r"resume\[1\] is an? int.* state_dict\(\).*rank 1"),
        (save(resume=[optimizer]), r"resume\[0\] is a Adam.*model and optimizer have arguments of their own"),
        (save(extra={"resume/0": 1}), "extra=.*resume/"),
        (save(resume=[schedule] * (rank + 1)), "the arguments of zero.checkpoint.save differ .*StepLR"),
        (load("without", schedule), r"does not fit: it was saved without resume.*extra"),
        (load("with", [torch.amp.GradScaler("cpu")]), rf"{given} \[GradScaler\]"),
        (load("with", [schedule, torch.Generator()]), rf"{given} \[StepLR, Generator\]"),
    ]:
        assert re.search(f"^CheckpointError: .*{words}", told), (words, told)
    assert not differences(before, whole(model, optimizer))
    told = load("with", type("StepLR", (Refusing,), {})(optimizer, 1) if rank else schedule)
    assert re.search("^CheckpointError: .*KeyError: 'gamma'.*partly as before.*rank 1", told), told


# `missing_ok`: where nothing was saved yet a run starts afresh, on every rank alike; all else raises as ever.


def start(path, stage):
    """What a script does each time it is started: its steps go on from those before."""
    model, optimizer = zero.setup(tiny(), adam(), stage=stage)
    before = whole(model, optimizer)
    extra = zero.checkpoint.load(path, model, optimizer, resume=[], missing_ok=True)
    if extra is None:
        assert not differences(before, whole(model, optimizer))
    train(model, optimizer, 1)
    step = 1 if extra is None else extra["step"] + 1
    zero.checkpoint.save(path, model, optimizer, resume=[], extra={"step": step}).wait()
    return step


def starts(rank, world, path, stage):
    """Whatever the others see of a file system that is slow to tell: they are not asked."""
    asked, lines = mock.Mock(side_effect=storage.resolve), []
    said = mock.patch.object(logger, "info", lambda text, *given: lines.append(text % given))
    with said, mock.patch.object(storage, "resolve", asked):
        steps = [start(path, stage), start(path, stage)]
    assert bool(asked.called) == (rank == 0)
    return steps, [line for line in lines if "afresh" in line]


STARTS = [(0, TRANSPORTS[0], ""), (1, TRANSPORTS[-1], ""), (2, TRANSPORTS[0], "objects://"), (3, TRANSPORTS[-1], "")]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "transport", "scheme"), [*STARTS, (3, TRANSPORTS[0], "objects://")])
def test_a_script_starts_afresh_once_and_then_goes_on(stage, transport, scheme, tmp_path):
    path = f"{scheme}{tmp_path / 'run'}"
    first, second = ranks.run(calling, 2, (transport, starts, path, stage))
    assert first[0] == second[0] == [1, 2]
    assert not second[1] and len(first[1]) == 1 and re.search(r"run is not there.*afresh", first[1][0])


def test_a_first_save_that_was_killed_between_its_index_and_latest_is_whole(tmp_path):
    """A job that is started again by itself would raise for ever."""
    put = storage.Place.put

    def put_all_but_latest(place, data):
        if place.name == "latest":
            raise KeyboardInterrupt
        put(place, data)

    model = Counting(3)
    killed = mock.patch.multiple(storage.Place, put=put_all_but_latest, remove=mock.DEFAULT)
    with pytest.raises(KeyboardInterrupt), killed:
        zero.checkpoint.save(tmp_path, model, extra={"step": 1})
    assert zero.checkpoint.load(tmp_path, model, missing_ok=True) == {"step": 1}
    zero.checkpoint.save(tmp_path, model, extra={"step": 2})
    assert zero.checkpoint.load(tmp_path, model, missing_ok=True) == {"step": 2}


@ranks.on(2)
def test_all_ranks_ask_alike(rank, world, tmp_path):
    model = zero.FSDP(tiny())
    told = ranks.refusal(lambda: zero.checkpoint.load(tmp_path, model, missing_ok=rank == 0))
    assert re.search("differ between ranks.*missing_ok", told), told
