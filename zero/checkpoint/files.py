"""One safetensors file, written as a stream.

    8 bytes     length of the header
    header      JSON: every tensor's dtype, shape and position
    data        the tensors, one after another

The index says where in a file a tensor is, so that no reader needs the header. It has a checksum (CRC-32) of every
BLOCK bytes, so that a reader of a range can check that range without reading the rest.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.format import NAMES
from zero.checkpoint.storage import Place

BLOCK = 1 << 22
"""Bytes a checksum."""

BUFFER = 1 << 24
"""Bytes that are copied at a time where tensors are not read or written in place. A multiple of BLOCK."""

CACHED = 1 << 20
"""Bytes that stay in the processor's cache between computing their checksum and copying them."""

# The fewest bytes for which a progress bar is shown.
_LONG = 1 << 30


@dataclass(frozen=True)
class Chunk:
    """A tensor to be written under a key. `values` yields its elements, flat, perhaps in several tensors."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


# Not by the safetensors package, which does not sync to disk, takes no streams and has no checksums.
def write(
    place: Place, chunks: Sequence[Chunk], tick: Callable[[int], object]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Writes the chunks; they are on disk when it returns. Returns the file's entry in the index, and the first byte of
    each chunk by its key. tick: called with the number of bytes after each write."""
    chunks = sorted(chunks, key=lambda chunk: -chunk.dtype.itemsize)  # so that every tensor is aligned
    ends = accumulate(chunk.nbytes for chunk in chunks)
    offsets = {chunk.key: [end - chunk.nbytes, end] for chunk, end in zip(chunks, ends, strict=True)}
    tensors = {
        chunk.key: {"dtype": NAMES[chunk.dtype], "shape": chunk.shape, "data_offsets": offsets[chunk.key]}
        for chunk in chunks
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    copies, sums, at = buffer(), list[int](), 0
    tensors_bytes = (host_bytes(values, copies) for chunk in chunks for values in chunk.values())
    with place.write() as file:
        for data in chain([memoryview(head)], chain.from_iterable(tensors_bytes)):
            begin = at
            while data:
                some = data[: min(CACHED, BLOCK - at % BLOCK)]
                if at % BLOCK == 0:
                    sums.append(0)
                sums[-1] = zlib.crc32(some, sums[-1])
                file.write(some)
                data, at = data[len(some) :], at + len(some)
            if begin > 0:  # not for the header
                tick(at - begin)
    assert at == len(head) + sum(chunk.nbytes for chunk in chunks), "chunks have yielded too few bytes, or too many"
    return {"bytes": at, "crc32": sums}, {key: len(head) + start for key, (start, _) in offsets.items()}


def buffer() -> Callable[[], Tensor]:
    """BUFFER bytes on the CPU, which are there from the first call on."""
    return cache(lambda: torch.empty(BUFFER, dtype=torch.uint8, device="cpu"))


def host_bytes(flat: Tensor, copies: Callable[[], Tensor]) -> Iterator[memoryview]:
    """A flat tensor's bytes: on the CPU its own memory, from other devices a buffer of copies; valid until the next."""
    for some in flat.detach().split(BUFFER // flat.element_size()) if flat.numel() else ():
        here = some.is_cpu and some.is_contiguous()
        yield as_bytes(some if here else copies().view(some.dtype)[: len(some)].copy_(some))


@contextmanager
def progress(what: str, nbytes: int, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """The function to call with the bytes that are done. It shows a bar on a terminal, if tqdm is installed."""
    if shown and nbytes >= _LONG and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
        with importlib.import_module("tqdm").tqdm(total=nbytes, desc=what, unit="B", unit_scale=True) as bar:
            yield bar.update
    else:
        yield lambda done: None


def checksum(flat: Tensor) -> int:
    found = 0
    for data in host_bytes(flat, buffer()):
        found = zlib.crc32(data, found)
    return found


def as_bytes(flat: Tensor) -> memoryview:
    """The memory of a flat, contiguous tensor on the CPU."""
    # Not by `numpy()`, after which torch no longer lets the tensor's storage be resized, as FSDP does with shards.
    memory: Any = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    memory.tensor = flat  # lives as long as the memoryview
    return memoryview(memory).cast("B")
