"""Digests, by which tensors on the device are told from what was written there."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of which a digest is made at a time: it needs 16 bytes for each.
_CHUNK = 2**22

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def digest(tensor: Tensor) -> Tensor:
    """Returns 64 bits, on the tensor's device, that differ if any element of a flat tensor has other bits (but for one
    case in 2**64).

    The sum of the elements' bits, each mixed with its position as in splitmix64 (G. Steele et al., Fast Splittable
    Pseudorandom Number Generators, 2014, section 4).
    """
    words = tensor.view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(words.split(_CHUNK)):
        begin = number * _CHUNK
        mixed = torch.arange(begin, begin + len(chunk), device=tensor.device).mul_(_ODD).add_(chunk)
        for shift, factor in _ROUNDS:
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        total += mixed.bitwise_xor_(mixed >> 31).sum()
    return total


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_ODD = _signed(0x9E3779B97F4A7C15)
_ROUNDS = [(30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB))]
