"""Comparisons of what two trainings came to."""

from typing import Any

import torch
from torch import Tensor, nn

import gpus


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """The same bits, or within `tolerance` of the largest value. Devices may differ."""
    found = found.to(expected.device)
    if torch.equal(found, expected):
        return True
    return found.shape == expected.shape and bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def same(got: Any, expected: Any, where: str = "it") -> None:
    """Asserts that two nests of dicts, lists, tensors and values are equal: types, dtypes, shapes, and every bit.

    Tensors may be on different devices.
    """
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), f"{where} is a {type(got).__name__}, not a tensor"
        assert got.dtype == expected.dtype, f"{where} is {got.dtype}, not {expected.dtype}"
        assert got.shape == expected.shape, f"{where} is {list(got.shape)}, not {list(expected.shape)}"
        got, expected = plain(got).cpu(), plain(expected).cpu()
        assert torch.equal(got, expected), f"{where} differs by at most {(got.float() - expected.float()).abs().max()}"
    elif isinstance(expected, dict):
        assert isinstance(got, dict), f"{where} is a {type(got).__name__}, not a dict"
        assert set(got) == set(expected), f"{where} has {sorted(map(str, got))}, not {sorted(map(str, expected))}"
        for key in expected:
            same(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected), f"{where} is a {type(got).__name__}, not a {type(expected).__name__}"
        assert len(got) == len(expected), f"{where} has {len(got)} entries, not {len(expected)}"
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            same(one, other, f"{where}[{index}]")
    else:
        assert type(got) is type(expected), f"{where} is a {type(got).__name__}, not a {type(expected).__name__}"
        assert got == expected, f"{where} is {got}, not {expected}"


def same_where_the_cpu_steps(got: Any, expected: Any, where: str = "it") -> None:
    """As `same`; on GPUs within rounding, where the optimizer of one of the two steps on the CPU."""
    if gpus.ON and isinstance(got, dict):
        assert got.keys() == expected.keys()
        for key, value in got.items():
            same_where_the_cpu_steps(value, expected[key], f"{where}[{key!r}]")
    elif gpus.ON:
        rtol = 8e-3 if isinstance(got, Tensor) and got.dtype == torch.bfloat16 else 1e-4  # a unit in the last place
        torch.testing.assert_close(
            got, expected, rtol=rtol, atol=1e-5, check_device=False, msg=lambda told: f"{where}: {told}"
        )
    else:
        same(got, expected, where)


def same_weights(got: nn.Module, expected: nn.Module) -> None:
    for (name, one), (_, other) in zip(got.named_parameters(), expected.named_parameters(), strict=True):
        same(one.detach(), other.detach(), name)


def plain(shard: Tensor) -> Tensor:
    """What this rank has of a sharded parameter or gradient, as a plain tensor."""
    return shard.as_subclass(Tensor)
