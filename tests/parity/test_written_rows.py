"""What is written into optimizer.state, weights and state_dict(), between steps or between a forward and its
backward, counts at once, or is refused with its remedy. With masters: oss/test_master.py. Other data at stage 3:
fsdp/test_guard.py."""

import copy
import io
import os
import tempfile
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import gpus
import matrix
import ranks
import zero
from rows import WIDTH, Net, Rows, adam, changed, momentum, sgd, trains
from runs import norm_of_gradients
from transports import TRANSPORTS, by
from zoo import batch, data

row = Rows("B2: writes into optimizer.state count", __name__)

NAME = r"(first|last|blocks\.\d\.\w+)\.(weight|bias)"


def after_a_step(change, t, i):
    if i == 0:
        t.kept.state = t.o.state
    t.o.zero_grad()
    t.loss(i).backward()
    t.o.step()
    change(t, i)


def assign(t, of):
    for p in t.n.parameters():
        t.o.state[p] = of(t.o.state.get(p, {}))


def without_first_moments(kept):
    return {key: value * (key != "exp_avg") for key, value in kept.items()}


def show_one_entry_less(t, i):
    t.kept.state.pop(t.n.last.weight, None)
    assert t.n.last.weight not in t.o.state


def have_an_entry_each(t, i):
    assert [p for p in t.n.parameters() if p in t.kept.state] == [*t.n.parameters()]
    assert {*t.o.state} == {*t.n.parameters()}
    assert len(t.o.state) == len([*t.n.parameters()])


def assign_without_one_layer(t, i):
    last = {*t.n.last.parameters()}
    t.o.state = defaultdict(dict, {p: kept for p, kept in t.o.state.items() if p not in last})


def put_back(t, i):
    if i == 0:
        t.kept.first = {p: {key: value.clone() for key, value in kept.items()} for p, kept in t.o.state.items()}
    elif i == 1:
        t.o.state.clear()
        t.o.state.update(t.kept.first)


def keep_a_number(t, i):
    for p in t.n.parameters():
        t.o.state[p]["steps"] = t.o.state[p].get("steps", 0) + 1
    t.note(torch.tensor([t.o.state[p]["steps"] for p in t.n.parameters()]))


after = row.within(after_a_step, optim=momentum)

after("state is cleared", lambda t, i: t.o.state.clear())
after("a reference taken before training is cleared", lambda t, i: t.kept.state.clear())
after("the state of one parameter is popped", lambda t, i: t.o.state.pop(t.n.first.weight, None), optim=adam)
after("entries are popped one by one", lambda t, i: [t.o.state.popitem() for _ in [*t.o.state]])
after("the state of biases is deleted", lambda t, i: [t.o.state.__delitem__(p) for p in [*t.o.state] if p.ndim == 1])
after("an empty state is assigned", lambda t, i: setattr(t.o, "state", defaultdict(dict)))
after("a state without one layer is assigned", assign_without_one_layer, optim=adam)
after(
    "an empty state is set by setstate",
    lambda t, i: t.o.__setstate__({"state": defaultdict(dict), "param_groups": t.o.param_groups}),
)
after("one entry is assigned", lambda t, i: t.o.state.__setitem__(t.n.first.weight, {}))
after("halves of buffers are assigned", lambda t, i: assign(t, lambda kept: {key: kept[key] / 2 for key in kept}))
after("entries without first moments are assigned", lambda t, i: assign(t, without_first_moments), optim=adam)
after("entries are updated", lambda t, i: t.o.state.update({p: {} for p in t.n.last.parameters()}))
after("a reference taken before training shows one entry less", show_one_entry_less)
after("entries of the first step are put back", put_back)
after("all parameters have an entry", have_an_entry_each, same={1, 2})
after("every entry is read", lambda t, i: [t.o.state[p].get("momentum_buffer") for p in t.n.parameters()])
after("a number of the user's own is kept", keep_a_number)
after(
    "buffers of full shape are assigned",
    lambda t, i: [t.o.state.__setitem__(p, {"momentum_buffer": torch.zeros_like(p)}) for p in t.n.parameters()],
)
after("buffers are halved", lambda t, i: [kept["momentum_buffer"].mul_(0.5) for kept in t.o.state.values() if kept])
after(
    "buffers are replaced within their entries",
    lambda t, i: [kept.update(momentum_buffer=kept["momentum_buffer"] / 2) for kept in t.o.state.values() if kept],
)


@row(optim=momentum)
def every_entry_is_read_before_training(t, i):
    t.note(torch.tensor([len(t.o.state[p]) for p in t.n.parameters()] if i == 0 else []))
    t.o.zero_grad()
    t.loss(i).backward()
    t.o.step()


test_state = row.tests()


row = Rows("weights that are written between steps", __name__, optim=momentum)


def between_steps(change, t, i):
    if i == 1:
        change(t.n)
    trains(t, i)


def between_backward_and_step(change, t, i):
    t.update(t.loss(i), lambda t: i == 1 and change(t.n))


def other():
    """The weights of another, the same on every rank."""
    return {name: 0.5 * value for name, value in Net().state_dict().items()}


@torch.no_grad()
def fill(net):
    for name, param in net.named_parameters():
        param.copy_(other()[name])


def lend(net):
    kept, net.last.weight.data = net.last.weight.data, net.last.weight.data.clone()
    net.last.weight.data = kept


written = row.within(between_steps, same={1, 2})
written("a state dict is loaded", lambda n: n.load_state_dict(other()))
written("a state dict is loaded into one layer", lambda n: n.last.load_state_dict(n.last.state_dict()), optim=adam)
written("each is copied", fill)
written("each one's data is copied", lambda n: [p.data.copy_(other()[name]) for name, p in n.named_parameters()])
written(
    "all are copied by foreach", lambda n: torch._foreach_copy_([p.data for p in n.parameters()], [*other().values()])
)
written("one row is written", lambda n: n.first.weight.data[3].fill_(0.75))
written("one is given other data, and its own again", lend)
written("the module is moved to where it is", lambda net: net.to(gpus.DEVICE).float().to(torch.float32).eval().train())

GIVEN = "moved, cast or given other data"
MOVED, ASSIGNED = {1: (GIVEN, "OSS"), 2: (GIVEN, "OSS"), 3: GIVEN}, dict.fromkeys((1, 2), ("assign", "OSS"))
lost = row.within(between_backward_and_step, same=(), refused=MOVED)
lost("the module is cast", lambda n: n.double())
lost("one layer is cast", lambda n: n.blocks[0].to(torch.bfloat16))
for frame in (between_steps, between_backward_and_step):
    lost = row.within(frame, same=(), refused=MOVED)
    lost("the module is cast there and back", lambda n: n.half().float())
    lost("one is given an equal copy", lambda n: setattr(n.last.weight, "data", n.last.weight.detach().clone()))
    lost("one is given other data", lambda n: setattr(n.last.weight, "data", 2 * n.last.weight.detach()))
    lost("a vector is loaded", lambda n: vector_to_parameters(2 * parameters_to_vector(n.parameters()), n.parameters()))
    lost = row.within(frame, same=(), refused=ASSIGNED)
    lost("a state dict is assigned", lambda n: n.load_state_dict(other(), assign=True))


row.within(between_steps, same=(), steps=4)(
    "one layer is assigned",
    lambda n: n.last.load_state_dict(copy.deepcopy(n.last).state_dict(), assign=True),
    refused=dict.fromkeys((1, 2), (r"last\.weight", "assign=True")),
)
row.within(between_backward_and_step, same={1, 2}, steps=2)(
    "the module is frozen",
    lambda n: n.requires_grad_(False),  # a plain optimizer steps whatever has a gradient
)
test_written = row.tests()


row = Rows("B8: writes into optimizer.part(param) raise on every rank", __name__)


def parts(t):
    """At stage 0 the parameters themselves."""
    return [getattr(t.o, "part", lambda p: p)(p) for p in t.n.parameters()]


@torch.no_grad()
def climb(t, by):
    for part in parts(t):
        part.add_(by)


def before_a_forward(change, t, i):
    t.o.zero_grad()
    change(t, i)
    t.loss(i).backward()
    t.o.step()


@torch.no_grad()
def clamp_those_kept(t, i):
    if i == 0:
        t.kept.parts = parts(t)
    for part in t.kept.parts:
        part.clamp_(-0.1, 0.1)


told = {"refused": {2: r"optimizer\.part"}, "same": ()}
before = row.within(before_a_forward, **told)

before("all parts are written", lambda t, i: climb(t, 0.01))
before("one part is written", lambda t, i: parts(t)[0].detach().mul_(0.99), optim=momentum)
before("one rank writes parts", lambda t, i: t.rank == 1 and climb(t, 0.01))
before("parts are written at the third step", lambda t, i: i == 2 and climb(t, 0.01))
before("parts are written by foreach", lambda t, i: torch.no_grad()(torch._foreach_mul_)(parts(t), 0.99))
before("parts kept from before training are written", clamp_those_kept)


def accumulate_and_climb(t, i):
    with t.m.no_sync():
        t.loss(10 + i).backward()
    climb(t, 0.01)


before("parts are written in an accumulation", accumulate_and_climb)


row.within(before_a_forward, same={2})("parts are read", lambda t, i: [part.detach().sum() for part in parts(t)])


@row(same={2})
def parts_are_written_between_backward_and_step(t, i):
    """The step gathers what their owners wrote."""
    t.update(t.loss(i), lambda t: climb(t, 0.01))


test_parts = row.tests()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks.on(2)
def test_a_run_that_diverges_goes_on_as_at_any_stage(rank, world, precision):
    """NaN is unlike itself, and is no write through `.data`."""
    model, optimizer = zero.setup(Net(), momentum, stage=3, precision=precision)
    for step in range(9):
        loss = model(batch(rank, step)).float().square().mean() * (float("nan") if step == 2 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isnan()


row = Rows("B11: weights written between a forward and its backward", __name__)

WRITTEN = dict.fromkeys(range(4), "modified by an inplace operation")


def between_a_forward_and_its_backward(change, t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    loss = t.loss(10 + i)
    change(t, i)
    loss.backward()
    t.o.step()


def step_one_layer(t, i):
    for p in t.n.parameters():
        if p is not t.n.last.weight:
            p.grad = None
    t.o.step()


def step_a_closure(t, i):
    def closure():
        t.o.zero_grad()
        loss = t.loss(20 + i)
        loss.backward()
        return loss

    t.o.step(closure)


def load(t, i):
    zero.checkpoint.save(t.folder, t.m, t.o)
    zero.checkpoint.load(t.folder, t.m, t.o)


between = row.within(between_a_forward_and_its_backward, refused=WRITTEN)

between("the optimizer steps", lambda t, i: t.o.step())
between("the optimizer steps by nothing", lambda t, i: t.o.param_groups[0].update(lr=0.0) or t.o.step())
between("one layer is stepped", step_one_layer)
between("a closure is stepped", step_a_closure, optim=momentum)
between("a checkpoint is loaded", load)
between("a full state is loaded", lambda t, i: zero.load_full_state_dict(t.m, zero.full_state_dict(t.m, to=None)))
between("a state dict is loaded", lambda t, i: t.m.load_state_dict(t.m.state_dict()))
between("weights are written by hand", lambda t, i: [p.detach().mul_(0.9) for p in t.n.parameters()])


@row(refused=WRITTEN)
def a_step_between_the_backwards_of_two_forwards(t, i):
    one, two = t.loss(i), t.loss(10 + i)
    one.backward()
    t.o.step()
    two.backward()


@row(refused=WRITTEN)
def a_step_between_two_backwards_through_one_graph(t, i):
    loss = t.loss(i)
    loss.backward(retain_graph=True)
    t.o.step()
    loss.backward()


@row(refused=WRITTEN)
def a_step_between_a_forward_under_no_sync_and_its_backward(t, i):
    t.loss(i).backward()
    with t.m.no_sync():
        loss = t.loss(10 + i)
        t.o.step()
        loss.backward()


@row()
def a_step_without_gradients_comes_between(t, i):
    t.o.zero_grad()
    loss = t.loss(i)
    t.o.step()
    loss.backward()
    t.o.step()


@row(net=lambda: changed(Net(), lambda net: [p.requires_grad_(p.ndim == 1) for p in net.parameters()]))
def a_step_of_biases_alone_comes_between(t, i):
    t.o.zero_grad()
    t.loss(i).backward()
    loss = t.loss(10 + i)
    t.o.step()
    t.o.zero_grad()
    loss.backward()
    t.o.step()


test_weights = row.tests()


def then(act):
    """Trains after a write into what the wrapper's state_dict() has returned."""

    def program(t, i):
        with torch.no_grad():
            act(t.m.state_dict(), t)
        t.update(t.loss(i))

    return program


def follows(average):
    """An average of dictionaries, as timm and YOLOX keep it. average(t): the model whose state_dict() is written."""

    def program(t, i):
        if i == 0:
            t.kept.average = average(t)
        t.update(t.loss(i))
        new = t.m.state_dict()
        with torch.no_grad():
            for name, value in t.kept.average.state_dict().items():
                value.copy_(0.9 * value + 0.1 * new[f"module.{name.removeprefix('module.')}"])
        t.note(sum(value.double().sum() for value in t.kept.average.state_dict().values()))

    return program


def plain_copy(t):
    copied = Net()
    copied.load_state_dict({name.removeprefix("module."): value for name, value in t.m.state_dict().items()})
    return copied


def wrapped_copy(t):
    return plain_copy(t) if t.stage < 3 else zero.FSDP(plain_copy(t))


def keeps_the_best(t, i):
    t.update(t.loss(i))
    kept = copy.deepcopy(t.m.state_dict()) if i else {k: v.clone() for k, v in t.m.state_dict().items()}
    for value in kept.values():
        value.mul_(2)
    saved = io.BytesIO()
    torch.save(t.m.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert {type(value) for value in loaded.values()} == {Tensor} and type(loaded) is OrderedDict
    t.note(sum(value.double().sum() for value in (*kept.values(), *loaded.values())))


def weights_of_trained_ones(t, i):
    t.update(t.loss(i))
    kept = {name: value for name, value in t.m.state_dict(keep_vars=True).items() if value.requires_grad}
    t.note(sum(value.double().sum() for value in kept.values()))


@torch.no_grad()
def scaled(weights):
    for value in weights.values():
        value.mul_(0.9)


READ_ONLY = {"or_refused": r"model\.named_parameters"}
row = Rows("what is written into state_dict() counts", __name__, **READ_ONLY)
row.of("each value is scaled", then(lambda w, t: [value.mul_(0.9) for value in w.values()]))
row.of("a list of them is scaled", then(lambda w, t: torch._foreach_mul_([*w.values()], 0.9)))
row.of("one is filled", then(lambda w, t: w["module.last.bias"].fill_(1.0)))
row.of("one is set", then(lambda w, t: w["module.last.weight"].__setitem__(0, 1.0)))
row.of("a view of one is scaled", then(lambda w, t: w["module.last.weight"].view(-1)[1:].mul_(0.5)))
row.of("the data of one is scaled", then(lambda w, t: w["module.last.weight"].data.mul_(0.5)))
row.of("one is the output of a sum", then(lambda w, t: torch.add(w["module.last.bias"], 1, out=w["module.last.bias"])))
row.of("one is added to by an operator", then(lambda w, t: w["module.last.bias"].__iadd__(1)))
row.of("parameters are scaled", lambda t, i: t.update(t.loss(i)) or scaled(t.m.state_dict(keep_vars=True)))
row.of("an average that is wrapped follows", follows(wrapped_copy))
row.of("a plain average follows", follows(plain_copy), or_refused=None)
row.of("the best is kept", keeps_the_best, or_refused=None)
row.of("trained ones are chosen", weights_of_trained_ones, or_refused=None)
test_state_dicts = row.tests()


# What errors call the things that went wrong, and the remedy that they name.


KIND = "C5: words of errors"
row = Rows(KIND, __name__)


def two(params):
    """A second OSS has params(the module)."""

    def program(t, i):
        if i == 0:
            t.kept.other = zero.OSS(params(t.n), sgd)
        trains(t, i)
        t.loss(i).backward()
        t.kept.other.step()

    return program


HELD = {"or_refused": r"(?i)other (OSS|wrapper|optimizer)|held by|two OSS|FSDP"}
row.of("two OSS have all parameters", two(lambda n: n.named_parameters()), **HELD)
row.of("two OSS have all parameters without names", two(lambda n: n.parameters()), **HELD)
row.of("a second OSS has one layer", two(lambda n: n.last.named_parameters()), **HELD)


DO = {
    "step": lambda t: t.o.step(),
    "forward": lambda t: t.loss(9),
    "norm": lambda t: norm_of_gradients(t.m),
    "clipping by the norm": lambda t: clip_grad_norm_(t.m.parameters(), 1.0),
    "state": lambda t: zero.full_optimizer_state_dict(t.m, t.o, to=None),
}


def apart(zeroth, first):
    """What rank 0 does where the other does something else."""

    def program(t, i):
        if i == 2:
            t.loss(i).backward()
            DO[first if t.rank else zeroth](t)
        trains(t, i)

    words = ("(?s)^(?!.*a sum over the ranks)", f"(?<!out of ){zeroth.split()[-1]}")
    row.of(f"{zeroth} beside {first}", program, steps=4, same=(), refused={2: words, 3: words})


apart("step", "forward")
apart("step", "state")
apart("norm", "forward")
apart("norm", "step")
apart("clipping by the norm", "forward")
apart("clipping by the norm", "state")


def replaced(replace, on=(0, 1)):
    """replace(the module, that of another FSDP) on these ranks."""

    def program(t, i):
        if i == 0:
            t.kept.other = zero.FSDP(Net())
            replace(t.n, t.kept.other.module) if t.rank in on else None
        trains(t, i)

    return program


LOST = {"same": (), "refused": {3: r"(last|blocks\.\d\.up)\.weight"}}
row.of("a weight is another FSDP's", replaced(lambda n, o: setattr(n.last, "weight", o.last.weight)), **LOST)
row.of("on one rank alone", replaced(lambda n, o: setattr(n.last, "weight", o.last.weight), on=[1]), **LOST)
row.of("a layer is another FSDP's", replaced(lambda n, o: setattr(n, "last", o.last)), **LOST)
row.of(
    "a layer is another one",
    replaced(lambda n, _: setattr(n.blocks[0], "up", n.blocks[1].up)),
    same={2, 3},
    ddp={"find_unused_parameters": True},
)


def returned(what):
    """A hook after the gradients of a weight returns what(the weight)."""

    def program(t, i):
        if i == 0:
            t.n.first.weight.register_post_accumulate_grad_hook(what)
        trains(t, i)

    return program


NONE = {"same": (), "refused": dict.fromkeys(range(4), r"(?i)return None")}
row.of("a hook after a gradient returns the parameter", returned(lambda param: param))
row.of("a hook after a gradient returns the gradient", returned(lambda param: param.grad), **NONE)
row.of("a hook after a gradient returns a copy", returned(lambda param: param.detach().clone()), **NONE)
test_words = row.tests()

ENDS = {
    "it ends": lambda model, optimizer: None,
    "it evaluates": lambda model, optimizer: model.eval()(torch.ones(1, WIDTH)),
    "it leaves the group": lambda model, optimizer: torch.distributed.destroy_process_group(),
    "it collects state": zero.full_optimizer_state_dict,
    "it saves": lambda model, optimizer: zero.checkpoint.save(tempfile.mkdtemp(), model, optimizer),
}


def ended(rank, world, stage, end, transport):
    with by(transport):
        model, optimizer = zero.setup(Net(), sgd, stage=stage)
        for i in range(4 if rank else 2):
            model(data(4, WIDTH, rank=rank, step=i)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            ENDS[end](model, optimizer)
        os._exit(0)


@pytest.mark.slow
@matrix.combined("stage, end, transport", [2, 3], ENDS, TRANSPORTS)
def test_where_a_rank_ends_early_the_other_is_told_of_join(end, stage, transport):
    with pytest.raises(ranks.RankError) as raised:
        ranks.run(ended, args=(stage, end, transport), timeout=20)
    assert "zero.join" in raised.value.outcomes[1].message
