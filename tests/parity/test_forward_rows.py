"""Models whose forwards read parameters outside their units, write into them or keep them; whose buffers change; whose
parameters() is their own; whose parameters share memory."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import gpus
import ranks
import zero
from rows import WIDTH, Loop, Rows, adam, changed
from zero.wrap.tensors import tensors_in
from zoo import Block, Stack, made

UNITS = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
LATER = {"or_refused": r"gain|body|head", "fails": {3}}


class Net(nn.Module):
    """Two units, and a parameter of the root, which forward reads if `inside`. Between the units is read(x, weight of
    `of`, or the net), from forward number `since` on."""

    def __init__(self, read=lambda x, w: x, of: str | None = "head", since: int = 0, inside: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.read, self.of, self.since, self.inside, self.count = read, of, since, inside, 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x) @ self.gain if self.inside else self.body(x))
        x = self.read(x, getattr(self, self.of).weight if self.of else self) if self.count >= self.since else x
        self.count += 1
        return self.head(torch.tanh(x))


def with_a_number() -> Net:
    """Which one rank owns whole."""
    times = made(
        nn.Linear, lambda self, x: nn.Linear.forward(self, x) * self.by, by=lambda: nn.Parameter(torch.tensor(0.7))
    )
    return changed(Net(), lambda net: setattr(net, "body", times(WIDTH, WIDTH)))


NUMBER = {"net": with_a_number, "or_refused": r"body\.by"}


def outside(read):
    """A loss of read(outputs, the module)."""
    return lambda t, i: t.update(t.note(read(t.m(t.batch(i)), t.n).square().mean()))


row = Rows("C1: a parameter of the root outside forward", __name__, net=lambda: Net(inside=False), options=UNITS)
row.of("outputs are multiplied by it", outside(lambda y, n: y @ n.gain.t()))
row.of("it is given to linear", outside(lambda y, n: nn.functional.linear(y, n.gain)), optim=adam)
row.of("its mean is a factor", outside(lambda y, n: y * n.gain.mean()))
row.of("a penalty is on it", lambda t, i: t.update(t.loss(i) + t.n.gain.square().mean()), or_refused="gain")
row.of("a penalty is on a number of a unit", lambda t, i: t.update(t.loss(i) + t.n.body.by.square().sum()), **NUMBER)
row.of("outputs are multiplied by it, as in forward", outside(lambda y, n: y @ n.gain), net=Net, or_refused="gain")
row.of("outputs are multiplied by it, detached", outside(lambda y, n: y @ n.gain.detach()), net=Net, or_refused="gain")
row.of(
    "inputs are multiplied by it", lambda t, i: t.update(t.m(t.batch(i) @ t.n.gain).square().mean()), or_refused="gain"
)
row.of("outputs are multiplied by a unit's weight", outside(lambda y, n: y @ n.body.weight), net=Net, or_refused="body")
row.of("outputs go through a unit again", outside(lambda y, n: n.body(y)), net=Net)
test_outside = row.tests()


def function(forward, backward):
    of = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Function", (torch.autograd.Function,), of).apply


product = function(
    lambda ctx, x, w: ctx.save_for_backward(x, w) or x @ w.t(),
    lambda ctx, g: (lambda x, w: (g @ w, g.t() @ x))(*ctx.saved_tensors),
)
decay = function(lambda ctx, x, w: ctx.save_for_backward(w) or x.view_as(x), lambda ctx, g: (g, ctx.saved_tensors[0]))


def kept(look, hook="register_forward_hook"):
    """What a hook of the body keeps of its weight is read after the step."""

    def program(t, i):
        seen = []
        handle = getattr(t.n.body, hook)(lambda layer, *_: seen.append(look(layer.weight.detach())))
        t.update(t.m(t.batch(i).requires_grad_()).square().mean())
        handle.remove()
        t.note(torch.as_tensor(seen[0]).clone())

    return program


def dual(t, i):
    with forward_ad.dual_level():
        t.note(forward_ad.unpack_dual(t.m(forward_ad.make_dual(t.batch(i), t.batch(9)))).tangent)


CLONE, WORDS = {"or_refused": "clone"}, {"or_refused": "FSDP"}
NUMPY = {"or_refused": "clone", "cpu_only": "NumPy reads no memory of GPUs"}
row = Rows("C2: a Function, an array or a transform reads a parameter", __name__, net=Net, options=UNITS)
row.of("a product reads the unit that follows", net=lambda: Net(product))
row.of("backward alone reads the unit that follows", net=lambda: Net(decay), **LATER)
row.of("backward alone reads the unit before", net=lambda: Net(decay, "body"), **LATER)
row.of("a checkpoint reads", net=lambda: Net(lambda x, w: checkpoint(product, x, w, use_reentrant=False)))
row.of("a product reads the unit before", net=lambda: Net(product, "body"))
row.of("a plain product reads the unit that follows", net=lambda: Net(lambda x, w: x @ w.t()))
row.of("forward has an array", net=lambda: Net(lambda x, w: x * float(w.detach().numpy().mean()), "body"), **NUMPY)
row.of("a hook keeps an array", kept(lambda w: w.numpy()), **NUMPY)
row.of("a hook keeps an array of a clone", kept(lambda w: w.clone().numpy()), **NUMPY)
row.of("a backward hook keeps an array", kept(lambda w: w.numpy(), "register_full_backward_hook"), **NUMPY)
row.of("a hook keeps what has no gradient", kept(lambda w: w), **CLONE)
row.of("a hook keeps a view by DLPack", kept(torch.from_dlpack), **CLONE)
row.of("jvp", lambda t, i: t.note(func.jvp(t.m, (t.batch(i),), (t.batch(9),))[1]), **WORDS)
row.of("dual tensors", dual)
row.of("func.grad", lambda t, i: t.note(func.grad(lambda x: t.m(x).sum())(t.batch(i))), **WORDS)
row.of("jacrev", lambda t, i: t.note(func.jacrev(t.m)(t.batch(i))), **WORDS, cpu_only="cuBLAS warns in its backward")
row.of("vmap", lambda t, i: t.note(func.vmap(t.m)(t.batch(i))))
test_readers = row.tests()


class Keeps(nn.Linear):
    def __init__(self, keep, out: bool = False, where=lambda kept: kept) -> None:
        super().__init__(WIDTH, WIDTH)
        self.keep, self.out, self.where, self.kept = keep, out, where, None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        kept, y = self.where(self.keep(self.weight)), super().forward(x)
        if self.out:
            return y, kept
        self.kept = kept
        return y


class OfKept(nn.Module):
    def __init__(self, *args, **how) -> None:
        super().__init__()
        self.body, self.head = Keeps(*args, **how), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.body.out:
            x, self.body.kept = x
        return self.head(torch.tanh(x))


@torch.no_grad()
def flat(weight: Tensor) -> Tensor:
    return weight.view(-1)


def read_then(t, i):
    """What was kept is read after forward and after the step."""
    loss = t.loss(i)
    for act in (lambda: t.update(loss), lambda: None):
        kept = t.n.body.kept
        t.note(next(iter(tensors_in(kept))) + 1)
        act()


FORMS = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "a view": lambda w: w[1:],
    "its transpose": lambda w: w.t(),
    "a chunk": lambda w: w.chunk(2)[0],
    "a view without gradient": flat,
    "a view of detach": lambda w: w.detach().view(-1)[2:],
    "detach of a view": lambda w: w[1].detach(),
    "a split of data": lambda w: w.data.split(2)[1],
}
PLACES = {
    "in a list": lambda kept: [kept],
    "in a dictionary": lambda kept: {"one": kept},
    "in an object": lambda kept: SimpleNamespace(value=kept),
}


class Mine(Tensor):
    """A class of the user's, whose results are of it."""


def of_a_class(x, net):
    y = x.as_subclass(Mine) @ net.gain.t()
    assert type(y) is Mine
    return y.as_subclass(Tensor) * net.gain[0]


row = Rows("views of a full parameter", __name__, options=UNITS)
VIEWS = {
    "beside another unit's weight": lambda x, net: x @ (net.gain.t() + net.head.weight),
    "in a list with it": lambda x, net: x @ torch.stack([net.gain.t(), net.head.weight]).sum(0),
    "beside a tensor of the user's class": of_a_class,
    "written in forward": lambda x, net: x @ net.gain.detach().mul_(0.99).t() @ net.gain,
    "of several kinds": lambda x, net: x * net.gain.view(-1)[:WIDTH] + net.gain.chunk(2)[1].mean(0),
}
for words, view in VIEWS.items():
    row.of(words, net=partial(Net, view, None, inside=False))
test_views = row.tests()


class Through(nn.Module):
    def __init__(self, run) -> None:
        super().__init__()
        self.body, self.head, self.run = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), run

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.run(self.body, x)))


class Adjoint(torch.autograd.Function):
    """Computes the block again in backward, and its gradients by hand, as torchdiffeq's adjoint does."""

    @staticmethod
    def forward(ctx, block, x, *params):
        ctx.block = block
        ctx.save_for_backward(x, *params)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.block(x), (x, *params), gradient)


def inner_gradient(block, x):
    """Of a part of the units, as forces from an energy."""
    x = x if x.requires_grad else x.requires_grad_()
    y = block(x)
    return y + torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]


def evaluated_and_halved(t, i):
    t.note(t.m(t.batch(i)))
    for param in t.n.parameters():
        param.data.mul_(0.5)
    t.note(t.m(t.batch(10 + i)))
    t.note(t.m(t.batch(20 + i)))


row = Rows("a forward runs a block by another function", __name__, options=UNITS)
row.of("vmap", net=partial(Through, lambda block, x: func.vmap(block)(x)))
row.of("jvp", net=partial(Through, lambda block, x: func.jvp(block, (x,), (x,))[1]), **WORDS)
row.of("vjp", net=partial(Through, lambda block, x: func.vjp(block, x)[1](x)[0]), **WORDS)
row.of("grad", net=partial(Through, lambda block, x: func.grad(lambda y: block(y).sum())(x)), **WORDS)
row.of("an adjoint", net=partial(Through, lambda block, x: Adjoint.apply(block, x, *block.parameters())))
row.of("a gradient of its input", net=partial(Through, inner_gradient))
row.of("a gradient of its input, evaluated", evaluated_and_halved, net=partial(Through, inner_gradient))
test_by_functions = row.tests()


row = Rows("a forward keeps a parameter's memory", __name__, options=UNITS, or_refused="clone", same={3})
for words, form in FORMS.items():
    row.of(f"{words} is an attribute", read_then, net=partial(OfKept, form))
    row.of(f"{words} is an output", net=partial(OfKept, form, True))
for words, place in PLACES.items():
    row.of(f"detach is kept {words}", read_then, net=partial(OfKept, FORMS["detach"], where=place))
    row.of(f"detach is an output {words}", net=partial(OfKept, FORMS["detach"], True, place))
row.of("a view is kept in a list", read_then, net=partial(OfKept, FORMS["a view"], where=PLACES["in a list"]))
row.of(
    "a view is kept in a dictionary", read_then, net=partial(OfKept, FORMS["a view"], where=PLACES["in a dictionary"])
)
row.of("detach and data are saved for backward", net=lambda: Net(lambda x, w: x * w.detach()[0] @ w.data, "body"))
test_kept = row.tests()


class Halving(nn.Linear):
    """Writes so that torch does not count it, from forward number `since` on."""

    def __init__(self, since: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.since, self.count = since, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.count >= self.since:
            self.weight.data.mul_(0.5)
        self.count += 1
        return super().forward(x)


row = Rows("C7: a forward that begins later to read another unit, or to write", __name__, options=UNITS)
row.of("a product, in the second forward", net=lambda: Net(lambda x, w: x @ w.t(), since=1))
row.of("a product, in the third forward", net=lambda: Net(lambda x, w: x @ w.t(), since=2), optim=adam)
row.of("a mean", net=lambda: Net(lambda x, w: x * w.mean(), since=1))
row.of("a norm", net=lambda: Net(lambda x, w: x / w.norm(), "body", since=1))
row.of("a spread without gradient", net=lambda: Net(lambda x, w: x * w.detach().std(), "body", since=1))
row.of("a number", net=lambda: Net(lambda x, w: x * w.mean().item(), since=1))
# On GPUs no graph's nodes are kept from step to step, as a node keeps its stream.
row.of("a Function", net=lambda: Net(product, since=1), or_refused="autograd.Function" if gpus.ON else None)
row.of("a write, in the second forward", net=lambda: Halving(1))
# Nobody looks in the third forward.
row.of("a number, in the third", net=lambda: Net(lambda x, w: x * w.mean().item(), since=2), steps=4, or_refused="head")
row.of("a write, in the third", net=lambda: nn.Sequential(Halving(2)), steps=6, or_refused=r"\.data")
test_later = row.tests()


class Norm(nn.Sequential):
    def __init__(self, middle=nn.BatchNorm1d, **how) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), middle(WIDTH, **how), nn.Tanh(), nn.Linear(WIDTH, 3))


def forwards(*training, act=lambda t, i: None):
    """A forward in each of these modes; None is an evaluation without gradients. Then one backward."""

    def program(t, i):
        act(t, i)
        loss = 0.0
        for k, mode in enumerate(training):
            t.m.train(bool(mode))
            with torch.set_grad_enabled(mode is not None):
                one = t.loss(10 * k + i)
            loss = loss if mode is None else loss + one
        t.update(loss)

    return program


row = Rows(
    *("C3: two forwards and one backward of a model with buffers", __name__),
    net=Norm,
    cpu_only="there DistributedDataParallel refuses them",
    since="2.12",
)
row.of("two in training", forwards(True, True))
row.of("three in training", forwards(True, True, True), net=lambda: Norm(momentum=None), optim=adam)
row.of("two with a spectral norm", forwards(True, True), net=lambda: Norm(lambda w: spectral_norm(nn.Linear(w, w))))
row.of("an evaluation without gradients is between", forwards(True, None))
row.of("training, then evaluation", forwards(True, False))
row.of("evaluation, then training", forwards(False, True))
row.of("two in evaluation", forwards(False, False))
row.of("buffers of one rank differ", forwards(False, act=lambda t, i: t.n[1].running_mean.data.add_(t.rank)))
row.of("they differ before two", forwards(False, False, act=lambda t, i: t.n[1].running_var.data.add_(t.rank)))
test_buffers = row.tests()


row = Rows("D: parameters() that leave some out, or are no iterator of parameters", __name__, tolerance=1e-5)


def overridden(base: type[nn.Module], name: str, make: Callable[[Any], Iterable[Any]]) -> type[nn.Module]:
    def method(module: Any, *args: Any, **how: Any) -> Iterable[Any]:
        return make(getattr(super(found, module), name)(*args, **how))

    found = type(base.__name__, (base,), {name: method})
    return found


def frozen(net: Stack) -> Stack:
    net.first.requires_grad_(False)
    net.blocks[0].up.requires_grad_(False)
    return net


MAKES: dict[str, tuple[str, Callable[[Any], Iterable[Any]]]] = {
    "parameters() that leave frozen ones out": ("parameters", lambda own: (p for p in own if p.requires_grad)),
    "parameters() that are a list": ("parameters", list),
    "parameters() that are groups": ("parameters", lambda own: [{"params": [*own], "lr": 0.1}]),
    "named_parameters() that leave frozen ones out": (
        "named_parameters",
        lambda own: ((name, param) for name, param in own if param.requires_grad),
    ),
}


class WithoutArguments(Stack):
    def parameters(self) -> Any:  # type: ignore[override]
        return [*super().parameters()]


def trains_and_saves(t: Loop, i: int) -> None:
    t.loss(i).backward()
    t.clip(1.0)
    t.o.step()
    t.o.zero_grad()
    if i == 1:
        zero.load_full_state_dict(t.m, zero.full_state_dict(t.m, to=None))
        zero.load_full_optimizer_state_dict(t.m, t.o, zero.full_optimizer_state_dict(t.m, t.o, to=None))
        zero.checkpoint.save(t.folder, t.m, t.o)
        zero.checkpoint.load(t.folder, t.m, t.o)


for title, (name, make) in MAKES.items():
    model, block = overridden(Stack, name, make), overridden(Block, name, make)
    row.of(title, trains_and_saves, net=lambda model=model: frozen(model(classes=3)))
    row.of(f"{title}, of blocks", trains_and_saves, net=lambda block=block: frozen(Stack(block, classes=3)))
row.of("parameters() without arguments", trains_and_saves, net=lambda: frozen(WithoutArguments(classes=3)))

test_overridden = row.tests()


def unwrapped(t: Loop, i: int) -> None:
    t.update(t.loss(i))
    assert zero.unwrap(t.m) is t.n and t.n.first.weight.shape == (WIDTH, WIDTH)


unwraps = Rows("D: parameters() of one's own, unwrapped", __name__)
for title, (name, make) in MAKES.items():
    model = overridden(Stack, name, make)
    unwraps.of(title, unwrapped, steps=1, net=partial(model, classes=3))

test_unwraps = unwraps.tests()


Change = Callable[["Embedded"], object]


class Embedded(nn.Module):
    """An embedding, layers, and an output layer, in the shapes of ties.

    change: what is done to it before it is wrapped. act: what it does to itself "before" or "after" its layers in each
    forward, or in the one that has the number `when`.
    """

    def __init__(self, change: Change = id, act: Change = id, when: object = "before") -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.act, self.when, self.count = act, when, 0
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.when in ("before", self.count):
            self.act(self)
        x = self.emb(x.argmax(1) % 7) + sum((buffer.mean() for buffer in self.buffers()), torch.zeros(()))
        for block in self.blocks:
            x = torch.tanh(block(x))
        y = self.out(x + self.teacher(x))
        if self.when == "after":
            self.act(self)
        return y


def give(param: Tensor, data: Tensor) -> None:
    param.data = data


def slices(net: Embedded, start: int) -> None:
    both, size = torch.randn(14 * WIDTH), 7 * WIDTH
    net.emb.weight.data, net.out.weight.data = both[:size].view(7, -1), both[start : start + size].view(7, -1)


B4 = "B4: parameters that share memory"
TIED = ("out.weight", "emb.weight", "out.weight = emb.weight")
BLOCKS = ("blocks.0.weight", "blocks.1.weight")

SHARING: dict[str, tuple[Change, tuple[str, ...]]] = {
    "an output layer has the data of the embedding": (lambda n: give(n.out.weight, n.emb.weight.data), TIED),
    "a new parameter has it": (lambda n: setattr(n.out, "weight", nn.Parameter(n.emb.weight.data)), TIED),
    "it is loaded with assign": (lambda n: n.out.load_state_dict(n.emb.state_dict(), assign=True), TIED),
    "it is frozen": (lambda n: give(n.out.weight, n.emb.requires_grad_(False).weight.data), TIED),
    "on one rank alone": (lambda n: give(n.out.weight, n.emb.weight.data) if dist.get_rank() else None, TIED),
    "units have the same data": (lambda n: give(n.blocks[1].weight, n.blocks[0].weight.data), BLOCKS),
    "transposed data": (lambda n: give(n.blocks[1].weight, n.blocks[0].weight.data.t()), BLOCKS),
    "slices of one tensor overlap": (lambda n: slices(n, 3 * WIDTH), TIED[:2]),
    "slices have one element in common": (lambda n: slices(n, 7 * WIDTH - 1), TIED[:2]),
    "a bias is a row of a weight": (lambda n: give(n.blocks[0].bias, n.emb.weight.data[2]), ("blocks.0.bias", TIED[1])),
    "a view in another dtype": (
        lambda n: n.register_parameter("c", nn.Parameter(torch.view_as_complex(n.emb.weight.data.view(-1, 2)))),
        ("emb.weight", "c"),
    ),
}


def wrapped(rank: int, world: int, share: str, by: object) -> None:
    net = Embedded(SHARING[share][0])
    zero.setup(net, adam, stage=by) if by in (1, 2, 3) else zero.OSS(net.parameters(), adam)


@pytest.mark.parametrize("by", [1, 2, 3, "OSS without names"])
@pytest.mark.parametrize("share", SHARING)
def test_parameters_that_share_memory_are_refused_on_every_rank(share, by):
    """by: a stage, or the class."""
    told = ranks.expect_error(wrapped, 2, ValueError, args=(share, by), timeout=15)
    facts = SHARING[share][1] if by in (1, 2, 3) else ("parameter ", "of group 0")
    assert all(fact in text for fact in facts for text in told), told


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, ValueError, r"'graph' has layout torch\.sparse_coo.*\.to_dense\(\)", timeout=15)
def test_a_sparse_buffer_is_refused(rank, world, stage):
    zero.setup(Embedded(lambda n: n.register_buffer("graph", torch.eye(3).to_sparse())), adam, stage=stage)


def fuse(net: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(net.parameters()).detach(), net.parameters())


recurrent = made(nn.LSTM, lambda self, x: nn.LSTM.forward(self, x)[0])
row = Rows(B4, __name__)
row.of("weights are fused", net=lambda: changed(recurrent(WIDTH, 5, 2, bidirectional=True), fuse))
row.of("slices of one tensor touch", net=lambda: Embedded(lambda n: slices(n, 7 * WIDTH)))
row.of(
    "a weight is tied as a parameter",
    net=lambda: Embedded(lambda n: setattr(n.out, "weight", n.emb.weight)),
    optim=adam,
)
row.of("a layer is a shallow copy", net=lambda: Embedded(lambda n: n.blocks.append(copy.copy(n.blocks[0]))))
row.of(
    "one is empty",
    net=lambda: Embedded(lambda n: n.register_parameter("no", nn.Parameter(n.out.weight.data[2:2], False))),
)
row.of(
    "a buffer has the data of a weight",
    net=lambda: Embedded(lambda n: n.register_buffer("kept", n.out.weight.data)),
    or_refused="out.weight",
)

test_memory = row.tests()

NAME = r"blocks\.\d\.weight"
row = Rows("B5: p.data = ... inside forward", __name__, options=UNITS)
LOST = {"same": {3}, "refused": {1: NAME, 2: NAME}, "or_refused": NAME}
"""Refused at stages 1 and 2. At stage 3 so, too, or it counts."""


def average(net: Embedded) -> None:
    for mean, param in zip(net.teacher.parameters(), net.blocks[0].parameters(), strict=True):
        mean.data = 0.9 * mean.data + 0.1 * param.data


def halve(layer: nn.Module, *_: object) -> None:
    layer.weight.data = 0.5 * layer.weight.data


def clamp(net: Embedded) -> None:
    give(net.blocks[0].weight, net.blocks[0].weight.data.clamp(-0.1, 0.1))


TEACHER = {**LOST, "refused": dict.fromkeys((1, 2), "teacher"), "or_refused": "teacher"}
row.of("a teacher is a moving average", net=lambda: Embedded(act=average), **TEACHER)
row.of("so it is within one unit", net=lambda: Embedded(act=average), options={}, **TEACHER)
row.of(
    "a teacher follows at the end of forward", net=lambda: Embedded(act=average, when="after"), optim=adam, **TEACHER
)
row.of("a weight is clamped before its use", net=lambda: Embedded(act=clamp), **LOST)
row.of("a weight is clamped after its use", net=lambda: Embedded(act=clamp, when="after"), **LOST)
row.of("the second forward alone writes", net=lambda: Embedded(act=lambda n: halve(n.blocks[0]), when=2), **LOST)
row.of(
    "a hook after the layer writes", net=lambda: Embedded(lambda n: n.blocks[0].register_forward_hook(halve)), **LOST
)
row.of(
    "a hook before the unit writes",
    net=lambda: Embedded(lambda n: n.blocks[0].register_forward_pre_hook(halve)),
    **LOST,
)
row.of("a backward hook writes", net=lambda: Embedded(lambda n: n.blocks[1].register_full_backward_hook(halve)), **LOST)
row.of("a weight is halved in place", net=lambda: Embedded(act=lambda n: n.out.weight.data.mul_(0.5)))
row.of(
    "one rank alone gives its weight a copy",
    net=lambda: Embedded(act=lambda n: give(n.out.weight, n.out.weight.data.clone()) if dist.get_rank() else None),
    or_refused="out.weight",
    fails={3},
)

test_forward = row.tests()
