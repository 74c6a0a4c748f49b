"""Parameters that are read outside their units, and several forwards of a model with buffers."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import gpus
from rows import WIDTH, Rows, adam
from zero.wrap.tensors import tensors_in

UNITS = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
LATER = {"or_refused": r"gain|body|head", "fails": {3}}


class Net(nn.Module):
    """Two units, and a parameter of the root, which forward reads if `inside`. Between the units is read(x, weight of
    `of`), from forward number `since` on."""

    def __init__(self, read=lambda x, w: x, of: str = "head", since: int = 0, inside: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.read, self.of, self.since, self.inside, self.count = read, of, since, inside, 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x) @ self.gain if self.inside else self.body(x))
        x = self.read(x, getattr(self, self.of).weight) if self.count >= self.since else x
        self.count += 1
        return self.head(torch.tanh(x))


class Times(nn.Linear):
    """Has a number, which one rank owns whole."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.by = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.by


def with_a_number() -> Net:
    net = Net()
    net.body = Times()
    return net


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
    """Keeps what `keep` makes of its weight as `kept`, or hands it out beside its output if `out`."""

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


class Views(Net):
    """Computes with views of the root's parameter beside `other`."""

    def __init__(self, other) -> None:
        super().__init__(inside=False)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.other(self, torch.tanh(self.body(x)))))


def of_a_class(net, x):
    y = x.as_subclass(Mine) @ net.gain.t()
    assert type(y) is Mine
    return y.as_subclass(Tensor) * net.gain[0]


row = Rows("views of a full parameter", __name__, options=UNITS)
row.of("beside another unit's weight", net=partial(Views, lambda net, x: x @ (net.gain.t() + net.head.weight)))
row.of("in a list with it", net=partial(Views, lambda net, x: x @ torch.stack([net.gain.t(), net.head.weight]).sum(0)))
row.of("beside a tensor of the user's class", net=partial(Views, of_a_class))
row.of("written in forward", net=partial(Views, lambda net, x: x @ net.gain.detach().mul_(0.99).t() @ net.gain))
row.of(
    "of several kinds", net=partial(Views, lambda net, x: x * net.gain.view(-1)[:WIDTH] + net.gain.chunk(2)[1].mean(0))
)
test_views = row.tests()


class Through(nn.Module):
    """Its block is run by `run`, before a layer."""

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
    """Written between two forwards of which none is followed by a backward."""
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
