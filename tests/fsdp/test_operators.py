"""Every function of torch that can be overridden, of sharded tensors between steps: as of the full ones, or refused on
every rank; what it writes arrives."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

import matrix
import ranks
import zero

FUNCTIONS = None if matrix.WHOLE else 60
"""How many are drawn; all by `make matrix`."""

OTHERS = {
    *("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad", "grad_fn", "data"),
    *("share_memory_", "set_", "resize_", "resize_as_", "resize", "resize_as", "squeeze_", "unsqueeze_", "t_"),
    *("transpose_", "swapaxes_", "swapdims_", "as_strided_", "detach_", "requires_grad_", "pin_memory", "module_load"),
    *("storage", "untyped_storage", "data_ptr", "const_data_ptr", "mutable_data_ptr", "is_shared", "is_set_to"),
    *("__reduce_ex__", "_reduce_ex_internal", "__setstate__", "__deepcopy__", "__dir__", "__repr__", "__format__"),
    *("__dlpack__", "to_dlpack", "__dlpack_device__", "__cuda_array_interface__", "record_stream", "is_pinned"),
    *("empty_like", "new_empty", "new_empty_strided", "new", "empty_permuted", "storage_type", "is_distributed"),
    *("names", "rename", "rename_", "align_to", "align_as", "refine_names", "has_names", "cuda", "xpu", "ipu", "hpu"),
    *("mtia", "to_mkldnn", "cpu", "type", "output_nr", "volatile", "retains_grad", "requires_grad", "is_leaf", "imag"),
    *("index_put_", "put_", "is_inference", "dim_order", "storage_offset", "choose_qparams_optimized", "__hash__"),
}
"""Which say nothing of values, change what a tensor is, or draw what nobody has written."""

KINDS = "cudnn", "miopen", "q_", "quantized", "mkldnn", "fbgemm", "sparse", "to_sparse", "native_", "rnn", "lstm", "gru"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = (6, 6), (7,), (2, 3, 4), (5,), (3, 1)
        self.all = nn.ParameterList(torch.randn(shape) + 0.1 for shape in shapes)

    def forward(self, factor: Tensor) -> Tensor:
        return sum((param * param).sum() for param in self.all) * factor


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    spaces = torch, Tensor, nn.functional, torch.linalg, torch.special, torch.fft
    for space, found in get_overridable_functions().items():
        for function in found if space in spaces else ():
            name = getattr(function, "__name__", "")
            if name in ("__get__", "__set__", "__delete__"):
                name = "" if name != "__get__" else function.__self__.__name__
            if name and not name.startswith(("_", *KINDS)) and name not in OTHERS and "quant" not in name:
                yield f"{getattr(space, '__name__', space)}.{name}", function


def calls(one: Any, like: Tensor) -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(7)
    plain, row = torch.rand(like.shape), torch.rand(like.shape[-1:])
    numbers = {f"of {number}": (one, number) for number in (2, 0, 0.5, -1)}
    return numbers | {
        "alone": (one,),
        "of two": (one, one),
        "of dimensions": (one, 0, 1),
        "beside a full one": (one, plain),
        "beside a row": (one, row),
        "of a mask": (one, plain > 0.5, 1.5),
        "beside two": (one, plain, plain),
        "of a full one": (plain, one),
        "of a list": ([one, one],),
    }


def same(expected: Any, found: Any) -> bool:
    """Collective where a sharded tensor is found."""
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return False
        full = found.detach().reshape(found.shape)  # of a sharded one a copy that is gathered
        return torch.allclose(full, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    if isinstance(expected, float):
        return math.isclose(expected, found, rel_tol=1e-5, abs_tol=1e-6) or (expected != expected and found != found)
    return expected == found if isinstance(expected, (int, str)) else type(expected) is type(found)


def answer(function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    torch.manual_seed(11)
    try:
        with torch.no_grad():
            return function(*given)
    except Exception as error:
        return error


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "world"), [(2, 2), (3, 2), (3, 3)])
@ranks.on("world", timeout=600)
def test_it_answers_as_the_full_tensor_or_raises_on_every_rank(rank, world, stage):
    warnings.simplefilter("ignore")  # of how much is gathered, and of what is deprecated
    rng, sharded, plain = random.Random(stage), Net(), Net()
    model, _ = zero.setup(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), stage=stage)
    for each in (model, plain):
        each(torch.ones(())).backward()
    pairs = [(one.grad, other.grad) for one, other in zip(sharded.all, plain.all, strict=True)]
    pairs += [*zip(sharded.all, plain.all, strict=True)] if stage == 3 else []
    values = [other.detach().clone() for _, other in pairs]
    drawn = sorted(functions(), key=lambda pair: pair[0])
    for name, function in drawn if FUNCTIONS is None else rng.sample(drawn, FUNCTIONS):
        one, other = rng.choice(pairs)
        for label in calls(other, other):
            expected = answer(function, calls(other, other)[label])
            if not isinstance(expected, Exception):
                found = answer(function, calls(one, other)[label])
                told = f"stage {stage}: {name} {label}: {found!r:.300}, not {expected!r:.300}"
                if isinstance(found, Exception):
                    assert "writes into a copy" in str(found) or "needs the full tensor" in str(found), told
                else:
                    assert same(expected, found), told
                    for number, (written, full) in enumerate(pairs):
                        assert same(full.detach(), written), f"{told}; tensor {number}"
            with torch.no_grad():
                for (written, full), value in zip(pairs, values, strict=True):
                    full.copy_(value), written.copy_(value)
