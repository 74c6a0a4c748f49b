"""Operations on sharded tensors between steps, drawn at random: what they return, what they write and the steps that
follow are as with full tensors, or every rank raises.

A draw is a small model of odd shapes, dtypes and layouts, a tensor of it, and a function of torch or a form that people
write, with arguments beside it. All bits are the same, but of what ranks add up: ROUNDED, and functions of ADDED_UP
that return a number. `make matrix` draws 2,000, others each time; a draw that fails is printed with its number, and
ZERO_DRAW=number repeats it (-k chooses the case).
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
import re
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from forms import FORMS, compiled
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import init
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.overrides import get_overridable_functions

import matrix
import ranks
import zero
from transports import TRANSPORTS, calling

FIRST, COUNT = (random.randrange(10**9), 63) if matrix.WHOLE else (0, 8)
"""The numbers of each case's draws."""

KNOWN: dict[str, str] = {
    "constructors take the shard": r"torch\.(as_)?tensor\(t|new_tensor|nn\.Parameter\(t",
    "what is written with a graph gets none": r"(_\(|= |_ of |__i\w+__).*with a graph",
    "a gathered copy is returned for the tensor itself": r"atleast_",
    "torch.testing compares classes": r"assert_close",
}
"""What does not hold yet, by a pattern of the words for a draw: others are drawn in its place."""

REFUSED = "writes into a copy of|needs the full tensor|cannot be (copied or )?pickled|was moved, cast or given "
REFUSED += "other data|a loss reads|was not reduced|read-only"

ADDED_UP = {"sum", "mean", "dot", "vdot", "norm", "vector_norm", "matrix_norm", "linalg_norm", "linalg_vector_norm"}

LEFT_OUT = {
    *("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad", "grad_fn", "data"),
    *("share_memory_", "set_", "resize_", "resize_as_", "resize", "resize_as", "squeeze_", "unsqueeze_", "t_"),
    *("transpose_", "swapaxes_", "swapdims_", "as_strided_", "detach_", "requires_grad_", "pin_memory", "module_load"),
    *("storage", "untyped_storage", "data_ptr", "const_data_ptr", "mutable_data_ptr", "is_shared", "is_set_to"),
    *("__reduce_ex__", "__setstate__", "__deepcopy__", "__dir__", "__repr__", "__format__", "__array__", "__hash__"),
    *("__dlpack__", "to_dlpack", "__dlpack_device__", "__cuda_array_interface__", "record_stream", "is_pinned"),
    *("empty_like", "new_empty", "new_empty_strided", "new", "empty_permuted", "storage_type", "is_distributed"),
    *("names", "rename", "rename_", "align_to", "align_as", "refine_names", "has_names", "cuda", "xpu", "ipu", "hpu"),
    *("mtia", "to_mkldnn", "output_nr", "volatile", "retains_grad", "requires_grad", "is_leaf", "as_strided", "put_"),
    *("index_put_", "is_inference", "dim_order", "storage_offset", "choose_qparams_optimized", "orthogonal_"),
}
"""Which say nothing of values, change what a tensor is, or draw what nobody has written."""

KINDS = "cudnn", "miopen", "q_", "quantized", "mkldnn", "fbgemm", "sparse", "to_sparse", "native_", "rnn", "lstm", "gru"

SHAPES = (), (1,), (1, 1), (0,), (0, 3), (3, 0), (5,), (16,), (17,), (33,), (6, 6), (4, 4), (3, 1), (1, 5), (2, 3, 4)
SHAPES += (2, 3, 2, 2), (40, 3), (5, 16)
DTYPES = [torch.float32] * 4 + [torch.float64, torch.bfloat16, torch.float16, torch.complex64]
ODD_VALUES = 0.0, -0.0, math.inf, -math.inf, math.nan, 1e15


def laid_out(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    layout = rng.choice(["", "", "transposed", "channels last"])
    if layout == "transposed" and shape:
        return torch.randn(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    value = torch.randn(shape, dtype=dtype)
    return value.to(memory_format=torch.channels_last) if layout == "channels last" and len(shape) == 4 else value


class Part(nn.Module):
    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(values)

    def forward(self) -> Tensor:
        return sum((one * one.conj()).real.double().sum() for one in self.all)


class Net(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(10**9))
        shape, dtypes, self.parts = rng.choice(SHAPES), rng.choices(DTYPES, k=2), nn.ModuleList()
        for _ in range(rng.choice([1, 2])):
            shapes = [shape, *rng.choices([shape, *SHAPES], k=rng.randrange(1, 4))]
            self.parts.append(Part([laid_out(rng, each, rng.choice(dtypes)) for each in shapes]))
        self.parts[0].all[0].requires_grad_(rng.random() > 0.2)

    def forward(self) -> Tensor:
        return sum(part() for part in self.parts)


class Side:
    """A model between backward and step, of zero or plain (stage 0), and its tensors by name."""

    def __init__(self, seed: int, stage: int, like: int, partition: str) -> None:
        rng = random.Random(seed)
        self.like, self.model = like, Net(rng)
        self.ps = [*self.model.parameters()]
        self.eps = max(1e-5, *(4 * torch.finfo(param.dtype).eps for param in self.ps))
        adam = rng.random() < 0.5 and not any(param.is_complex() for param in self.ps)
        kind = partial(torch.optim.Adam, eps=1e-2) if adam else partial(torch.optim.SGD, momentum=0.9)
        self.optimizer, twin = kind(self.ps, lr=0.1), Net(random.Random(seed)) if rng.random() < 0.2 else nn.Module()
        if stage:
            how: Any = {"stage": stage, "auto_wrap_policy": ModuleWrapPolicy({Part})}
            self.model, self.optimizer = zero.setup(self.model, self.optimizer, partition=partition, **how)
        if stage == 3 and [*twin.parameters()]:
            self.twin = zero.FSDP(twin, partition="whole" if partition == "even" else "even")
        self.train()
        self.model().backward()
        self.named = {f"parameter {number}": param for number, param in enumerate(self.ps)}
        self.named |= {f"gradient {number}": one.grad for number, one in enumerate(self.ps) if one.grad is not None}
        self.named |= {f"twin {number}": param for number, param in enumerate(twin.parameters() if like == 3 else ())}
        for number, param in enumerate(self.ps if like == 3 else ()):
            state = self.optimizer.state.get(param, {}).items()
            self.named |= {f"{key} {number}": one for key, one in state if isinstance(one, Tensor) and key != "step"}

    def train(self) -> None:
        self.model().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def fill(self, seed: int, names: list[str]) -> Side:
        """Gives these tensors values that depend on the seed alone, and forgets the others."""
        rng, self.named, self.values = random.Random(seed), {name: self.named[name] for name in names}, {}
        torch.manual_seed(seed)
        for name, one in self.named.items():
            value = torch.randn(one.shape, dtype=one.dtype)
            if rng.random() < 0.1 and value.numel():
                value[(0,) * value.dim()] = rng.choice(ODD_VALUES)
            one.copy_(value.abs() if "sq" in name else value)
            self.values[name] = full_of(one)
        return self

    def names_in_forms(self) -> dict[str, Any]:
        also = [nn.Parameter(torch.ones(3))]
        also[0].grad = torch.arange(3.0)
        names: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "ps": self.ps, "also": also}
        names["gs"] = [param.grad for param in self.ps if param.grad is not None]
        names["full"] = lambda some: [torch.ones(one.shape, dtype=one.dtype) for one in some]
        names["grown"] = lambda some: [one.detach() for one in some]
        names |= {"torch": torch, "nn": nn, "F": nn.functional, "utils": nn.utils, "init": init, "dist": dist}
        return names | {"math": math, "numpy": numpy, "copy": copy, "get_ema_multi_avg_fn": get_ema_multi_avg_fn}


# ------------------------------------------------------------------------------------------------- what is called


@cache
def functions() -> list[tuple[str, Callable[..., Any]]]:
    spaces = torch, Tensor, nn.functional, torch.linalg, torch.special, torch.fft, init
    named = {f"torch.{name}": getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_")}
    for space, function in (
        (space, one) for space, some in get_overridable_functions().items() for one in some if space in spaces
    ):
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = "" if name != "__get__" else function.__self__.__name__
        public = bool(name) and (name[0] != "_" or name.startswith("__"))
        if public and name not in LEFT_OUT and not name.startswith(KINDS) and "quant" not in name:
            named[f"{getattr(space, '__name__', space)}.{name}"] = function
    return sorted(named.items(), key=lambda pair: pair[0])


NUMBERS = [2, 0, 0.5, -1, 3, True, 1, 0, -1]
NAMED: dict[str, list[Any]] = {"dim": [0, -1, 1, (0, 1)], "keepdim": [True], "dtype": [torch.float64], "alpha": [2]}
NAMED |= {"p": [1, 2, 3, math.inf], "ord": [1, 2, math.inf], "value": [0.5], "non_blocking": [True], "inplace": [True]}
NAMED |= {"memory_format": [torch.contiguous_format, torch.preserve_format, torch.channels_last], "out": [None]}


def arguments(rng: random.Random, one: Any, alike: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Some for any function, a sharded tensor among them."""
    shape = one.shape

    def plain(*shape: int) -> Tensor:
        kind = rng.choice([one.dtype, one.dtype, torch.float32, torch.float64, torch.int64])
        return (torch.randn(shape, dtype=torch.float64) * 2).to(kind)

    beside: list[Callable[[], Any]] = [
        *[lambda: rng.choice(alike)] * 3,
        *[lambda: rng.choice(NUMBERS)] * 3,
        *[lambda: plain(*shape)] * 2,
        lambda: torch.randn(shape) > 0,
        lambda: plain(*shape[-1:]),
        lambda: plain(*shape[:-1], 1) if shape else plain(),
        lambda: plain(),
        lambda: plain(1),
        lambda: plain(2, *shape),
        lambda: rng.choice([(-1,), slice(0, 2), None, ..., torch.float64]),
        lambda: torch.randint(0, max(shape[0], 1) if shape else 1, (2,)),
    ]
    form = rng.choice(["one", "one", "one", "one", "last", "list", "lists"])
    more = [rng.choice(beside)() for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
    if form == "last":
        more = [more[0], one, *more[1:]] if more else [one]
    elif form == "one":
        more = [one, *more]
    elif form == "list":
        more = [[one, *rng.choices([*alike, plain(*shape)], k=rng.randrange(2))], *more[:2]]
    else:
        more = [[one, rng.choice(alike)], [rng.choice(beside)(), rng.choice(beside)()], *more[:1]]
    how = {key: rng.choice(NAMED[key]) for key in rng.sample(sorted(NAMED), k=rng.choice([0, 0, 0, 0, 0, 1, 2]))}
    if "out" in how:
        how["out"] = rng.choice([torch.empty(0, dtype=one.dtype), plain(*shape), one, rng.choice(alike)])
    return more, how


WAYS = ".data;.detach(); * 2;.clone();.double(); != 0;.contiguous();.half();.norm();.sum();[0];.flatten();.T;.view(-1)"
WAYS += ";.reshape(-1);.cpu();.abs()"


class Called:
    """What one number has a side do. words: of it; result, or error; itself: whether it returned the tensor."""

    result: Any = None
    error: Exception | None = None

    def __init__(self, side: Side, seed: int) -> None:
        rng = random.Random(seed)
        graph, self.counts_if_torch_raises = rng.random() < 0.15, rng.random() < 0.02
        torch.manual_seed(seed)
        name = rng.choice([name for name in side.named if side.like == 3 or name.startswith("gradient")])
        way = rng.choice(WAYS.split(";")) if rng.random() < 0.3 else ""
        self.words, self.graph, self.itself = f"{name}{way}", graph, False
        self.exact, drawn_from = way not in (".norm()", ".sum()"), functions()
        with torch.set_grad_enabled(graph):
            try:
                one = eval(f"t{way}", {"t": side.named[name]})
                alike = [other for other in side.named.values() if other.shape == one.shape] or [one]
                if rng.random() < 0.85:  # as torch takes few of the arguments
                    called, function = rng.choice(drawn_from)
                    args, how = arguments(rng, one, alike)
                    word = called.rpartition(".")[2].removeprefix("_foreach_").strip("_")
                    self.exact &= word not in ADDED_UP
                    self.words = f"{called} of {self.words} {short(one)}, given {short([args, how])}"
                    torch.manual_seed(seed)
                    self.result = function(*args, **how)
                else:
                    form, exact = [*FORMS.items()][rng.randrange(len(FORMS))]
                    plain = torch.randn(one.shape).to(one.dtype), torch.randn(one.shape[-1:]).to(one.dtype)
                    names = side.names_in_forms() | {"t": one, "p": side.ps[int(name.split()[1])]}
                    names["o"] = rng.choice([*alike, *alike, *plain])
                    self.exact &= exact
                    self.words = f"`{form}` where t is {self.words} {short(one)}, o {short(names['o'])}"
                    torch.manual_seed(seed)
                    self.result = eval(compiled(form), names)
                self.itself = self.result is one
            except Exception as error:
                self.error = error
        self.words += ", with a graph" * graph


def short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__}({tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')})"
    if isinstance(value, dict):
        return str({key: short(one) for key, one in value.items()})
    return f"[{', '.join(map(short, value))}]" if isinstance(value, (list, tuple)) else f"{value!r:.60}"


# --------------------------------------------------------------------------------------------- beside one another


def difference(expected: Any, found: Any, rounds: float, where: str = "the result", graph: bool = False) -> str:
    """What is wrong; nothing if they are the same. Collective where a sharded tensor is found. rounds: by how much."""
    if isinstance(expected, numpy.ndarray) and isinstance(found, numpy.ndarray):
        expected, found = torch.from_numpy(expected.copy()), torch.from_numpy(found.copy())
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)) and len(expected) == len(found):
        each = zip(itertools.count(), expected, found, strict=False)
        return next(filter(None, [difference(*pair, rounds, f"{where}[{n}]", graph) for n, *pair in each]), "")
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        said = about(expected), about(found)
        lost = graph and expected.requires_grad and not found.requires_grad
        expected, found = full_of(expected), full_of(found)
        if lost:
            return f"{where} has no graph"
        if said[0] != said[1]:
            return f"{where} has {said[1]}, not {said[0]}"
        if torch.equal(bits(expected), bits(found)):
            return ""
        how = {"rtol": rounds, "atol": rounds, "equal_nan": True}
        close = torch.allclose(found.to(torch.complex128), expected.to(torch.complex128), **how)
        where += " in its last bits" if not rounds and torch.allclose(found, expected, equal_nan=True) else ""
        shown = [one.flatten()[:6].tolist() for one in (found, expected)]
        return "" if close and rounds else f"{where} is {shown[0]}, not {shown[1]}"
    if isinstance(expected, (int, float, complex, str, bytes, torch.dtype)):
        number = type(expected) is type(found) and isinstance(expected, (float, complex))
        close = number and torch.allclose(*torch.tensor([expected, found]), rtol=rounds, atol=rounds, equal_nan=True)
        return "" if close or expected == found else f"{where} is {found!r:.60}, not {expected!r:.60}"
    return "" if type(expected) is type(found) else f"{where} is {short(found)}, not {short(expected)}"


def about(one: Tensor) -> tuple[Any, ...]:
    """Strides as far as they say something."""
    strides = [stride for stride, size in zip(one.stride(), one.shape, strict=True) if size > 1 and one.numel()]
    return tuple(one.shape), one.dtype, strides


def full_of(one: Tensor) -> Tensor:
    """Collective for a sharded one."""
    with torch.no_grad():
        return one.detach().reshape(one.shape).as_subclass(Tensor).resolve_conj().clone()


def bits(one: Tensor) -> Tensor:
    """All of a tensor's, if nan is nan."""
    one = torch.view_as_real(one) if one.is_complex() else one
    if not one.is_floating_point():
        return one.clone(memory_format=torch.contiguous_format)
    return torch.stack(
        [
            one.nan_to_num(0.5, math.inf, -math.inf).double(),
            one.isnan().double(),
            (one.signbit() & ~one.isnan()).double(),
        ]
    )


def by_rank(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def wrong_with(stage: int, partition: str, draw: int) -> str:
    """Collective. What is wrong with a draw; nothing if it is as it should be."""
    seed = 1000 * draw
    sharded = Side(seed, stage, stage, partition)
    have = by_rank([*sharded.named])  # a rank that owns nothing of a parameter may have no state of it
    names = [name for name in sharded.named if all(name in one for one in have)]
    sharded.fill(seed, names)
    plain = None
    for number in range(seed, seed + 200):  # until torch itself takes what is drawn, or now and then does not
        plain = (plain or Side(seed, 0, stage, partition)).fill(seed, names)
        expected = Called(plain, number)
        known = any(re.search(pattern, f"at stage {stage}: {expected.words}") for pattern in KNOWN.values())
        if not known and (expected.error is None or expected.counts_if_torch_raises):
            break
        plain = None  # what has raised may have changed it
    found = Called(sharded, number)
    rounds = 0.0 if expected.exact else plain.eps
    try:
        wrong = outcome(expected, found)
        if not wrong and found.error is None:
            wrong = difference(expected.result, found.result, rounds, graph=expected.graph)
            if expected.exact and expected.itself != found.itself:
                wrong = wrong or f"the tensor itself was {'' if found.itself else 'not '}returned"
            wrong = first(wrong)
        for name in names if not wrong and (found.error is None or expected.error is None) else ():
            value = plain.named[name] if found.error is None else sharded.values[name]
            wrong = wrong or first(difference(value, sharded.named[name], rounds, name))
        if not wrong and found.error is None:
            wrong = after(plain, sharded, rounds)
    except Exception as error:
        raise AssertionError(f"{found.words}: {error!r:.300}") from error
    return wrong and f"{found.words}: {wrong}"


def first(wrong: str) -> str:
    """Collective. What is wrong on the first rank on which something is."""
    return next(filter(None, by_rank(wrong)), "")


def outcome(expected: Called, found: Called) -> str:
    """Collective. What is wrong with an error, or with none."""
    kinds = by_rank(found.error and f"{found.error!r:.300}")
    if len({kind and kind.partition("(")[0] for kind in kinds}) > 1:
        return f"one-sided: {kinds}"
    if expected.error is not None:
        return "" if found.error is not None else f"{short(found.result)}, not {expected.error!r:.300}"
    return "" if found.error is None or re.search(REFUSED, str(found.error)) else f"refused by {found.error!r:.300}"


def after(plain: Side, sharded: Side, rounds: float) -> str:
    """Collective. What is wrong with gradients that stand, and with the steps that follow."""
    grads = [
        [param.grad if param.grad is None else full_of(param.grad).contiguous() for param in side.ps]
        for side in (plain, sharded)
    ]
    if wrong := first(difference(*grads, rounds, "the standing gradients")):
        return wrong
    try:
        sharded.optimizer.step()
        problem = ""
    except Exception as error:
        problem = f"{error!r:.300}"
    problems = by_rank(problem)
    if any(problems):
        right = all(re.search(REFUSED, one) for one in problems)
        return "" if right else f"the step raises {problems}"
    plain.optimizer.step()
    for side in (plain, sharded):
        side.train()
    weights = zero.full_state_dict(sharded.model, to=None)
    found = [weights[name].contiguous() for name in plain.model.state_dict()]
    return first(difference([value.contiguous() for value in plain.ps], found, plain.eps, "after steps the parameters"))


def draws(rank: int, world: int, stage: int, partition: str, numbers: list[int]) -> None:
    warnings.simplefilter("ignore")  # of how much is gathered, and of what is deprecated
    found = []
    for number in numbers:
        try:
            found.append((number, wrong_with(stage, partition, number)))
        except Exception as error:
            raise AssertionError(f"ZERO_DRAW={number} fails, after {found}") from error
    told = [f"ZERO_DRAW={number}: {wrong}" for number, wrong in found if wrong]
    assert not told, "\n".join(told)


@pytest.mark.slow
@matrix.combined("stage, world, partition, transport", [3, 2], [1, 2, 3, 4], ["even", "whole"], TRANSPORTS)
def test_what_is_drawn_is_as_with_full_tensors_or_raises_on_every_rank(stage, world, partition, transport):
    begin = FIRST + random.Random(f"{stage} {world} {partition} {transport}").randrange(10**9)
    one = os.environ.get("ZERO_DRAW")
    numbers = [int(one)] if one else [*range(begin, begin + COUNT)]
    ranks.run(calling, world, (transport, draws, stage, partition, numbers), timeout=600)
