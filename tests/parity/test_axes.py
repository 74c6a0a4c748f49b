"""Small programs on the axes of tests/axes: numbers are those of stage 0 there, too, or every rank raises.

Each runs on the plain axis, and at some points of the others that a seed draws, a model sharded evenly or by whole
parameters. `make axes` tries 300 points that are new each time, DRAWS=2000 more. A point that fails is to be entered
in KNOWN, or mended.
"""

import copy
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import axes
import gpus
import matrix
import ranks
import zero
import zero.checkpoint.export
from assertions import same
from axes import Point
from odd import Calling, recomputed
from processes import python
from rows import Loop, Net, Row, Rows, case, cases_as_test, momentum
from runs import norm_of_gradients, take_step
from transports import TRANSPORTS
from zoo import CASES, WIDTH, Block, OddNet, Stack, WideMLP, odd_loss

DRAWS = int(os.environ.get("ZERO_AXES", "0"))
ALIKE = {"ddp": {"find_unused_parameters": True}}

adam = partial(Adam, lr=0.01, weight_decay=0.01, eps=1e-4)  # which float16 does not round to nothing
CLIPS = {"optim": adam, "tolerance": 1e-5}  # norms are added up in another order
row = Rows("small programs", __name__, optim=momentum)


row.of("trains")
row.of("clips", lambda t, i: t.update(t.loss(i), lambda t: t.clip(0.1)), **CLIPS)


@row()
def accumulates_under_no_sync(t: Loop, i: int) -> None:
    with zero.no_sync(t.m):
        t.backward(t.loss(10 + i))
    t.update(t.loss(i))


@row(fails={2, 3})
def accumulates(t: Loop, i: int) -> None:
    t.backward(t.loss(10 + i))
    t.update(t.loss(i))


@row(optim=adam)
def evaluates_between_forward_and_backward(t: Loop, i: int) -> None:
    loss = t.loss(i)
    t.m.eval()
    with torch.no_grad():
        t.loss(20 + i)
    t.m.train()
    t.update(loss)


def note_state(t: Loop, state: dict[str, Any]) -> None:
    for entry in state.get("state", {}).values():
        for value in entry.values():
            t.note(torch.as_tensor(value, device=getattr(value, "device", gpus.DEVICE)))


@row()
def saves_on_rank_0(t: Loop, i: int) -> None:
    t.update(t.loss(i))
    for value in zero.full_state_dict(t.m, to=0).values() if t.stage else zero.full_state_dict(t.m, to=None).values():
        t.rank == 0 and t.note(value)
    state = zero.full_optimizer_state_dict(t.m, t.o, to=0)
    t.rank == 0 and note_state(t, state)


@row(optim=adam)
def goes_back_to_what_it_saved(t: Loop, i: int) -> None:
    if i == 2:
        zero.load_full_state_dict(t.m, t.kept.weights)
        zero.load_full_optimizer_state_dict(t.m, t.o, t.kept.state)
    t.update(t.loss(i))
    if i < 2:
        weights = zero.full_state_dict(t.m, to=None)
        state = copy.deepcopy(zero.full_optimizer_state_dict(t.m, t.o, to=None))  # stage 0 shows what it steps
        note_state(t, state)
    if i == 0:
        t.kept.weights, t.kept.state = weights, state


row.of("two forwards have one loss", lambda t, i: t.update(t.loss(i) + t.loss(10 + i)))


@row(net=lambda: Net(blocks=4))
def a_forward_is_dropped(t: Loop, i: int) -> None:
    t.forward(t.batch(30 + i))
    t.update(t.loss(i))


@row(**ALIKE)
def a_layer_is_frozen_until_the_second_step(t: Loop, i: int) -> None:
    t.n.first.requires_grad_(i > 0)
    t.update(t.loss(i))


def with_a_frozen_block() -> nn.Module:
    net = Net()
    net.blocks[1].requires_grad_(False)
    return net


@row(net=with_a_frozen_block, same={1, 3}, refused={2: "the gradient was assigned"})
def gradients_are_given_by_hand(t: Loop, i: int) -> None:
    """To parameters that never required one, as evolution strategies do."""
    t.backward(t.loss(i))
    for param in t.n.blocks[1].parameters():
        param.grad = param.detach() * 0.1 + 0.01
    t.update(None)


@row()
def gradients_are_divided(t: Loop, i: int) -> None:
    t.update(t.loss(i), lambda t: [param.grad.mul_(1 / 3) for param in shown(t) if param.grad is not None])


def shown(t: Loop) -> list[Tensor]:
    """Parameters, or at stage 2 those of the optimizer inside, which have shards of gradients."""
    return [t.o.part(param) if t.stage == 2 else param for param in t.n.parameters()]


@row()
def weights_decay_between_steps(t: Loop, i: int) -> None:
    t.update(t.loss(i))
    with torch.no_grad():
        for param in t.n.parameters():
            param.mul_(0.99)


@row(**CLIPS)
def the_norm_of_gradients_is_logged(t: Loop, i: int) -> None:
    t.backward(t.loss(i))
    t.axis.unscale(t)
    t.note(norm_of_gradients(t.m).float())
    t.update(None)


class Forces(Stack):
    """Takes the gradient of a unit's output, and then uses a layer of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not torch.is_grad_enabled():
            return self.last(x)
        positions = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.blocks[0](positions).sum(), positions)
        return self.last(self.middle(x) + forces)


row.of("forces are taken within forward", net=lambda: Forces(classes=3, blocks=2), **ALIKE)


row.of("blocks are computed again", net=lambda: Calling(recomputed, classes=3, blocks=2))
row.of("one block is used twice", net=lambda: Twice(classes=3, blocks=2))
row.of("units have buffers", net=lambda: Stack(lambda: Block(between=nn.BatchNorm1d(2 * WIDTH)), classes=3, blocks=2))


class Twice(Stack):
    def through(self, blocks: Any, x: Tensor) -> Tensor:
        return super().through([*blocks, blocks[0]], x)


@row()
def scales_losses_in_float16(t: Loop, i: int) -> None:
    """The loss of rank 0 overflows in the second step."""
    if i == 0:
        t.kept.scaler = torch.amp.GradScaler(gpus.DEVICE, init_scale=2.0**8)
    with torch.autocast(gpus.DEVICE, torch.float16):
        loss = t.loss(i).float()
    t.kept.scaler.scale(loss * float("inf") if (i, t.rank) == (1, 0) else loss).backward()
    t.kept.scaler.step(t.o)
    t.kept.scaler.update()
    t.o.zero_grad()


row.of("shards lie on a disk", options={"offload": zero.DiskOffload(tempfile.gettempdir())})


@row(same=(), refused=dict.fromkeys((2, 3), "frozen|out of step|differ"))
def a_layer_is_frozen_on_rank_1(t: Loop, i: int) -> None:
    """From the second step on, in which nothing is compared otherwise."""
    t.n.first.requires_grad_(i == 0 or t.rank == 0)
    t.update(t.loss(i))


@row()
def joins_other_numbers_of_batches(t: Loop, i: int) -> None:
    for x, weight in zero.join([t.batch(10 * i + k) for k in range(1 + t.rank)], t.m):
        t.update(t.note(weight * t.forward(x).square().mean()))


@row(optim=adam)
def goes_on_from_a_checkpoint(t: Loop, i: int) -> None:
    t.update(t.loss(i))
    zero.checkpoint.save(t.folder, t.m, t.o, extra={"step": torch.ones(2, device="cpu")}, wait=False).wait()
    zero.checkpoint.load(t.folder, t.m, t.o)


test_plain = row.tests()


SAVES = {"saves_on_rank_0", "goes_back_to_what_it_saved", "goes_on_from_a_checkpoint"}
WITHOUT = {  # a reference at stage 0
    "a_layer_is_frozen_on_rank_1": "[^p]",
    "scales_losses_in_float16": "dtype",
    "blocks are computed again": "dtype: mixed",
    "units have buffers": "dtype: (mixed|master)",
    "saves_on_rank_0": "dtype: master",
    "goes_back_to_what_it_saved": "dtype: master",
    "weights_decay_between_steps": "dtype: master",
}


def suits(one: Row, name: str) -> bool:
    """Whether something would happen to the row there that it can be compared in."""
    if name == "slow: a collection" or re.match(r"hooks: at the (model|optimizer)'s", name):
        return one.name in SAVES
    if "raises" in name and one.fails:
        return False
    if name == "dtype: float16 parameters" and one.optim is adam:
        return False  # which makes as much of a gradient that float16 has rounded as of another
    return not re.match(WITHOUT.get(one.name, "$"), name)


class Known(NamedTuple):
    """What does not hold yet: at these stages, of points and rows that match, by a transport that matches."""

    why: str
    stages: set[int]
    point: str
    row: str = ""
    transport: str = ""

    def has(self, one: Row, point: Point, transport: str) -> bool:
        pairs = ((self.point, str(point)), (self.row, one.name.replace(" ", "_")), (self.transport, transport))
        return all(re.search(pattern, text) for pattern, text in pairs)


INSIDE = "hooks of every optimizer are called for the one inside of an OSS, too"
OUTSIDE = "autograd calls a hook outside of zero, and forgets it: the others are told once this rank does more, or ends"
GLOO = "Gloo is out of step and does not know it"
KNOWN: list[Known] = [
    Known(GLOO, {1, 2, 3}, "after .* step raises alone", "", "overlapping"),
    Known(OUTSIDE, {2, 3}, "(backward of|on each|on any) .* raises alone"),
    Known(OUTSIDE, {2}, "on all gradients of a block raises alone"),
    Known(OUTSIDE, {3}, "on all gradients of a block raises alone, registered early"),
    Known(GLOO, {2}, "", "frozen_on_rank_1", "overlapping"),
]


class Draw(NamedTuple):
    row: str
    point: Point
    transport: str


def drawn() -> Iterator[Draw]:
    """For each row one point, the same in every run; or as many as are asked for, others each time."""
    random = Random() if DRAWS else Random("axes")
    for one in random.choices(row.rows, k=DRAWS) if DRAWS else row.rows:
        axis = random.choice(axes.FILES)
        names = [name for name in axes.every() if name.startswith(axis) and suits(one, name)]
        for name in random.sample(names, k=min(len(names), 1)):
            point = Point(name, random.randrange(1000), random.choice(["even", "whole"]))
            yield Draw(one.name, point, random.choice([*TRANSPORTS, *["overlapping"] * (not gpus.ON)]))


def hook(words: str, row: str = "trains", transport: str = "host memory", partition: str = "even") -> Draw:
    return Draw(row, Point(f"hooks: {words}", 0, partition), transport)


FOUND = [
    Draw("saves_on_rank_0", Point("slow: a collection"), "gloo"),
    hook("before an optimizer's step clips, registered late"),
    hook("before every optimizer's step clips, registered late", "trains", "gloo", "whole"),
    hook("before every optimizer's step halves each, registered early"),
    hook("after every optimizer's step decays each, registered late"),
    hook("before an optimizer's step zeroes each, registered late", "shards lie on a disk"),
    hook("after an optimizer's step decays each, registered late", "shards lie on a disk"),
    hook("before the backward of a block reads, registered early"),
    hook("on each accumulated gradient scales in place, registered late"),
    hook("before an optimizer's step raises alone, registered late", "trains", "gloo"),
    hook("before every optimizer's step raises alone, registered early", "trains", "gloo"),
    hook("after an optimizer's step raises alone, registered early"),
    hook("after every optimizer's step raises alone, registered late", "trains", "gloo"),
    hook("before a block raises alone, registered early"),
    hook("at the model's state pre raises alone, registered late", "goes_back_to_what_it_saved"),
    Draw("scales_losses_in_float16", Point("layout: channels last"), "host memory"),
    Draw("a_forward_is_dropped", Point("kept: output on rank 0"), "gloo"),
    Draw("a_forward_is_dropped", Point("kept: cycle on rank 0", 0, "whole"), "host memory"),
    Draw("a_forward_is_dropped", Point("kept: parts on all ranks"), "gloo"),
    Draw("gradients_are_divided", Point("dtype: bfloat16 parameters"), "host memory"),
    Draw("a_layer_is_frozen_on_rank_1", Point("plain"), "overlapping"),
]
"""Points at which something was found."""
ELSEWHERE = {
    "device: meta by default": [
        *("trains", "clips", "accumulates_under_no_sync", "saves_on_rank_0", "goes_back_to_what_it_saved"),
        *("scales_losses_in_float16", "shards lie on a disk", "units have buffers", "joins_other_numbers_of_batches"),
        "goes_on_from_a_checkpoint",
    ],
    "device: shards in files": [
        *("clips", "accumulates_under_no_sync", "weights_decay_between_steps", "goes_back_to_what_it_saved"),
        *("scales_losses_in_float16", "goes_on_from_a_checkpoint"),
    ],
}
for words, names in ELSEWHERE.items():
    FOUND += [Draw(name, Point(words), TRANSPORTS[k % len(TRANSPORTS)]) for k, name in enumerate(names)]


def cases(draw: Draw) -> Iterator[Any]:
    """A test for the stages that have the same numbers, and one for each at which the row raises, or fails."""
    plain = next(one for one in row.rows if one.name == draw.row)
    transport = TRANSPORTS[0] if gpus.ON else draw.transport
    known = [one for one in KNOWN if one.has(plain, draw.point, transport)]
    there = plain.at(draw.point)
    fails = set() if plain.name == "accumulates" and there.tolerance else {*plain.fails}  # which is of rounding
    fails -= {2} if there.or_refused else set()  # which it is there, before the numbers differ
    fails = fails.union(*(one.stages for one in known)) & {*there.stages()}
    for stages in replace(there, fails=frozenset(fails)).runs():
        why = next((one.why for one in known if one.stages & {*stages}), row.kind)
        yield case(replace(there, fails=frozenset(fails)), stages, transport, why)


test_axes = cases_as_test([one for draw in (*drawn(), *([] if DRAWS else FOUND)) for one in cases(draw)])


# Shards and what optimizers step lie in files: the numbers are those of training without. More programs are rows of
# test_axes.py. What lies in the memory of the CPU is compared in tests/offload, where there is a device beside it.


DISK = {"offload": zero.DiskOffload(tempfile.gettempdir())}
adamw = partial(AdamW, lr=0.01)
row = Rows("offload: files", __name__, options=DISK, optim=momentum, cpu_only="there stage 0 is stepped on the GPU")


def in_buckets(t, i):
    (inputs,) = CASES["wide"].batch(t.rank, i).inputs
    t.update(t.note(t.m(inputs).square().mean()))


row.of("SGD steps files")
row.of("AdamW steps parameters of every odd kind", lambda t, i: t.update(t.note(odd_loss(t.m, t.rank, i))), net=OddNet)
row.of("fused Adam steps several buckets", in_buckets, net=WideMLP, optim=partial(Adam, lr=0.01, fused=True))
row.of("whole parameters are stepped", optim=adamw, options={**DISK, "partition": "whole"})
row.of(
    "an optimizer that is not elementwise steps all at once",
    optim=partial(Adafactor, lr=0.01),
    options={**DISK, "partition": "whole"},
)


@row(optim=adamw)
def a_schedule_is_followed_and_state_loaded(t, i):
    t.kept.schedule = t.kept.schedule if i else StepLR(t.o, 1, gamma=0.5)
    t.update(t.loss(i))
    t.kept.schedule.step()
    t.o.load_state_dict(t.o.state_dict())


@row(optim=adamw, steps=4)
def steps_with_a_closure_and_without_take_turns(t, i):
    def closure():
        t.o.zero_grad()
        loss = t.loss(i)
        loss.backward()
        return loss

    if i % 2:
        t.note(t.o.step(closure))
    else:
        closure()
        t.o.step()


@row()
def hooks_see_one_step(t, i):
    t.kept.steps = t.kept.steps if i else []
    for add in (t.o.register_step_pre_hook, t.o.register_step_post_hook) if i == 0 else ():
        add(lambda *_: t.kept.steps.append(1))
    t.update(t.loss(i))
    t.note(torch.tensor(len(t.kept.steps)))


test_files = row.tests()


# A default device that is not the model's, and that lets no value survive, where the rows of test_axes.py do not
# look: mixed precision, models that are built there, exports, plans, and imports.


CASE = CASES["mlp"]


@contextmanager
def default(device: str | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def unchanged(work: Callable[..., Any], *args: Any) -> None:
    """Asserts that `work` comes to the same whatever the default device is."""
    found = []
    for device in (None, "meta"):
        with default(device):
            found.append(work(*args))
    same(found[1], found[0])


def halves(rank: int, stage: int) -> Any:
    """Parameters of 16 bits and what is stepped in 32, with buffers; gradients travel in 16 bits."""
    with torch.device("cpu"):
        model, given = CASES["convnet"].model(), [CASES["convnet"].batch(rank, step) for step in range(3)]
    sgd = partial(SGD, lr=0.1, momentum=0.9)
    policy = zero.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model, optimizer = zero.setup(model, sgd, stage=stage, precision=policy)
    squares = (model(one.inputs[0].bfloat16()).float().square().mean() for one in given)
    losses = [take_step(optimizer, loss) for loss in squares]
    return losses, zero.full_state_dict(model, to=None), zero.full_optimizer_state_dict(model, optimizer, to=None)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_mixed_precision_does_not_depend_on_the_default_device(rank, world, stage):
    unchanged(halves, rank, stage)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(13))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.data.copy_(torch.linspace(0, 3, 13).sin())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@ranks.on(2)
def test_a_model_built_and_sharded_where_new_tensors_have_no_values_gets_its_own(rank, world):
    with torch.device("meta"):
        model = zero.FSDP(nn.Sequential(Waves(), Waves()))
        optimizer = SGD(model.parameters(), lr=0.1)
        model(torch.ones(5, 13, device=gpus.DEVICE)).sum().backward()
        found = zero.full_state_dict(model, to=None)
        optimizer.step()
    same(found, nn.Sequential(Waves(), Waves()).state_dict())


@matrix.only
def test_exports_and_plans_do_not_depend_on_the_default_device(tmp_path):
    model = CASE.model()
    zero.checkpoint.save(tmp_path / "run", model)
    with default("meta"):
        zero.checkpoint.export.export(tmp_path / "run", tmp_path / "exported")
    same(load_file(tmp_path / "exported" / "model.safetensors"), dict(model.state_dict()))
    inputs = CASE.batch(0, 0).inputs
    unchanged(lambda: zero.plan(model, world_size=2, batch=inputs, stages=[1, 2, 3]).table())


@pytest.mark.slow
def test_importing_zero_makes_no_tensor_on_the_default_device():
    """Tensors that are made with a module stay for the life of the process."""
    script = """import gc, torch
torch.set_default_device("meta")
import zero, zero.plan, zero.checkpoint
assert not [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.is_meta]"""
    python("-W", "ignore", "-c", script)
