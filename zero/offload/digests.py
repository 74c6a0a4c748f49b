"""Digests, by which tensors on the device are told from what was written there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# Bytes of which a digest is made at a time: it needs twice as many, which stay in a GPU's cache.
_CHUNK = 2**24

# As signed numbers, as torch has them.
_ODD = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = [(30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)]


def digest(tensor: Tensor) -> Tensor:
    """Returns 64 bits, on the tensor's device, that differ if any element of a flat tensor has other bits (but for one
    case in 2**64).

    The sum of the tensor's words of 64 bits, each mixed with its position as in splitmix64 (G. Steele et al., Fast
    Splittable Pseudorandom Number Generators, 2014, section 4). It reads and writes 26 times the tensor's bytes.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(tensor.view(torch.uint8).split(_CHUNK)):
        mixed, begin = pad(chunk, (0, -len(chunk) % 8)).view(torch.int64), number * _CHUNK // 8
        mixed.add_(torch.arange(begin, begin + len(mixed), device=tensor.device), alpha=_ODD)
        for shift, factor in _ROUNDS:
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        total += mixed.bitwise_xor_(mixed >> 31).sum()
    return total
